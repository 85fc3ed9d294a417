"""Models as graphs by torch.export: traced, and read from a `.pt2` without running what that may hold."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from effloop.errors import CheckpointError


def trace(model: nn.Module, example: Tensor, *, dynamic: bool) -> ExportedProgram:
    """The graph of a model in eval mode.

    Args:
        model: on the CPU.
        example: (N, 3, H, W); if `dynamic`, N is 2 or more: 0 and 1 would become constants of the graph.
        dynamic: whether it takes any number of images.
    """
    shapes = ({0: Dim("batch", min=1)},) if dynamic else None
    with torch.no_grad():
        return torch.export.export(model, (example,), dynamic_shapes=shapes)


class Half(nn.Module):
    """A model that computes in float16, between float32 input and output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.half()

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) float32 -> (N, K) float32."""
        outputs: Tensor = self.model(images.half())
        return outputs.float()


class Contiguous(nn.Module):
    """A graph, which was traced for images in rows and doesn't know other layouts."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph

    def train(self, mode: bool = True) -> Contiguous:
        return self  # the graph is that of eval mode, and raises

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.graph(images.contiguous())
        return outputs


# Reading a `.pt2` without running what it may hold: pickles, libraries, and text that torch.export evaluates.

_MODEL, _INPUTS = "models/model.json", "data/sample_inputs/model.pt"
_WEIGHTS, _CONSTANTS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"
_PARTS = re.compile(
    "|".join(map(re.escape, (_MODEL, _INPUTS, _WEIGHTS, _CONSTANTS)))
    + r"|data/weights/weight_\d+|data/constants/tensor_\d+|extra/[\w.]+"
    + r"|archive_format|archive_version|byteorder|\.data/\w+"
)
"""No compiled library (data/aotinductor), no pickled object, nothing of older layouts, which are pickles."""

_TEXT = re.compile(r"[\w.,\-> ]*")
"""Names and strings, some of which become part of generated code: without parentheses they call nothing."""

_SIZES = re.compile(
    r"(?:(?:Symbol|Integer|Add|Mul|Pow|Min|Max|Mod|PythonMod|FloorDiv|CleanDiv|CeilDiv|ModularIndexing)\("
    r"|'\w+'|-?\d+|(?:positive|nonnegative|integer)=True|[), ])*"
)
"""Sizes that depend on the batch, which sympy evaluates as Python."""

_OPERATIONS = re.compile(
    r"torch\.ops\.(?:aten|torchvision|prims)\.\w+\.\w+|torch\.sym_\w+|math\.\w+"
    r"|torch\.ops\.higher_order\.wrap_with_(?:set_grad_enabled|autocast)"
    r"|_operator\.(?:add|sub|mul|neg|truediv|floordiv|mod|pow|eq|ne|lt|le|gt|ge|getitem|and_|or_|not_)"
)
"""What a graph may call: others of torch's functions read files and load code."""

_FREE = {"metadata", "torch_version"}
"""Keys of text that is kept and never evaluated."""

_TREES = {"in_spec", "out_spec"}
"""Keys of nested JSON, which can name modules to import."""

_TREE = re.compile(
    r'(?:"type"|"context"|"children_spec"|"builtins\.(?:tuple|list|dict)"|"null"|"\[\]"|null|[\d\[\]{}:, ])*'
)


def load(path: Path) -> ExportedProgram:
    """The program in a file.

    Raises:
        CheckpointError: the file holds something else than what `torch.export.save` writes for a model of images.
    """
    # torch.export.load would try older layouts if this fails.
    from torch.export.pt2_archive._package import load_pt2

    reason = next(_reasons(_reader(path)), None)
    if reason is not None:
        raise CheckpointError(f"{path} is refused: {reason}, and reading may run code; export the run again")
    program: ExportedProgram = load_pt2(path).exported_programs["model"]
    return program


def extra_file(path: Path, name: str) -> str | None:
    """The text of an extra file, without loading the model."""
    reader = _reader(path)
    return reader.read_string(f"extra/{name}") if f"extra/{name}" in reader.get_file_names() else None


def _reader(path: Path) -> Any:
    """The archive as torch.export reads it: another reader of zip files may find other parts in the same file."""
    from torch.export.pt2_archive._package import PT2ArchiveReader

    return PT2ArchiveReader(str(path))


def _reasons(reader: Any) -> Iterator[str]:
    """Why a file is refused."""
    names = reader.get_file_names()
    yield from (f"it has a part '{name}'" for name in names if not _PARTS.fullmatch(name))
    if len({name.lower() for name in names}) < len(names):  # torch finds parts whatever their letters' case
        yield "it has two parts of one name"
    for part in (_WEIGHTS, _CONSTANTS):
        tensors = json.loads(reader.read_string(part))["config"].values()
        if any(each["use_pickle"] is not False or not _PARTS.fullmatch(_beside(part, each)) for each in tensors):
            yield f"{part} names a pickle"
    try:
        torch.load(io.BytesIO(reader.read_bytes(_INPUTS)), weights_only=True)
    except Exception:  # whatever it is, torch.export would read it again without weights_only
        yield f"{_INPUTS} holds more than tensors"
    yield from _evaluated(json.loads(reader.read_string(_MODEL)), "")


def _beside(part: str, tensor: Any) -> str:
    return f"{part.rpartition('/')[0]}/{tensor['path_name']}"


def _evaluated(value: Any, key: str) -> Iterator[str]:
    """Why the text of a graph is refused; `key` is what holds `value`."""
    if key in _FREE:
        return
    if key == "guards_code" and value:
        yield "its graph has conditions in Python"
    if isinstance(value, dict):
        yield from (f"its graph has a name '{name}'" for name in value if not _TEXT.fullmatch(name))
        for name, each in value.items():
            yield from _evaluated(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from _evaluated(each, key)
    elif isinstance(value, str):
        allowed = {"expr_str": _SIZES, "target": _OPERATIONS}.get(key, _TREE if key in _TREES else _TEXT)
        if not allowed.fullmatch(value):
            yield f"its graph has {key} '{value[:80]}'"

"""Formats that models are exported to: interface, metadata and one class each."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from effloop.errors import CheckpointError, ConfigError, EffLoopError, optional_package
from effloop.system.hardware import has_vnni

VERSION = 1  # version of the metadata
KEY = "effloop"  # under which a file keeps its metadata
INPUT, OUTPUT = "images", "outputs"  # names of a model's input and output, where a format has names


def read_metadata(text: str | None, path: Path) -> dict[str, Any]:
    """Metadata of a file; a CheckpointError where it has none, or some of another version."""
    try:
        found = json.loads(text or "null")
        version = found["version"]
        complete = {"config", "classes", "num_outputs", "provenance", "input"} <= set(found)
    except (ValueError, TypeError, LookupError):
        raise CheckpointError(f"{path} has no metadata of EffLoop's; name a file by effloop export") from None
    if version != VERSION or not complete:
        raise CheckpointError(f"{path} has metadata of version {version}, EffLoop reads {VERSION}; export it again")
    return dict(found)


@dataclass(frozen=True)
class Format(ABC):
    """Writes a model of (N, 3, H, W) float32 images and (N, K) float32 outputs to a file, and runs it from there."""

    dynamic: bool = True  # whether the file takes batches of any size; else of the example's
    half: bool = False  # whether weights are stored, and in some formats computed, in float16

    suffix: ClassVar[str]  # of the file's name
    fuses: ClassVar[bool] = True  # whether the model is re-parameterised and its BatchNorm fused before
    int8: ClassVar[bool] = False  # whether it can be quantized

    @abstractmethod
    def convert(self, model: nn.Module, example: Tensor) -> Any:
        """The model as what `save` writes; `model` is on the CPU, and may be changed."""

    def quantize(self, program: Any, batches: Iterable[Tensor]) -> Any:
        """A converted model with int8 weights and activations, calibrated on some batches."""
        raise NotImplementedError

    @abstractmethod
    def save(self, program: Any, path: Path, metadata: str) -> None:
        """Write what `convert` or `quantize` gave."""

    @abstractmethod
    def read_metadata(self, path: Path) -> str | None:
        """The metadata of a file; None if it has none."""

    @abstractmethod
    def open(self, path: Path, device: torch.device, network: Callable[[], nn.Module]) -> nn.Module:
        """The model in a file, of images on any device, which computes on `device` if its runtime can; `network` builds
        the model before training, for a format that has only weights.
        """

    @classmethod
    def files(cls, path: Path) -> tuple[Path, ...]:
        """All files that `save` writes for a path, that path first."""
        return (path,)


def format_of(path: Path) -> type[Format] | None:
    """The format that a file's name ends like."""
    return {kind.suffix: kind for kind in formats.values()}.get(path.suffix)


@contextmanager
def one_line_errors(doing: str) -> Iterator[None]:
    """Silences exporters and runtimes, and makes their errors a ConfigError of one line."""
    disabled = logging.root.manager.disable
    try:
        with open(os.devnull, "w") as void, redirect_stdout(void), redirect_stderr(void), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.ERROR)
            yield
    except (EffLoopError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # of several packages, of any kind
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # OpenVINO's first lines are places in its sources.
        line = "no reason given" if not lines else lines[-1 if lines[0].startswith("Exception from ") else 0]
        raise ConfigError(f"{doing}: {type(error).__name__}: {line}") from error
    finally:
        logging.disable(disabled)


# torch.export: models as graphs, traced, and read from a file.


def trace(model: nn.Module, example: Tensor, *, dynamic: bool) -> ExportedProgram:
    """The graph of a model on the CPU in eval mode, for any number of images if `dynamic`."""
    # Of an example of two or more: 0 and 1 would become constants of the graph.
    shapes = ({0: Dim("batch", min=1)},) if dynamic else None
    with torch.no_grad():
        return torch.export.export(model, (example,), dynamic_shapes=shapes)


class Half(nn.Module):
    """A model that computes in float16, between float32 input and output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.half()

    def forward(self, images: Tensor) -> Tensor:
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


class Pt2(Format):
    """torch.export: a graph of ATen operations. `half`: float16 throughout, which CPUs without it compute slowly."""

    suffix = ".pt2"

    def convert(self, model: nn.Module, example: Tensor) -> ExportedProgram:
        program = trace(Half(model) if self.half else model, example, dynamic=self.dynamic)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # paths of this machine, and a third of a small file
        return program

    def save(self, program: Any, path: Path, metadata: str) -> None:
        torch.export.save(program, path, extra_files={f"{KEY}.json": metadata})

    def read_metadata(self, path: Path) -> str | None:
        reader, name = _reader(path), f"extra/{KEY}.json"
        return reader.read_string(name) or None if name in reader.get_file_names() else None

    def open(self, path: Path, device: torch.device, network: Callable[[], nn.Module]) -> nn.Module:
        from torch.export.pt2_archive._package import load_pt2  # torch.export.load tries older layouts if this fails

        if reason := next(_reasons(_reader(path)), None):
            raise CheckpointError(f"{path} is refused: {reason}, and reading may run code; export the run again")
        program = load_pt2(path).exported_programs["model"]
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        return Contiguous(program.module())


# Reading a `.pt2` without running what it may hold: pickles, libraries, and text that torch.export evaluates.

_MODEL, _INPUTS = "models/model.json", "data/sample_inputs/model.pt"
_WEIGHTS, _CONSTANTS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"
# No compiled library (data/aotinductor), no pickled object, nothing of older layouts, which are pickles.
_PARTS = re.compile(
    "|".join(map(re.escape, (_MODEL, _INPUTS, _WEIGHTS, _CONSTANTS)))
    + r"|data/weights/weight_\d+|data/constants/tensor_\d+|extra/[\w.]+"
    + r"|archive_format|archive_version|byteorder|\.data/\w+"
)
# Names and strings, some of which become part of generated code: without parentheses they call nothing.
_TEXT = re.compile(r"[\w.,\-> ]*")
# Sizes that depend on the batch, which sympy evaluates as Python.
_SIZES = re.compile(
    r"(?:(?:Symbol|Integer|Add|Mul|Pow|Min|Max|Mod|PythonMod|FloorDiv|CleanDiv|CeilDiv|ModularIndexing)\("
    r"|'\w+'|-?\d+|(?:positive|nonnegative|integer)=True|[), ])*"
)
# What a graph may call: others of torch's functions read files and load code.
_OPERATIONS = re.compile(
    r"torch\.ops\.(?:aten|torchvision|prims)\.\w+\.\w+|torch\.sym_\w+|math\.\w+"
    r"|torch\.ops\.higher_order\.wrap_with_(?:set_grad_enabled|autocast)"
    r"|_operator\.(?:add|sub|mul|neg|truediv|floordiv|mod|pow|eq|ne|lt|le|gt|ge|getitem|and_|or_|not_)"
)
_FREE = {"metadata", "torch_version"}  # keys of text that is kept and never evaluated
_TREES = {"in_spec", "out_spec"}  # keys of nested JSON, which can name modules to import
_TREE = re.compile(
    r'(?:"type"|"context"|"children_spec"|"builtins\.(?:tuple|list|dict)"|"null"|"\[\]"|null|[\d\[\]{}:, ])*'
)


def _reader(path: Path) -> Any:
    """The archive as torch.export reads it: another reader of zip files may find other parts in the same file."""
    from torch.export.pt2_archive._package import PT2ArchiveReader

    return PT2ArchiveReader(str(path))


def _reasons(reader: Any) -> Iterator[str]:
    names = reader.get_file_names()
    yield from (f"it has a part '{name}'" for name in names if not _PARTS.fullmatch(name))
    if len({name.lower() for name in names}) < len(names):  # torch finds parts whatever their letters' case
        yield "it has two parts of one name"
    for part in (_WEIGHTS, _CONSTANTS):
        for each in json.loads(reader.read_string(part))["config"].values():
            name = f"{part.rpartition('/')[0]}/{each['path_name']}"
            if each["use_pickle"] is not False or not _PARTS.fullmatch(name):
                yield f"{part} names a pickle"
    try:
        torch.load(io.BytesIO(reader.read_bytes(_INPUTS)), weights_only=True)
    except Exception:  # whatever it is, torch.export would read it again without weights_only
        yield f"{_INPUTS} holds more than tensors"
    yield from _evaluated(json.loads(reader.read_string(_MODEL)), "")


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


# ONNX, OpenVINO and weights alone.


class Onnx(Format):
    """ONNX. `half`: float16 throughout; ONNX Runtime computes some of it in float32 on a CPU."""

    suffix = ".onnx"
    int8 = True

    def convert(self, model: nn.Module, example: Tensor) -> Any:
        onnx = _package("onnx")
        _package("onnxscript")
        program = trace(Half(model) if self.half else model, example, dynamic=self.dynamic)
        exported = torch.onnx.export(program, (), input_names=[INPUT], output_names=[OUTPUT], verbose=False)
        if exported is None:
            raise ConfigError("to=onnx: PyTorch's exporter gave nothing; use another format")
        proto = exported.model_proto
        for part in (*proto.graph.node, *proto.graph.value_info, *proto.functions, *proto.graph.initializer):
            del part.metadata_props[:]  # stack traces with paths of this machine; a third of a small file
        if proto.ByteSize() >= 1 << 31:  # a limit of protobuf
            raise ConfigError(f"to=onnx: {proto.ByteSize():,} bytes are too many for one file; use to=pt2")
        onnx.checker.check_model(proto)
        return proto

    def quantize(self, program: Any, batches: Iterable[Tensor]) -> Any:
        """Static: int8 weights for each channel, uint8 activations for each tensor, as QDQ nodes."""
        onnx = _package("onnx")
        quantization = _package("onnxruntime.quantization")
        prepare = _package("onnxruntime.quantization.shape_inference")
        feeds = ({INPUT: batch.contiguous().cpu().numpy()} for batch in batches)
        with TemporaryDirectory(prefix="effloop-int8-") as folder:
            before, after = Path(folder) / "before.onnx", Path(folder) / "after.onnx"
            onnx.save(program, before)
            # Symbolic shapes changed no int8 output of four convnets; where they fail, a file is left in the cwd.
            prepare.quant_pre_process(before, before, skip_symbolic_shape=True)
            # The first and last stay float32: the default `cnn` agreed on 99.4 % of 341 photographs, before on 97.9 %.
            layers = [node.name for node in onnx.load(before).graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
            quantization.quantize_static(
                before,
                after,
                SimpleNamespace(get_next=lambda: next(feeds, None)),
                quant_format=quantization.QuantFormat.QDQ,
                per_channel=True,
                nodes_to_exclude=[*layers[:1], *layers[-1:]],
                reduce_range=not has_vnni(),  # without it, pairs of products saturate in 16 bits
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
            )
            return onnx.load(after)

    def save(self, program: Any, path: Path, metadata: str) -> None:
        onnx = _package("onnx")
        onnx.helper.set_model_props(program, {KEY: metadata})
        onnx.save(program, path)

    def read_metadata(self, path: Path) -> str | None:
        found: str | None = _session(path, torch.device("cpu")).get_modelmeta().custom_metadata_map.get(KEY)
        return found

    def open(self, path: Path, device: torch.device, network: Callable[[], nn.Module]) -> nn.Module:
        session = _session(path, device)
        return NumpyModel(lambda images: session.run([OUTPUT], {INPUT: images})[0])


class NumpyModel(nn.Module):
    """A function of arrays as a module: (N, 3, H, W) float32 on any device -> (N, K) float32 there."""

    def __init__(self, run: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> None:
        super().__init__()
        self.run = run

    def forward(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.run(images.contiguous().cpu().numpy())).to(images.device)


def _session(path: Path, device: torch.device) -> Any:
    """A file opened by ONNX Runtime, with as many threads as torch has."""
    ort = _package("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    wanted = ["CUDAExecutionProvider"] * (device.type == "cuda") + ["CPUExecutionProvider"]
    providers = [name for name in wanted if name in ort.get_available_providers()]
    return ort.InferenceSession(path, options, providers=providers)


class OpenVino(Onnx):
    """OpenVINO. `half`: weights are stored as float16, which is OpenVINO's own default; it computes in float32."""

    suffix = ".xml"

    def convert(self, model: nn.Module, example: Tensor) -> Any:
        _openvino()
        return Onnx(self.dynamic).convert(model, example)

    def save(self, program: Any, path: Path, metadata: str) -> None:
        # By the core, which is what openvino.convert_model uses for ONNX, without the telemetry around it.
        model = _openvino().Core().read_model(program.SerializeToString())
        model.set_rt_info(metadata, KEY)
        _openvino().save_model(model, path, compress_to_fp16=self.half)

    def read_metadata(self, path: Path) -> str | None:
        model = _read_openvino(_openvino().Core(), path)
        return str(model.get_rt_info(KEY).value) if model.has_rt_info(KEY) else None

    def open(self, path: Path, device: torch.device, network: Callable[[], nn.Module]) -> nn.Module:
        core = _openvino().Core()
        # Else a CPU with bfloat16 computes in it, where outputs have two or three digits.
        options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
        request = core.compile_model(_read_openvino(core, path), "CPU", options).create_infer_request()
        # Copied, as the next call writes to the same memory.
        return NumpyModel(lambda images: request.infer([images], share_inputs=True)[0].copy())

    @classmethod
    def files(cls, path: Path) -> tuple[Path, ...]:
        return path, path.with_suffix(".bin")


def _read_openvino(core: Any, path: Path) -> Any:
    """The model in a file, whose weights have to be beside it."""
    weights = path.with_suffix(".bin")
    if not weights.is_file():
        raise CheckpointError(
            f"{path} can't be read: its weights, {weights.name}, are not there; copy both, or export again"
        )
    return core.read_model(path)


class StateDict(Format):
    """Weights for the model as EffLoop, timm or torchvision builds it. `half`: matrices and filters are stored as
    float16; norms and biases stay float32, and the model computes in it.
    """

    suffix = ".safetensors"
    fuses = False

    def convert(self, model: nn.Module, example: Tensor) -> dict[str, Tensor]:
        _package("safetensors", "state_dict")
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
        if not self.half:
            return tensors
        return {
            name: each.half() if each.ndim > 1 and each.is_floating_point() else each for name, each in tensors.items()
        }

    def save(self, program: Any, path: Path, metadata: str) -> None:
        path.write_bytes(_package("safetensors.torch", "state_dict").save(program, {"format": "pt", KEY: metadata}))

    def read_metadata(self, path: Path) -> str | None:
        with _package("safetensors", "state_dict").safe_open(path, "pt") as file:
            found: str | None = (file.metadata() or {}).get(KEY)
            return found

    def open(self, path: Path, device: torch.device, network: Callable[[], nn.Module]) -> nn.Module:
        model = network()
        model.load_state_dict(_package("safetensors.torch", "state_dict").load_file(path))
        return model.eval()


def _package(module: str, to: str = "onnx") -> Any:
    return optional_package(module, f"to={to}", "effloop[export]")


def _openvino() -> Any:
    return optional_package("openvino", "to=openvino", "effloop[openvino]")


# Formats by the names that `export to=` takes.
formats: dict[str, type[Format]] = {"pt2": Pt2, "onnx": Onnx, "openvino": OpenVino, "state_dict": StateDict}

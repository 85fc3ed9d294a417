"""What `bench what=inference` compares: a trained model in PyTorch, and exported in each way."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from effloop.errors import ConfigError, EffLoopError
from effloop.inference.export import ExportOptions, export
from effloop.inference.formats import INPUT, OUTPUT, formats
from effloop.inference.parity import compare
from effloop.inference.trained import Trained
from effloop.registry import choices

_VARIANTS: dict[str, dict[str, Any]] = {"": {}, "_int8": {"int8": True}, "_half": {"half": True}}
_EXPORTED = {
    name + suffix: ExportOptions(to=name, **options)
    for name, kind in formats.items()
    if kind.fuses  # else it is pytorch once more
    for suffix, options in _VARIANTS.items()
    if kind.int8 or suffix != "_int8"
}
"""Names of exported formats -> how they are made."""

_ONLY_NAMED = ("compiled", *(name for name in _EXPORTED if name.endswith("_half")))
"""Measured where they are asked for by name: half a minute to compile; float16 is slow on most CPUs."""

NAMES = ("pytorch", "compiled", *_EXPORTED, "cuda", "tensorrt")


@dataclass(frozen=True)
class Side:
    """One way to run a model.

    Attributes:
        name: of `NAMES`.
        open: makes the model, for as many threads as torch has then.
        bytes: of its weights or file.
        score: the task's first score.
        agreement: share of the images with the prediction of the trained model.
        keep: whether the model serves all turns, as opening it takes long.
        device: where its images are.
        unavailable: why it can't be measured here; empty where it can.
    """

    name: str
    open: Callable[[], nn.Module] = nn.Identity
    bytes: int = 0
    score: float = float("nan")
    agreement: float = float("nan")
    keep: bool = False
    device: str = "cpu"
    unavailable: str = ""


def side_names(words: str) -> list[str]:
    """The sides that `formats=` names.

    Raises:
        ConfigError: there is no such.
    """
    if words == "all":
        return [name for name in NAMES if name not in _ONLY_NAMED]
    names = list(dict.fromkeys(words.split(",")))
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"formats: no format '{name}'; {choices(name, ['all', *NAMES])}")
    return names


def make_side(name: str, trained: Trained, score: float, scratch: Path) -> Side:
    """Export a model, or say why that can't be done.

    Args:
        name: of `NAMES`.
        trained: the model, on the CPU.
        score: of it.
        scratch: a folder for files.
    """
    weights = sum(each.numel() * each.element_size() for each in trained.model.state_dict().values())
    if name == "pytorch":
        return Side(name, lambda: trained.model, weights, score, 1.0)
    if name == "compiled":
        return Side(name, partial(_compiled, trained.model), weights, score, 1.0, keep=True)
    try:
        return _GPU[name](trained, scratch) if name in _GPU else _exported(name, trained, scratch)
    except EffLoopError as error:  # a package isn't installed, the model can't be exported so, or loses too much
        return Side(name, unavailable=str(error))


def _compiled(model: nn.Module) -> nn.Module:
    """A copy that is compiled when it is first called."""
    copied = copy.deepcopy(model)
    copied.compile(dynamic=False)
    return copied


def _exported(name: str, trained: Trained, scratch: Path) -> Side:
    how = _EXPORTED[name]
    path = scratch / f"{name}{formats[how.to].suffix}"
    done = export(trained, ExportOptions(to=how.to, int8=how.int8, half=how.half, out=path))
    meter = trained.task.meters[0].name
    opened = partial(formats[how.to](half=how.half).open, path, torch.device("cpu"), trained.network)
    return Side(name, opened, done.size, done.parity.after[meter], done.parity.agreement)


class OnCuda(nn.Module):
    """A model in float16 and channels_last on a GPU, for float32 images on any device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).half()
        self.model.to(device="cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        half = images.to("cuda", torch.float16, memory_format=torch.channels_last)
        outputs: Tensor = self.model(half)
        return outputs.to(images.device, torch.float32)


def _cuda(trained: Trained, scratch: Path) -> Side:
    del scratch
    if not torch.cuda.is_available():
        return Side("cuda", unavailable="no GPU here that PyTorch can use")
    model = OnCuda(trained.model)
    size = sum(each.numel() * each.element_size() for each in model.model.state_dict().values())
    return _scored(Side("cuda", lambda: model, size, keep=True, device="cuda"), model, trained)


class TensorRt(nn.Module):
    """A session of ONNX Runtime's TensorRT, in float16 where that is faster."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        ort: Any = importlib.import_module("onnxruntime")
        provider: Any = ("TensorrtExecutionProvider", {"trt_fp16_enable": True})
        self.session = ort.InferenceSession(path, providers=[provider])

    def forward(self, images: Tensor) -> Tensor:
        (outputs,) = self.session.run([OUTPUT], {INPUT: images.contiguous().cpu().numpy()})
        return torch.from_numpy(outputs)


def _tensorrt(trained: Trained, scratch: Path) -> Side:
    if importlib.util.find_spec("onnxruntime") is None:
        return Side("tensorrt", unavailable="it runs in onnxruntime, which isn't installed")
    ort: Any = importlib.import_module("onnxruntime")
    if "TensorrtExecutionProvider" not in ort.get_available_providers() or not torch.cuda.is_available():
        return Side("tensorrt", unavailable="no GPU, or ONNX Runtime without TensorRT (onnxruntime-gpu has it)")
    path = scratch / "tensorrt.onnx"
    size = export(trained, ExportOptions(to="onnx", out=path)).size
    model = TensorRt(path)
    return _scored(Side("tensorrt", lambda: model, size, keep=True), model, trained)


def _scored(side: Side, model: nn.Module, trained: Trained) -> Side:
    """With the score and agreement of a model on the validation split."""
    parity = compare(trained.model, model, trained.loader(), trained.task)
    score = parity.after[trained.task.meters[0].name]
    return Side(side.name, side.open, side.bytes, score, parity.agreement, side.keep, side.device)


_GPU: dict[str, Callable[[Trained, Path], Side]] = {"cuda": _cuda, "tensorrt": _tensorrt}

"""`to=openvino`: Intel's format, made of the ONNX model: FILE.xml, and the weights beside it in FILE.bin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from effloop.errors import CheckpointError, optional_package
from effloop.inference.formats.base import KEY, register_format
from effloop.inference.formats.onnx import Onnx

_START = 1024
"""Bytes of a file in which the model's element begins."""


@register_format("openvino")
class OpenVino(Onnx):
    """OpenVINO. `half`: weights are stored as float16, which is OpenVINO's own default; it computes in float32."""

    suffix = ".xml"
    runtime = "OpenVINO"

    def convert(self, model: nn.Module, example: Tensor) -> Any:
        _package()
        return Onnx(self.dynamic).convert(model, example)

    def save(self, program: Any, path: Path, metadata: str) -> None:
        # By the core, which is what openvino.convert_model uses for ONNX, without the telemetry around it.
        model = _package().Core().read_model(program.SerializeToString())
        model.set_rt_info(metadata, KEY)
        _package().save_model(model, path, compress_to_fp16=self.half)

    def read_metadata(self, path: Path) -> str | None:
        model = _read(_package().Core(), path)
        return str(model.get_rt_info(KEY).value) if model.has_rt_info(KEY) else None

    def open(self, path: Path, device: torch.device, network: Callable[[], nn.Module]) -> nn.Module:
        core = _package().Core()
        # Else a CPU with bfloat16 computes in it, where outputs have two or three digits.
        options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
        return OpenVinoModel(core.compile_model(_read(core, path), "CPU", options))

    @classmethod
    def files(cls, path: Path) -> tuple[Path, ...]:
        return path, path.with_suffix(".bin")


class OpenVinoModel(nn.Module):
    """A compiled model of OpenVINO as a module."""

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self.request = compiled.create_infer_request()

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) float32 -> (N, K) float32 on the images' device."""
        outputs = self.request.infer([images.contiguous().cpu().numpy()], share_inputs=True)[0]
        return torch.from_numpy(outputs.copy()).to(images.device)  # the next call writes to the same place


def _read(core: Any, path: Path) -> Any:
    """The model in a file, which other frontends of OpenVINO would read, and log in C++, were it no XML.

    Raises:
        CheckpointError: it is none of OpenVINO's, or its weights aren't beside it.
    """
    with path.open("rb") as opened:
        start = opened.read(_START)
    if b"<net " not in start:
        raise CheckpointError(f"{path} can't be read: it is no model of OpenVINO's; export the run again")
    weights = path.with_suffix(".bin")
    if not weights.is_file():
        raise CheckpointError(
            f"{path} has its weights in {weights.name}, which is not there; copy both, or export again"
        )
    return core.read_model(path)


def _package() -> Any:
    return optional_package("openvino", "to=openvino", "effloop[openvino]")

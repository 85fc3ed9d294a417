"""`to=openvino`: Intel's format, made of the ONNX model: FILE.xml, and the weights beside it in FILE.bin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from effloop.errors import optional_package
from effloop.inference.formats.base import KEY, register_format
from effloop.inference.formats.onnx import Onnx


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
        model = _package().Core().read_model(path)
        return str(model.get_rt_info(KEY).value) if model.has_rt_info(KEY) else None

    def open(self, path: Path, device: torch.device, network: Callable[[], nn.Module]) -> nn.Module:
        core = _package().Core()
        # Else a CPU with bfloat16 computes in it, where outputs have two or three digits.
        options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
        return OpenVinoModel(core.compile_model(core.read_model(path), "CPU", options))

    @classmethod
    def files(cls, path: Path) -> tuple[Path, ...]:
        return path, path.with_suffix(".bin")


class OpenVinoModel(nn.Module):
    """A compiled model of OpenVINO as a module."""

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self.request = compiled.create_infer_request()

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, S, S) float32 -> (N, K) float32 on the images' device."""
        outputs = self.request.infer([images.contiguous().cpu().numpy()], share_inputs=True)[0]
        return torch.from_numpy(outputs.copy()).to(images.device)  # the next call writes to the same place


def _package() -> Any:
    return optional_package("openvino", "to=openvino", "effloop[openvino]")

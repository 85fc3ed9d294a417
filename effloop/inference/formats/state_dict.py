"""`to=state_dict`: the weights alone, by the names that the model has for them, as safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from effloop.errors import optional_package
from effloop.inference.formats.base import KEY, Format, register_format


@register_format("state_dict")
class StateDict(Format):
    """Weights for the model as EffLoop, timm or torchvision builds it. `half`: matrices and filters are stored as
    float16; norms and biases stay float32, and the model computes in it.
    """

    suffix = ".safetensors"
    runtime = "PyTorch"
    fuses = False

    def convert(self, model: nn.Module, example: Tensor) -> dict[str, Tensor]:
        _package()
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
        if not self.half:
            return tensors
        return {
            name: each.half() if each.ndim > 1 and each.is_floating_point() else each for name, each in tensors.items()
        }

    def save(self, program: Any, path: Path, metadata: str) -> None:
        path.write_bytes(_package("safetensors.torch").save(program, {"format": "pt", KEY: metadata}))

    def read_metadata(self, path: Path) -> str | None:
        with _package().safe_open(path, "pt") as file:
            found: str | None = (file.metadata() or {}).get(KEY)
            return found

    def open(self, path: Path, device: torch.device, network: Callable[[], nn.Module]) -> nn.Module:
        model = network()
        model.load_state_dict(_package("safetensors.torch").load_file(path))
        return model.eval()


def _package(module: str = "safetensors") -> Any:
    return optional_package(module, "to=state_dict", "effloop[export]")

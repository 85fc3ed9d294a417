"""Models as graphs by torch.export, from which the other formats are made, and `to=pt2`, which is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from effloop.inference.formats import archive
from effloop.inference.formats.base import KEY, Format, register_format

_EXTRA = f"{KEY}.json"


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


@register_format("pt2")
class Pt2(Format):
    """torch.export: a graph of ATen operations. `half`: float16 throughout, which CPUs without it compute slowly."""

    suffix = ".pt2"
    runtime = "PyTorch"

    def convert(self, model: nn.Module, example: Tensor) -> ExportedProgram:
        program = trace(Half(model) if self.half else model, example, dynamic=self.dynamic)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # paths of this machine, and a third of a small file
        return program

    def save(self, program: Any, path: Path, metadata: str) -> None:
        torch.export.save(program, path, extra_files={_EXTRA: metadata})

    def read_metadata(self, path: Path) -> str | None:
        return archive.extra_file(path, _EXTRA) or None

    def open(self, path: Path, device: torch.device, network: Callable[[], nn.Module]) -> nn.Module:
        program = archive.load(path)
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        return _Contiguous(program.module())


class _Contiguous(nn.Module):
    """A graph, which was traced for images in rows and doesn't know other layouts."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph

    def train(self, mode: bool = True) -> _Contiguous:
        return self  # the graph is that of eval mode, and refuses to be told

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.graph(images.contiguous())
        return outputs

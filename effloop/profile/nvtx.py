"""Ranges for NVIDIA's Nsight Systems. It needs a GPU: on a CPU only the refusal is tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from effloop.errors import ConfigError
from effloop.profile.base import ProfileConfig, StepProfiler, profilers

_cuda: Any = torch.cuda  # without types for these
_autograd: Any = torch.autograd.profiler


@dataclass
class NVTXConfig(ProfileConfig):
    """Fields of `profile=nvtx`."""

    def check(self, updates: int, device: torch.device, *, in_place: bool) -> None:
        if device.type != "cuda":
            raise ConfigError("profile: nvtx is for NVIDIA GPUs, and the model is on the CPU; set profile=torch")
        super().check(updates, device, in_place=in_place)


@profilers.register("nvtx", NVTXConfig)
class NVTXProfiler(StepProfiler):
    """Names operators and updates for Nsight Systems, which records only the profiled updates; needs a GPU."""

    def start(self) -> None:
        _cuda.synchronize(self.device)
        self._ranges = _autograd.emit_nvtx(record_shapes=True)
        _cuda.profiler.start()
        self._ranges.__enter__()
        _cuda.nvtx.range_push("update")

    def step(self) -> None:
        first, last = self.config.wait, self.config.wait + self.config.steps
        if self.active and first < self.updates + 1 < last:
            _cuda.nvtx.range_pop()
            _cuda.nvtx.range_push("update")
        super().step()

    def stop(self) -> None:
        _cuda.nvtx.range_pop()
        self._ranges.__exit__(None, None, None)
        _cuda.synchronize(self.device)
        _cuda.profiler.stop()

    def report(self) -> list[str]:
        return ["profile  ranges were written for nsys profile --capture-range=cudaProfilerApi"] if self.active else []

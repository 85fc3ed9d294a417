"""PyTorch's profiler: which operators take the time, a trace of all of them, and where the host waits."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from effloop.profile.base import ProfileConfig, StepProfiler, as_lines, place, profilers
from effloop.profile.syncs import SyncFinder

_ROWS = 15


@dataclass
class TorchConfig(ProfileConfig):
    """Fields of `profile=torch`.

    Attributes:
        memory: also record allocations.
        stacks: also record Python's stack at each operation; the trace is then some ten times as large.
    """

    memory: bool = False
    stacks: bool = False
    more: ClassVar[int] = 1


@profilers.register("torch", TorchConfig)
class TorchProfiler(StepProfiler):
    """Operators by PyTorch's profiler: a table, a trace for Perfetto or Chrome, and lines that read tensors."""

    config: TorchConfig

    def __init__(self, config: TorchConfig, *context: Any) -> None:
        super().__init__(config, *context)
        self._finder = SyncFinder()
        self._looking = ExitStack()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._looking.close()

    def step(self) -> None:
        super().step()
        if self.done:
            self._looking.close()

    def start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it says on stderr that there is no GPU
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=kinds,
            record_shapes=True,
            profile_memory=self.config.memory,
            with_stack=self.config.stacks,
        )
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(self.trace))
        self._looking.enter_context(self._finder)  # for an update of its own, as it slows each operation down

    @property
    def trace(self) -> Path:
        """Where the trace is; TensorBoard's profiler plugin looks for this name."""
        return self.folder / "effloop.pt.trace.json.gz"

    def report(self) -> list[str]:
        if not self.active:
            return []
        lines = [*self._operators(), *self._reads()]
        (self.folder / "operators.txt").write_text("\n".join(lines) + "\n")
        return [*lines, f"profile  {self.trace}   look: ui.perfetto.dev or chrome://tracing"]

    def _operators(self) -> list[str]:
        """A table of the operators that take most time by themselves, on the GPU where there is one."""
        on_gpu = self.device.type == "cuda"
        found: list[Any] = [each for each in self._profile.key_averages() if not each.key.startswith("ProfilerStep")]

        def own_us(each: Any) -> float:
            return float(each.self_device_time_total if on_gpu else each.self_cpu_time_total)

        total = sum(map(own_us, found)) or 1.0
        steps = self.config.steps
        rows = [
            [
                each.key,
                f"{each.count / steps:,.1f}",
                f"{own_us(each) / steps / 1e3:.2f}",
                f"{own_us(each) / total:.1%}",
                f"{each.self_cpu_time_total / steps / 1e3:.2f}",
            ]
            for each in sorted(found, key=own_us, reverse=True)[:_ROWS]
        ]
        where = "GPU" if on_gpu else "CPU, all threads,"
        title = f"operators of {steps} updates, {total / steps / 1e3:.1f} ms on the {where} in each"
        return as_lines(title, ["operator", "calls per update", f"{where[:3]} ms", "share", "host ms"], rows)

    def _reads(self) -> list[str]:
        """A table of the lines that read tensors, of which a GPU has to finish all work."""
        if not self._finder.found:
            return ["no line of an update waits for the device"]
        rows = [
            [place(file, line, function), what, f"{count}"]
            for (file, line, function, what), count in self._finder.found.most_common(_ROWS)
        ]
        title = "lines that wait for the device, as they read a tensor's value, in one update"
        return as_lines(title, ["line", "operation", "times"], rows)

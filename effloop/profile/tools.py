"""Profilers of some updates: PyTorch's operators, Python's functions, NVTX ranges."""

from __future__ import annotations

import cProfile
import os
import pstats
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

from effloop.errors import ConfigError
from effloop.lazy import torch
from effloop.profile import ProfileConfig, Profiler, profilers


class StepProfiler(Profiler, ABC):
    """Profiles the updates after the first `wait`, in rank 0; others do as many. Subclasses implement how."""

    def __init__(self, config: ProfileConfig, run_dir: Path, device: torch.device, rank: int) -> None:
        self.config = config
        self.folder = run_dir / "profile"
        self.device = device
        self.active = rank == 0
        self.updates = 0

    def __enter__(self) -> Profiler:
        if self.active:
            self.folder.mkdir(exist_ok=True)
            if not self.config.wait:
                self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.active and 0 <= self.updates - self.config.wait < self.config.steps:
            self.stop()

    def step(self) -> None:
        self.updates += 1
        profiled = self.updates - self.config.wait
        if self.active and profiled == 0:
            self.start()
        if self.active and profiled == self.config.steps:
            self.stop()
        self.done = profiled >= self.config.steps + self.config.more

    @abstractmethod
    def start(self) -> None:
        """Begin to profile."""

    @abstractmethod
    def stop(self) -> None:
        """End it."""


_ROWS = 15
_TRACE = "effloop.pt.trace.json.gz"  # TensorBoard's profiler plugin looks for this name


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
        from effloop.profile.syncs import SyncFinder

        super().__init__(config, *context)
        self._finder = SyncFinder(self.device)
        self._looking = ExitStack()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._looking.close()

    def step(self) -> None:
        super().step()
        if self.done:
            self._looking.close()

    def start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints on stderr that there is no GPU
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        options: dict[str, Any] = {"profile_memory": self.config.memory, "with_stack": self.config.stacks}
        self._profile = torch.profiler.profile(activities=kinds, record_shapes=True, **options)
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(self.folder / _TRACE))
        self._looking.enter_context(self._finder)  # for an update of its own, as it slows each operation down

    def report(self) -> list[str]:
        if not self.active:
            return []
        order = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        table = self._profile.key_averages().table(order, row_limit=_ROWS, max_name_column_width=40)
        lines = [f"operators of {self.config.steps} updates", *table.splitlines()]
        waits = "lines of an update wait" if self._finder.found else "no line of an update waits"
        lines.append(f"{waits} for the device, as a tensor's value is read or copied")
        for (file, line, function, what), count in self._finder.found.most_common(_ROWS):
            lines.append(f"{count:5} x {what}, {'/'.join(file.split('/')[-2:])}:{line} ({function})")
        (self.folder / "operators.txt").write_text("\n".join(lines) + "\n")
        return [*lines, f"profile  {self.folder / _TRACE}   look: ui.perfetto.dev or chrome://tracing"]


@dataclass
class CProfileConfig(ProfileConfig):
    """Fields of `profile=cprofile`."""


@profilers.register("cprofile", CProfileConfig)
class CProfiler(StepProfiler):
    """Python functions of the training thread, by cProfile: a table, and a file for pstats or snakeviz.

    On a GPU the time of an operation is that of the thread that waits for it.
    """

    def start(self) -> None:
        self._profile = cProfile.Profile()
        self._profile.enable()

    def stop(self) -> None:
        self._profile.disable()
        self._profile.dump_stats(self.folder / "cprofile.pstats")

    def report(self) -> list[str]:
        if not self.active:
            return []
        text = StringIO()
        pstats.Stats(self._profile, stream=text).sort_stats("tottime").print_stats(_ROWS)
        lines = [f"Python functions of {self.config.steps} updates", *filter(None, text.getvalue().splitlines())]
        return [*lines, f"profile  {self.folder / 'cprofile.pstats'}   look: python -m pstats, or snakeviz"]


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

    def __init__(self, config: NVTXConfig, *context: Any) -> None:
        super().__init__(config, *context)
        self._cuda: Any = torch.cuda  # without types for these
        self._autograd: Any = torch.autograd.profiler

    def start(self) -> None:
        self._cuda.synchronize(self.device)
        self._ranges = self._autograd.emit_nvtx(record_shapes=True)
        self._cuda.profiler.start()
        self._ranges.__enter__()
        self._cuda.nvtx.range_push("update")

    def step(self) -> None:
        first, last = self.config.wait, self.config.wait + self.config.steps
        if self.active and first < self.updates + 1 < last:
            self._cuda.nvtx.range_pop()
            self._cuda.nvtx.range_push("update")
        super().step()

    def stop(self) -> None:
        self._cuda.nvtx.range_pop()
        self._ranges.__exit__(None, None, None)
        self._cuda.synchronize(self.device)
        self._cuda.profiler.stop()

    def report(self) -> list[str]:
        return ["profile  ranges were written for nsys profile --capture-range=cudaProfilerApi"] if self.active else []

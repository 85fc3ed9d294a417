"""Predicts images/s from what one image costs in loading, in the step and in the log."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from effloop.measure.costs import Cost, LoadingCosts


@dataclass(frozen=True)
class Load:
    """What a run does for each image, in seconds.

    Attributes:
        loading: of the stages of loading, in one thread.
        workers: threads or processes that load; 0 is the training thread itself.
        serial_s: the least time between two images that loading in threads needs, however many there are, as Python
            runs in one of them at a time; 0 where that isn't what limits it.
        transfer_s: copying, augmenting on the device, normalising, mixing.
        step_s: forward, backward and update, alone on the machine.
        step_cores: cores that these compute on; 0 if they run on a GPU.
        log_s: what the recorder takes.
        contention: as of `Forecast`, where it isn't that of the loop that was measured; loading is disturbed as much.
    """

    loading: LoadingCosts
    workers: int
    serial_s: float
    transfer_s: float
    step_s: float
    log_s: float
    step_cores: float = 0.0
    contention: float | None = None

    def with_loading(self, **stages: Cost) -> Load:
        """The same with other costs of some stages of loading."""
        changed: Any = stages
        loading = replace(self.loading, **changed)
        share = loading.total.wall_s / max(1e-12, self.loading.total.wall_s)
        return replace(self, loading=loading, serial_s=self.serial_s * share)


@dataclass(frozen=True)
class Forecast:
    """Time per image of a training loop, calibrated by one that was measured.

    The training thread is busy for `transfer + step + log`, and longer where loading takes cores from it: by
    `contention` for each second of loading on a core. Beside it workers load, and all of them share the cores; what
    takes longest decides. `overhead` is what loading takes longer than its stages when the training thread runs, and
    `rest_s` what none of it explains.

    Attributes:
        cores: that this rank may use.
        contention: seconds of the training thread for each second of loading.
        overhead: of loading beside training, as a factor.
        needed: share of the CPU time of loading and step that they need; in the rest, threads only wait for each other.
        rest_s: seconds per image.
    """

    cores: int
    contention: float = 0.0
    overhead: float = 1.0
    needed: float = 1.0
    rest_s: float = 0.0

    @classmethod
    def of(cls, load: Load, cores: int, images_per_s: float, wait: float) -> Forecast:
        """Calibrated by a measured loop.

        Args:
            load: of this loop.
            cores: as above.
            images_per_s: of the loop that was measured.
            wait: share of its time that waits for data.
        """
        measured, plain = 1 / images_per_s, cls(cores)
        if not load.workers:  # its wait is for the images that the training thread loads itself
            overhead = measured * wait / max(load.loading.total.wall_s, 1e-12)
            found = replace(plain, overhead=min(3.0, overhead))
            return replace(found, rest_s=max(0.0, measured - found.seconds(load)))
        busy = measured * (1 - wait)
        alone, cpu_s = plain.busy_s(load), load.loading.total.cpu_s
        contention = min(2.0, max(0.0, (busy - alone) / cpu_s)) if cpu_s else 0.0
        overhead = min(1.0, measured / plain.loading_s(load))
        if wait > _WAITS:
            overhead = min(3.0, measured / plain.loading_s(load))
        scale = min(1.0, measured / max(plain.cpu_s(load), 1e-12))
        found = replace(plain, contention=contention, overhead=overhead, needed=scale)
        return replace(found, rest_s=measured - found.seconds(load))

    def busy_s(self, load: Load) -> float:
        """Seconds per image of the training thread."""
        contention = self.contention if load.contention is None else load.contention
        beside = contention * load.loading.total.cpu_s
        return load.transfer_s + load.step_s + load.log_s + beside

    def loading_s(self, load: Load) -> float:
        """Seconds between two images that the workers have loaded."""
        total, workers = load.loading.total, max(1, load.workers)
        overhead = self.overhead if load.contention is None else min(self.overhead, 1 + load.contention)
        return overhead * max(total.wall_s / workers, total.cpu_s / self.cores, load.serial_s)

    def cpu_s(self, load: Load) -> float:
        """Seconds per image if all cores were busy all the time."""
        step_s = load.step_cores * load.step_s
        return self.needed * (load.loading.total.cpu_s + step_s) / self.cores if step_s else 0.0

    def seconds(self, load: Load) -> float:
        """Seconds per image of the loop."""
        if not load.workers:
            return max(1e-9, self.busy_s(load) + self.overhead * load.loading.total.wall_s + self.rest_s)
        return max(1e-9, max(self.busy_s(load), self.loading_s(load), self.cpu_s(load)) + self.rest_s)

    def images_per_s(self, load: Load) -> float:
        """Images/s of the loop."""
        return 1 / self.seconds(load)

    def without(self, load: Load, stage: str) -> float:
        """Images/s if a stage cost nothing.

        Args:
            load: what is done for each image.
            stage: a stage of loading, or `transfer`, `step`, `log`.
        """
        if hasattr(load.loading, stage):
            return self.images_per_s(load.with_loading(**{stage: Cost()}))
        changed: Any = {f"{stage}_s": 0.0}
        return self.images_per_s(replace(load, **changed))


_WAITS = 0.1
"""Share of waiting above which the workers decide the speed; below, the loop is seldom without a batch."""

"""Interface of engines: a plan in, loaded batches out, in order."""

from __future__ import annotations

import inspect
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from effloop.batch import Batch
from effloop.data.plan import Plan
from effloop.errors import check_value, warn
from effloop.lazy import Tensor, torch
from effloop.registry import PartConfig, Registry


@dataclass
class EngineConfig(PartConfig):
    """Fields that every engine has.

    Attributes:
        prefetch: batches loaded ahead of the one in use.
        timeout_s: seconds that a run waits for workers of which none begins or ends a sample, before it ends with a
            line that names them and what they load; after half of it, at most 30, there is a warning.
    """

    prefetch: int = 2
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        check_value("engine.prefetch", self.prefetch, self.prefetch > 0, "a number of batches above 0")
        check_value("engine.timeout_s", f"{self.timeout_s:g}", self.timeout_s > 0, "a number of seconds above 0")

    def host_batches(self, device: str) -> int:
        """Batches in host memory at once, where a device is of the type `cpu` or `cuda`: those prefetched, the loop's,
        and one that is copied to the device; 0 where nothing is prefetched.
        """
        return self.prefetch + 2

    @property
    def worker_bytes(self) -> int:
        """Memory that a worker has for itself, about; 0 where workers are threads."""
        return 0


@dataclass
class RunLengthConfig(EngineConfig):
    """Fields of engines that split a batch into runs of consecutive samples.

    Attributes:
        run_length: samples that a worker takes at a time. null is its share of a batch, from 4 to 32:
            crops are drawn run by run, which takes 10 µs per sample in a run of 8, 2.7 in one of 32.
    """

    run_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.run_length
        check_value("engine.run_length", length, length is None or length > 0, "a number of samples above 0, or null")

    def resolve_run_length(self, batch: int, num_workers: int) -> int:
        """`run_length`, or its default for batches of this many samples."""
        return self.run_length or min(32, max(4, -(-batch // num_workers)))


class Engine(ABC):
    """Executes one plan. All engines load the same bytes; they differ in which workers do it.

    Attributes:
        exact: whether the pixels are those of the plan's decoder and augmentation to the bit. False for an engine
            with its own decoder or resize, which may differ by 2 levels (mean).
        fills_by_plan: whether the plan fills all rows, so that its output may be normalised already. False for an
            engine that writes pixels itself.
    """

    exact: ClassVar[bool] = True
    fills_by_plan: ClassVar[bool] = False

    @abstractmethod
    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        """Host batches of one epoch, in order, starting at a position.

        The images are (B, C, H, W), as the plan's output says: uint8 channels_last, or normalised. Leaving the
        iterator early, by `break` or an exception, cancels pending work.

        Raises:
            DataError: a sample can't be read or decoded.
        """

    def close(self) -> None:  # noqa: B027  some engines keep nothing
        """End threads and processes and free memory kept between epochs; the next epoch recreates them."""


class _Engines(Registry[Engine]):
    def build(self, config: PartConfig, /, *args: Any, **kwargs: Any) -> Engine:
        """As any registry; a plugin's engine may still take `pin_memory` instead of `device`, until version 0.5."""
        factory = self[config.name].factory
        if "pin_memory" in inspect.signature(factory).parameters:
            name = factory.__qualname__
            warn(f"{name}: pin_memory is deprecated, and version 0.5 will not give it; take device, a torch.device")
            kwargs["pin_memory"] = kwargs.pop("device").type == "cuda"
        return super().build(config, *args, **kwargs)


engines = _Engines(
    "engine",
    {
        "auto": __name__,
        "dali": "effloop.data.engine.dali",
        "inline": "effloop.data.engine.threads",
        "processes": "effloop.data.engine.processes",
        "threads": "effloop.data.engine.threads",
    },
)


@dataclass
class AutoConfig(RunLengthConfig):
    """Fields of `engine=auto`."""


_THREADS = 2
"""Workers up to which threads are used. They share the GIL: on 16 cores of a Xeon, 4 processes loaded 1.2 to 1.3 times
as many photographs/s as 4 threads, and 14 processes 2.6 times as many as 14 threads, which were slower than 8."""


@engines.register("auto", AutoConfig)
def build_auto(config: AutoConfig, plan: Plan, *, num_workers: int, device: torch.device) -> Engine:
    """Threads, or processes where more than two workers load."""
    return engines.build(chosen_engine(config, num_workers), plan, num_workers=num_workers, device=device)


def chosen_engine(config: EngineConfig, num_workers: int) -> EngineConfig:
    """What `auto` is with this many workers; any other engine's config as it is."""
    if not isinstance(config, AutoConfig):
        return config
    name = "threads" if num_workers <= _THREADS else "processes"
    found = engines[name].config(**{**vars(config), "name": name})
    assert isinstance(found, EngineConfig)
    return found


def engine_class(config: EngineConfig) -> type[Engine]:
    """The class of the engine that a config names; of one that a function builds, `Engine`, whose defaults then hold.

    Raises:
        ConfigError: no such engine.
    """
    factory = engines[config.name].factory
    return factory if isinstance(factory, type) and issubclass(factory, Engine) else Engine


Shape = tuple[int, int, int, int]


class Ring:
    """Memory of batches, (B, H, W, bytes of a pixel) uint8, reused when the batch before is gone.

    A slot is free when no tensor refers to it any more, neither the batch nor a view of it. If batches are kept,
    the next ones get new memory, so nothing in use is ever overwritten.

    Args:
        device: what the batches are copied to; for a GPU the memory is page-locked, so that copies are asynchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slots: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, shape: Shape) -> Tensor:
        """Memory of this shape, with arbitrary content."""
        return self.numbered(shape)[1]

    def numbered(self, shape: Shape) -> tuple[int, Tensor]:
        """A slot of this shape: its number, and its memory as of `take`."""
        with self._lock:
            for number, holders in enumerate(_holders(self._slots)):
                if holders == _NONE and self._slots[number].shape == shape:
                    return number, torch.from_numpy(self._slots[number])
            self._slots = [slot for slot in self._slots if slot.shape == shape]
            self._slots.append(self.make(shape, len(self._slots)))
            return len(self._slots) - 1, torch.from_numpy(self._slots[-1])

    def make(self, shape: Shape, number: int) -> NDArray[np.uint8]:
        """New memory, for the slot of this number."""
        made: NDArray[np.uint8] = torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda").numpy()
        return made

    def __len__(self) -> int:
        """Number of slots, free or not."""
        return len(self._slots)


def _holders(slots: Sequence[object]) -> list[int]:
    """Reference count of each, including the list's and this function's own."""
    return [sys.getrefcount(slot) for slot in slots]


_NONE = _holders([object()])[0]  # a tensor's storage, shared by its views, adds one


def fill_inline(plan: Plan, epoch: int, samples_seen: int, *, device: torch.device) -> Iterator[Batch]:
    """Load each batch in the calling thread when it is requested."""
    ring = Ring(device)
    for request in plan.requests(epoch, samples_seen):
        batch = plan.empty_batch(request, ring.take(plan.shape(len(request.ids))))
        plan.amend(batch, plan.fill(request, batch.images, 0, len(batch)))
        yield batch
        del batch  # frees its memory for the next one

"""What every engine is: a plan in, filled batches out, in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from effloop.batch import Batch
from effloop.data.engine.ring import Ring
from effloop.data.plan import Plan
from effloop.errors import ConfigError
from effloop.registry import PartConfig, Registry


@dataclass
class EngineConfig(PartConfig):
    """Fields that every engine has.

    Attributes:
        prefetch: batches that are filled ahead of the one the loop works on.
    """

    prefetch: int = 2

    def __post_init__(self) -> None:
        if self.prefetch < 1:
            raise ConfigError(f"engine.prefetch: {self.prefetch} is not allowed; set a number of batches above 0")


@dataclass
class RunsConfig(EngineConfig):
    """Fields of engines that hand out a batch in runs of samples.

    Attributes:
        run_length: samples that a worker takes at a time. null is its share of a batch, from 4 to 32:
            processes draw crops run by run, which takes 10 µs a sample in a run of 8, and 2.7 in one of 32.
    """

    run_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run_length is not None and self.run_length < 1:
            raise ConfigError(
                f"engine.run_length: {self.run_length} is not allowed; set a number of samples above 0, or null"
            )

    def samples_of_a_run(self, batch: int, num_workers: int) -> int:
        """`run_length`, decided for batches of this many samples."""
        return self.run_length or min(32, max(4, -(-batch // num_workers)))


class Engine(ABC):
    """Runs one plan. All engines fill the same bytes; they differ in whose hands do it.

    Attributes:
        exact: whether the pixels are those of the plan's decoder and augmentation, to the bit. An engine that
            has a decoder or a resize of its own says False, and is held to a mean difference of 2 levels.
    """

    exact: ClassVar[bool] = True

    @abstractmethod
    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        """Host batches of one epoch, in order, from a position on.

        The images are uint8 (B, 3, S, S) channels_last. Leaving the iterator early, by `break` or
        by an error, ends the work that was begun.

        Raises:
            DataError: a sample can't be read or decoded.
        """

    def close(self) -> None:  # noqa: B027  some engines have nothing that outlives an epoch
        """End threads and processes, and let go of memory, that outlive an epoch; the next one gets them anew."""


engines: Registry[Engine] = Registry("engine")


def fill_whole(plan: Plan, epoch: int, samples_seen: int, *, pin_memory: bool) -> Iterator[Batch]:
    """The stream without any help: each batch is filled where and when it is asked for."""
    ring = Ring(pin_memory=pin_memory)
    for task in plan.tasks(epoch, samples_seen):
        batch = plan.empty_batch(task, ring.take(plan.shape(task)))
        plan.fill(task, batch.images, 0, len(batch))
        yield batch
        del batch  # or it would hold its memory while the next is filled

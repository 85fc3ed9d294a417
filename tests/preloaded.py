"""Batches in memory, as a `BatchStream`."""

from collections.abc import Iterable
from dataclasses import dataclass

from effloop.batch import Batch


@dataclass
class Preloaded:
    """The same batches in each epoch."""

    batches: list[Batch]
    global_batch: int

    def __len__(self) -> int:
        return len(self.batches)

    def describe(self) -> str:
        return f"{len(self)} batches in memory"

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterable[Batch]:
        del epoch
        return self.batches[samples_seen // self.global_batch :]

    def close(self) -> None:
        pass

"""Worker processes, by torch's DataLoader: for augmentation that holds the GIL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from effloop.batch import Batch
from effloop.data.engine.base import Engine, EngineConfig, engines, fill_whole
from effloop.data.plan import Plan, Task
from effloop.errors import DataError


class StartMethod(Enum):
    """How worker processes come into being; torch's default on Linux is fork."""

    fork = "fork"
    spawn = "spawn"
    forkserver = "forkserver"


@dataclass
class ProcessesConfig(EngineConfig):
    """Fields of `engine=processes`.

    Attributes:
        start_method: how worker processes come into being.
    """

    start_method: StartMethod = StartMethod.fork


class _Batches(Dataset[Batch | DataError]):
    """Task -> filled batch, in a worker."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __getitem__(self, task: Task) -> Batch | DataError:
        batch = self.plan.empty_batch(task)
        try:
            self.plan.fill(task, batch.images, 0, len(batch))
        except DataError as error:
            return error  # as a value: raised, it would arrive wrapped in the worker's traceback
        return batch


class _Tasks(Sampler[Task]):
    """The tasks of the epoch that is under way; settable, because the workers stay."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.position = (0, 0)

    def __iter__(self) -> Iterator[Task]:
        return self.plan.tasks(*self.position)


@engines.register("processes", ProcessesConfig)
class ProcessEngine(Engine):
    """Worker processes (torch's DataLoader), kept over all epochs."""

    def __init__(self, config: ProcessesConfig, plan: Plan, *, num_workers: int, pin_memory: bool) -> None:
        self.plan = plan
        self.pin_memory = pin_memory
        self.tasks = _Tasks(plan)
        self.loader: DataLoader[Batch | DataError] | None = None
        if num_workers:
            self.loader = DataLoader(
                _Batches(plan),
                batch_size=None,
                sampler=self.tasks,
                num_workers=num_workers,
                prefetch_factor=max(1, -(-config.prefetch // num_workers)),
                persistent_workers=True,
                pin_memory=pin_memory,
                multiprocessing_context=config.start_method.value,
                collate_fn=_as_it_is,
            )

    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        if self.loader is None:
            return fill_whole(self.plan, epoch, samples_seen, pin_memory=self.pin_memory)
        self.tasks.position = (epoch, samples_seen)
        return self._stream(self.loader)

    def _stream(self, loader: DataLoader[Batch | DataError]) -> Iterator[Batch]:
        for batch in loader:
            if isinstance(batch, DataError):
                raise batch
            yield batch

    def close(self) -> None:
        self.loader = None  # the last reference to the iterator, whose end ends its workers


def _as_it_is(batch: Any) -> Any:
    return batch

"""Worker processes, by torch's DataLoader: for augmentation that holds the GIL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from effloop.batch import Batch
from effloop.data.engine.base import Engine, EngineConfig, engines, fill_whole
from effloop.data.plan import Plan, Task
from effloop.errors import ConfigError, DataError

Parts = tuple[Tensor, Tensor, Tensor, Tensor]
"""A batch's fields. DataLoader's pinning looks into a tuple, not into a Batch."""


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


class _Batches(Dataset[Parts | DataError]):
    """Task -> the parts of a filled batch, in a worker."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __getitem__(self, task: Task) -> Parts | DataError:
        batch = self.plan.empty_batch(task)
        try:
            self.plan.fill(task, batch.images, 0, len(batch))
        except DataError as error:
            return error  # as a value: raised, it would arrive wrapped in the worker's traceback
        return batch.images, batch.targets, batch.ids, batch.valid


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
        self.loader: DataLoader[Parts | DataError] | None = None
        self.under_way: object = None
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
                generator=torch.Generator(),  # else each start draws a seed from the global one
            )

    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        if self.loader is None:
            return fill_whole(self.plan, epoch, samples_seen, pin_memory=self.pin_memory)
        return self._stream((epoch, samples_seen))

    def _stream(self, position: tuple[int, int]) -> Iterator[Batch]:
        assert self.loader is not None  # not a local: an error's traceback would keep it, and the workers, alive
        self.tasks.position = position
        me = self.under_way = object()
        for parts in self.loader:
            if isinstance(parts, DataError):
                raise parts
            yield Batch(*parts)
            if self.under_way is not me:  # the workers are the same, and are with the other epoch now
                raise ConfigError(
                    "engine: processes runs one epoch at a time, and another was begun before this one ended; "
                    "set engine=threads"
                )

    def close(self) -> None:
        self.loader = None  # the last reference to the iterator, whose end ends its workers


def _as_it_is(batch: Any) -> Any:
    return batch

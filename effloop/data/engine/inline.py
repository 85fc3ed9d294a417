"""Loading in the training thread, when a batch is requested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from effloop.batch import Batch
from effloop.data.engine.base import Engine, EngineConfig, engines, fill_inline
from effloop.data.plan import Plan


@dataclass
class InlineConfig(EngineConfig):
    """Fields of `engine=inline`; `prefetch` has no effect."""

    def host_batches(self, device: str) -> int:
        del device
        return 0


@engines.register("inline", InlineConfig)
class InlineEngine(Engine):
    """Loads in the training thread, without prefetching; for debugging."""

    fills_by_plan = True

    def __init__(self, config: InlineConfig, plan: Plan, *, num_workers: int, pin_memory: bool) -> None:
        del config, num_workers
        self.plan = plan
        self.pin_memory = pin_memory

    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        return fill_inline(self.plan, epoch, samples_seen, pin_memory=self.pin_memory)

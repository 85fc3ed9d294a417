"""A user's own training loop, turn by turn, with other settings of its loader."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from effloop import config as configs
from effloop.assemble.race import wait_for_gpu
from effloop.assemble.trainer import build_trainer
from effloop.batch import Batch
from effloop.config import Config
from effloop.data.engine import engines
from effloop.data.loader import Loader
from effloop.diagnose.batch_tensors import host_batch
from effloop.diagnose.measured import neutral_overrides
from effloop.diagnose.memory_parts import expected_memory
from effloop.diagnose.tune_search import Setting, Turn
from effloop.model import Probe
from effloop.parallel import Parallel
from effloop.precision import Precision
from effloop.system.hardware import available_memory
from effloop.train.trainer import Trainer

TURN_S = 1.0
"""Seconds of a turn, after what fills the pipeline."""

_MOST_PREFETCH = 8
_FIRST, _LEAST_UPDATES = 3, 4  # batches before the clock runs, and updates of a turn, however long they take


class TunedLoop:
    """Trains with any setting, for a turn at a time; each turn goes on in the training data where the last one ended.

    Args:
        config: what is trained, as `neutral_overrides` leave it.
        scratch: a folder for what a run writes.

    Raises:
        ConfigError, DataError: a trainer can't be built.
    """

    def __init__(self, config: Config, scratch: Path) -> None:
        self.config = configs.from_dict(configs.to_dict(config), neutral_overrides(config), "the config")
        self._scratch = scratch
        self._trainers: dict[int, tuple[Trainer, Loader]] = {}
        self._position = 0
        self._open = ExitStack()
        self.trainer(config.batch_size, config.accumulate)

    def close(self) -> None:
        """End what loads and records."""
        self._open.close()

    def trainer(self, batch_size: int, accumulate: int) -> tuple[Trainer, Loader]:
        """The trainer for a batch size, and its training data; built when it is first asked for."""
        if batch_size not in self._trainers:
            config = replace(self.config, batch_size=batch_size, accumulate=accumulate)
            folder = Path(tempfile.mkdtemp(dir=self._scratch)) / "run"
            trainer = build_trainer(config, run_dir=folder, advise=self._look)
            self._open.enter_context(trainer.recorder)
            self._open.callback(trainer.val.close)
            self._open.callback(trainer.train.close)
            assert isinstance(trainer.train, Loader)  # neither progressive nor a probe
            self._trainers[batch_size] = trainer, trainer.train
        return self._trainers[batch_size]

    def describe(self) -> str:
        """One line: the training data."""
        return self._trainers[self.config.batch_size][1].describe()

    def _look(
        self,
        config: Config,
        model: nn.Module,
        probe: Probe,
        loaders: Sequence[Loader],
        parallel: Parallel,
        _: Precision,
    ) -> list[str]:
        """Keep what a trainer that is being built will take; gives no advice."""
        self._memory = expected_memory(config, model, probe, loaders, parallel)
        return []

    def fits(self, batch_size: int, accumulate: int) -> bool:
        """Whether there is memory for a batch size, as far as that is known before its first step."""
        self.trainer(batch_size, accumulate)
        return all(self._memory.total(place) < self._memory.capacity(place) for place in self._memory.places)

    def most_prefetch(self) -> int:
        """Batches ahead that a quarter of the free memory has room for, but no more than are ever needed."""
        batch = sum(each.bytes for each in host_batch(self._trainers[self.config.batch_size][1]))
        return min(_MOST_PREFETCH, available_memory() // (4 * batch) - 2)

    def turn(self, setting: Setting) -> Turn:
        """Train for `TURN_S` with a setting; 0 images/s where the GPU has too little memory for it."""
        trainer, loader = self.trainer(setting.batch_size, setting.accumulate)
        engine = engines.build(
            replace(self.config.engine, prefetch=setting.prefetch),
            loader.plan,
            num_workers=setting.num_workers,
            pin_memory=trainer.parallel.device.type == "cuda",
        )
        tried = Loader(loader.plan, engine, loader.transfer)
        tried.windows = loader.windows
        measured = _Measured(trainer, tried, setting)
        try:
            trainer.progress.samples_seen = 0
            trainer.train_epoch(measured.batches(self._position))
            return measured.turn()
        except torch.OutOfMemoryError:
            return Turn(0.0, 0.0)
        finally:
            self._position += measured.taken * setting.batch_size
            engine.close()


class _Measured:
    """The batches of a turn, and how long they took.

    Attributes:
        taken: batches that were trained on.
    """

    def __init__(self, trainer: Trainer, loader: Loader, setting: Setting) -> None:
        self.trainer, self.loader, self.setting = trainer, loader, setting
        self.taken = 0
        self._images, self._seconds, self._waited = 0, 0.0, 0.0

    def batches(self, position: int) -> Iterator[Batch]:
        """From a position in the training on, over as many epochs as it takes.

        Timed are whole updates, each with the wait for its data, after the first ones. The loader starts with nothing
        loaded, so many batches ahead are no advantage.
        """
        group = self.setting.accumulate
        filling = -(-_FIRST // group) * group
        least, started = filling + _LEAST_UPDATES * group, 0.0
        stream = self._stream(position)
        asked = time.perf_counter()
        for batch in stream:
            arrived = time.perf_counter()
            yield batch
            count = len(batch)
            del batch  # frees its memory for the next one
            self.taken += 1
            if self.taken == filling:
                wait_for_gpu()
                started = time.perf_counter()
            elif self.taken > filling:
                self._waited += arrived - asked
                self._images += count
            if self.taken >= least and self.taken % group == 0 and time.perf_counter() - started > TURN_S:
                break
            asked = time.perf_counter()
        wait_for_gpu()
        self._seconds = time.perf_counter() - started

    def _stream(self, position: int) -> Iterator[Batch]:
        size = len(self.loader) * self.loader.global_batch
        epoch, seen = divmod(position, size)
        while True:
            yield from self.loader.epoch(epoch, seen - seen % self.loader.global_batch)
            epoch, seen = epoch + 1, 0

    def turn(self) -> Turn:
        """What they have shown."""
        return Turn(self._images / self._seconds, self._waited / self._seconds)

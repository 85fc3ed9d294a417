"""Copies to an emulated GPU: the host waits for none, and none finds its memory given back."""

import gc
from collections import deque
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import emulator
import numpy as np
import pytest
import torch
from plans import make_engine, make_plan, open_source

import effloop
from effloop.batch import Batch
from effloop.data.engine import dali
from effloop.data.loader import FeatureStream, Loader
from effloop.data.plan import Prepared
from effloop.data.transfer import Transfer
from effloop.system import gpu

DALI = find_spec("nvidia") and find_spec("nvidia.dali")
GPU = torch.device("cuda:1")
kept: list[Any] = []  # until the process ends


def interrupted(photos: Path) -> None:
    """Ctrl-C when the second batch's copy has just been queued."""
    engine = make_engine("processes", make_plan(open_source("folder", photos)), 1, device=str(GPU))
    record, calls = gpu.record, []

    def once(stream: torch.Stream) -> torch.Event:
        calls.append(stream)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return record(stream)

    gpu.record = once  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        list(Transfer(GPU, None, None, channels_last=True).stream(engine.stream(0), lambda ids: ids))
    gpu.record = record
    engine.close()


def left(photos: Path) -> None:
    """An epoch that is still going on when the process ends."""
    engine = make_engine("processes", make_plan(open_source("folder", photos)), 1, device=str(GPU))
    epoch = Transfer(GPU, None, None, channels_last=True).stream(engine.stream(0), lambda ids: ids)
    kept.append([next(epoch), epoch, engine])


def waits(batches: Iterable[Batch]) -> int:
    """How often the host waits until these batches are on the GPU."""
    from emulator import kernels

    def count() -> int:
        return kernels.counts(1)["syncs"] + kernels.counts(1)["pageable"]

    before, arrived = count(), list(batches)
    assert {str(field.device) for batch in arrived for field in (batch.images, batch.targets, batch.valid)} == {
        str(GPU)
    }
    return count() - before


class AllOnes:
    """Instead of DALI's pipeline, which needs a real GPU."""

    def __init__(self, batch: int, shape: tuple[int, int, int], num_threads: int, device: torch.device) -> None:
        self.shape, self.device, self.given = shape, device, deque[int]()

    def feed(self, prepared: Prepared) -> None:
        self.given.append(len(prepared.encoded))

    def take(self) -> torch.Tensor:
        return torch.ones(self.given.popleft(), *self.shape, dtype=torch.uint8, device=self.device)


def no_waits(photos: Path) -> dict[str, int]:
    plan = make_plan(open_source("folder", photos, "val"), train=False)
    transfer = Transfer(GPU, None, None, channels_last=True)
    loader, features = Loader(plan, make_engine("inline", plan), transfer), np.ones((len(plan.source), 5), np.float32)
    host = [(torch.rand(8, 3, 16, 16), torch.arange(8) % 2) for _ in range(3)]
    words = f"image_size=16 batch_size=8 device={GPU} record=none checkpoint=none num_workers=0 model.num_classes=2"
    given = effloop.build_trainer(effloop.compose([f"data.root={photos}", *words.split()]), train=host, val=host)
    dali._Pipeline = AllOnes  # type: ignore[assignment,misc]
    found = {
        "given": waits(given.train.epoch(0)),
        "features": waits(FeatureStream(loader, features).epoch(0)),
        "not page-locked": waits(islice(loader.epoch(0), 2)) - 1,  # at the end, for all
    }
    if DALI:
        engine = make_engine("dali", plan, 1, device=str(GPU))
        found["dali"] = waits(transfer.stream(engine.stream(0), lambda ids: ids)) - 1
    return found


def all_of_it(photos: str) -> dict[str, int]:
    for each in (interrupted, left):
        each(Path(photos))
    gc.collect()
    return no_waits(Path(photos))


def test_copies(photos, tmp_path):
    found = emulator.call(all_of_it, str(photos), log=tmp_path / "log")
    assert emulator.errors(tmp_path / "log") == []
    assert found == dict.fromkeys(found, 0)

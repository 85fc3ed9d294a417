from __future__ import annotations

import gc

import numpy as np
import torch
from plans import make_engine, make_plan, open_source

from effloop.data.engine.ring import Ring

SHAPE = (2, 4, 4, 3)


def test_memory_is_used_again() -> None:
    ring = Ring()
    first = ring.take(SHAPE)
    assert first.shape == SHAPE
    assert first.dtype == torch.uint8
    at = first.data_ptr()
    del first
    assert ring.take(SHAPE).data_ptr() == at
    assert len(ring) == 1


def test_what_is_held_is_not_written_over() -> None:
    ring = Ring()
    whole, view, array = ring.take(SHAPE), ring.take(SHAPE)[1:].permute(0, 3, 1, 2), ring.take(SHAPE).numpy()
    taken = {ring.take(SHAPE).data_ptr() for _ in range(3)}
    assert len(ring) == 4
    assert taken.isdisjoint({whole.data_ptr(), view.data_ptr() - 48, array.ctypes.data})
    del whole, view, array
    gc.collect()
    for _ in range(9):
        ring.take(SHAPE)
    assert len(ring) == 4


def test_another_shape() -> None:
    ring = Ring()
    ring.take(SHAPE)
    assert ring.take((3, 4, 4, 3)).shape == (3, 4, 4, 3)
    assert len(ring) == 1


def test_an_epoch_takes_as_many_slots_as_batches_are_under_way(photos: object) -> None:
    plan = make_plan(open_source("folder", photos), batch=2)  # type: ignore[arg-type]
    engine = make_engine("threads", plan, 2, prefetch=3)
    for epoch in range(3):
        for batch in engine.stream(epoch):
            assert len(batch) == 2
            del batch
    assert len(engine.ring) == 3 + 1  # type: ignore[attr-defined]


def test_batches_that_are_kept_stay_as_they_are(photos: object) -> None:
    plan = make_plan(open_source("folder", photos), batch=4)  # type: ignore[arg-type]
    wanted = [batch.images.clone() for batch in make_engine("inline", plan).stream(0)]
    for name, workers in (("inline", 0), ("threads", 2)):
        kept = list(make_engine(name, plan, workers).stream(0))
        for a, b in zip(wanted, kept, strict=True):
            np.testing.assert_array_equal(a, b.images)

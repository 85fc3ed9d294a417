"""What engines hold in memory: as many batches as are under way, and no more the longer they run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from held import held_after_epochs
from plans import make_engine, make_plan, open_source

from effloop.batch import Batch
from effloop.data.engine import engines


@pytest.fixture(scope="module")
def fresh() -> Iterator[ProcessPoolExecutor]:
    """A process that has run nothing else, and may have children."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "dali" else name for name in engines.names()]
)
def test_nothing_grows_from_epoch_to_epoch(name: str, photos: Path, fresh: ProcessPoolExecutor) -> None:
    """15 epochs are 46 MB of pixels in 75 batches; one batch kept per epoch would be 9 MB.

    A library's own pool may still grow by some MB in one of the two stretches, what is kept grows in both.
    """
    settled, middle, last = fresh.submit(held_after_epochs, name, photos, (5, 20, 40)).result()
    assert min(middle["here"] - settled["here"], last["here"] - middle["here"]) < 3
    assert middle["python"] - settled["python"] < 0.1
    # A forked worker's malloc takes 12 MB until epoch 20 before it settles, and then goes up and down by 2.
    assert last["workers"] - middle["workers"] < 8


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_the_rings_size(held: bool, prefetch: int, photos: Path) -> None:
    """What is filled ahead, the batch handed out, and the last one if the loop has it until the next comes."""
    engine = make_engine("threads", make_plan(open_source("folder", photos), batch=4), 2, prefetch=prefetch)
    places = [_places(engine.stream(epoch), held=held) for epoch in range(20)]
    assert len(engine.ring) == prefetch + 1 + held  # type: ignore[attr-defined]
    assert len(set.union(*places)) == prefetch + 1 + held


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("name", ["inline", "threads", "processes"])
def test_slots_without_workers(name: str, held: bool, photos: Path) -> None:
    engine = make_engine(name, make_plan(open_source("folder", photos), batch=4))
    for epoch in range(20):
        assert len(_places(engine.stream(epoch), held=held)) == 1 + held


def _places(batches: Iterator[Batch], *, held: bool) -> set[int]:
    """Where the pixels of an epoch's batches lie; `held` as a for loop does, whose variable has the last one."""
    places = set()
    for batch in batches:
        places.add(batch.images.data_ptr())
        if not held:
            del batch
    return places

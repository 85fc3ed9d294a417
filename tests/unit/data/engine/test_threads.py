import gc
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from held import held_after_epochs
from plans import line, make_engine, make_plan, open_source

from effloop.batch import Batch
from effloop.data.engine import engines
from effloop.data.engine.base import Engine, EngineConfig, Ring
from effloop.data.plan import Plan
from effloop.errors import ConfigError, DataError
from effloop.registry import Entry


@pytest.mark.parametrize(("name", "run_length"), [("threads", 1), ("threads", 3), ("processes", 1), ("processes", 3)])
def test_runs_of_any_length_fill_the_same(photos, name, run_length):
    plan = make_plan(open_source("folder", photos))
    wanted = [batch.images for batch in make_engine("inline", plan).stream(0)]
    with closing(make_engine(name, plan, 2, run_length=run_length, prefetch=1)) as engine:
        assert all(torch.equal(a.images, b) for a, b in zip(engine.stream(0), wanted, strict=True))


def test_a_bad_sample_in_a_batchs_last_run(photos, tmp_path):
    plan = make_plan(open_source("folder", shutil.copytree(photos, tmp_path / "copy")))
    bad = int(next(plan.requests(0)).ids[-1])
    Path(plan.source.where, plan.source.key(bad)).write_bytes(b"")
    with pytest.raises(DataError, match=r"is empty \(0 bytes\); "):
        next(make_engine("threads", plan, 2, run_length=3).stream(0))


def test_an_engine_of_a_plugin_that_takes_pin_memory(photos, capsys, monkeypatch):
    def mine(config: EngineConfig, plan: Plan, *, num_workers: int, pin_memory: bool) -> Engine:
        assert not pin_memory
        return make_engine("inline", plan)

    monkeypatch.setitem(engines._found, "mine", Entry(EngineConfig, mine, ""))
    assert next(make_engine("mine", make_plan(open_source("folder", photos))).stream(0))
    assert "mine: pin_memory is deprecated, and version 0.5 will not give it; take device" in capsys.readouterr().err


@pytest.mark.parametrize("name", engines.names())
def test_runs_and_batches_of_nothing_are_refused(name):
    wanted = {"prefetch": "a number of batches above 0", "run_length": "a number of samples above 0, or null"}
    for key in wanted if name in ("threads", "processes") else ["prefetch"]:
        with pytest.raises(ConfigError, match=line(f"engine.{key}: 0 is not allowed; set {wanted[key]}")):
            engines[name].config(name=name, **{key: 0})


def test_a_run_is_a_workers_share_of_a_batch():
    config = engines["threads"].config()
    assert [config.resolve_run_length(batch, workers) for batch, workers in ((64, 2), (256, 2), (64, 16), (8, 3))] == [
        *(32, 32, 4, 4)
    ]
    assert engines["threads"].config(run_length=7).resolve_run_length(64, 2) == 7


# What engines hold in memory: as many batches as are under way, and no more the longer they run.


@pytest.fixture(scope="module")
def fresh() -> Iterator[ProcessPoolExecutor]:
    """A process that has run nothing else, and may have children."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.nightly
@pytest.mark.parametrize("name", engines.names())
def test_nothing_grows_from_epoch_to_epoch(name, photos, fresh):
    """15 epochs are 46 MB of pixels in 75 batches; one batch kept per epoch would be 9 MB.

    A library's own pool may still grow by some MB in one of the two stretches, what is kept grows in both.
    """
    settled, middle, last = fresh.submit(held_after_epochs, name, photos, (5, 20, 40)).result()
    assert min(middle["here"] - settled["here"], last["here"] - middle["here"]) < 3
    assert middle["python"] - settled["python"] < 0.1
    # A forked worker's malloc takes 12 MB until epoch 20 before it settles, and then goes up and down by 2.
    assert last["workers"] - middle["workers"] < 8


@pytest.mark.parametrize(("prefetch", "held"), [(1, True), (2, False), (5, True)])
def test_the_rings_size(held, prefetch, photos):
    """What is filled ahead, the batch handed out, and the last one if the loop has it until the next comes."""
    engine = make_engine("threads", make_plan(open_source("folder", photos), batch=4), 2, prefetch=prefetch)
    places = [_places(engine.stream(epoch), held=held) for epoch in range(20)]
    assert len(engine.ring) == prefetch + 1 + held  # type: ignore[attr-defined]
    assert len(set.union(*places)) == prefetch + 1 + held


def _places(batches: Iterator[Batch], *, held: bool) -> set[int]:
    """Where the pixels of an epoch's batches lie; `held` as a for loop does, whose variable has the last one."""
    places = set()
    for batch in batches:
        places.add(batch.images.data_ptr())
        if not held:
            del batch
    return places


SHAPE = (2, 4, 4, 3)


def test_memory_is_used_again():
    ring = Ring(torch.device("cpu"))
    first = ring.take(SHAPE)
    assert first.shape == SHAPE
    assert first.dtype == torch.uint8
    at = first.data_ptr()
    del first
    assert ring.take(SHAPE).data_ptr() == at
    assert len(ring) == 1


def test_what_is_held_is_not_written_over():
    ring = Ring(torch.device("cpu"))
    whole, view, array = ring.take(SHAPE), ring.take(SHAPE)[1:].permute(0, 3, 1, 2), ring.take(SHAPE).numpy()
    taken = {ring.take(SHAPE).data_ptr() for _ in range(3)}
    assert len(ring) == 4
    assert taken.isdisjoint({whole.data_ptr(), view.data_ptr() - 48, array.ctypes.data})
    del whole, view, array
    gc.collect()
    for _ in range(9):
        ring.take(SHAPE)
    assert len(ring) == 4


def test_another_shape():
    ring = Ring(torch.device("cpu"))
    ring.take(SHAPE)
    assert ring.take((3, 4, 4, 3)).shape == (3, 4, 4, 3)
    assert len(ring) == 1

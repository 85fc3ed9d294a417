from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from plans import line, make_engine, make_plan, open_source

from effloop.data.engine import engines
from effloop.errors import ConfigError, DataError


@pytest.mark.parametrize("run_length", [1, 3, 100])
def test_runs_of_any_length_fill_the_same(photos: Path, run_length: int) -> None:
    plan = make_plan(open_source("folder", photos))
    wanted = [batch.images for batch in make_engine("inline", plan).stream(0)]
    got = [batch.images for batch in make_engine("threads", plan, 2, run_length=run_length, prefetch=1).stream(0)]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_bad_sample_in_a_batchs_last_run(photos: Path, tmp_path: Path) -> None:
    plan = make_plan(open_source("folder", shutil.copytree(photos, tmp_path / "copy")))
    bad = int(next(plan.requests(0)).ids[-1])
    Path(plan.source.where, plan.source.key(bad)).write_bytes(b"")
    with pytest.raises(DataError, match=r"is empty \(0 bytes\)$"):
        next(make_engine("threads", plan, 2, run_length=3).stream(0))


@pytest.mark.parametrize("name", ["threads", "processes"])
def test_runs_of_nothing_are_refused(name: str) -> None:
    wanted = "engine.run_length: 0 is not allowed; set a number of samples above 0, or null"
    with pytest.raises(ConfigError, match=line(wanted)):
        engines[name].config(name=name, run_length=0)


def test_a_run_is_a_workers_share_of_a_batch() -> None:
    config = engines["threads"].config()
    assert [config.resolve_run_length(batch, workers) for batch, workers in ((64, 2), (256, 2), (64, 16), (8, 3))] == [
        *(32, 32, 4, 4)
    ]
    assert engines["threads"].config(run_length=7).resolve_run_length(64, 2) == 7

"""Runs with `on_error=skip`: what they train on, list and say, and when they end; and 1,000 damaged images."""

import json
import os
import random
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from plans import make_engine, make_plan, open_source
from runs import make_photos, rows, stopping_at, train

from effloop.cli.main import main
from effloop.data.bad import OnBad
from effloop.data.order import SAMPLE, Order
from effloop.data.source import Tail
from effloop.errors import DataError

SKIP = ("on_error=skip", "max_errors=4", "record.tensorboard=false", "num_workers=2")


@pytest.fixture
def damaged(photos: Path, tmp_path: Path) -> Path:
    """Two bad images to train on, one to validate with."""
    root = shutil.copytree(photos, tmp_path / "p")
    for split, count in (("train", 2), ("val", 1)):
        for file in sorted((root / split).rglob("*.jpg"))[2 : 2 + count]:
            file.write_bytes(file.read_bytes()[:300])
    return root


@pytest.mark.slow
def test_a_run_that_skips(damaged, tmp_path, capsys):
    """Stopped and resumed it is the same, to the bit, and each row of the list is there once."""
    assert train(damaged, "run=whole", f"out={tmp_path}", *SKIP) == 0
    with stopping_at(1):
        assert train(damaged, "run=part", f"out={tmp_path}", *SKIP) == 130
    assert main(["resume", str(tmp_path / "part")]) == 0
    capsys.readouterr()
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert rows(part) == rows(whole)
    listed = rows(whole, "skipped.jsonl")
    assert sorted(rows(part, "skipped.jsonl"), key=str) == sorted(listed, key=str)
    found = sorted((row["split"], row["epoch"], row["id"], row["instead"] is None) for row in listed)
    assert found == [("train", e, i, False) for e in (0, 1) for i in (2, 3)] + [("val", 0, 2, True)]
    assert all(row["name"].startswith(f"{damaged}/") and "truncated" in row["reason"] for row in listed)
    assert json.loads((whole / "summary.json").read_text())["skipped"] == {"train": 2, "val": 1}
    log = [line for line in (whole / "log.txt").read_text().splitlines() if "skipped  " in line]
    assert len(log) == 2  # once, not after each epoch
    names = [row["name"] for row in listed if (row["split"], row["epoch"]) == ("train", 0)]
    assert "2 of train can't be loaded and were replaced" in log[0]
    assert all(name in log[0] for name in names)
    assert "others" not in log[0]
    assert "1 of val can't be loaded and were left out" in log[1]
    assert main(["eval", str(whole)]) == 0
    assert "\n1 left out: " in capsys.readouterr().out
    scores = json.loads((whole / "eval/val/scores.json").read_text())
    assert (scores["samples"], scores["skipped"]) == (12, 1)
    assert sum(row["samples"] for row in scores["rows"]) == 12
    capsys.readouterr()
    assert train(damaged, "run=few", f"out={tmp_path}", *SKIP, "max_errors=1") == 2
    assert "(2 of train, 1 of val); set on_error=skip max_errors=2 to do without them" in capsys.readouterr().err
    assert train(damaged, "run=late", f"out={tmp_path}", *SKIP, "max_errors=1", "data.check=0") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"effloop: on_error: 2 samples in {damaged}/train can't be loaded, and max_errors=1 allows 1; "
        f"{tmp_path}/late/skipped.jsonl lists them: repair or remove them, or set max_errors higher"
    )


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.nightly)])
def test_what_is_trained_again_is_listed_once(damaged, tmp_path, ranks):
    """An image that was mended since is bad no more, but in what is not done again."""
    several = ("parallel=ddp", "parallel.processes=2", "batch_size=4") if ranks == 2 else ()
    steps = ("checkpoint.every_steps=3", "checkpoint.keep=20")
    assert train(damaged, "run=run", f"out={tmp_path}", *SKIP, *steps, *several) == 0
    run = tmp_path / "run"
    before = rows(run, "skipped.jsonl")
    bad = {row["id"]: Path(row["name"]) for row in before if row["split"] == "train"}
    mended, *_ = bad
    bad[mended].write_bytes(next(p for p in bad[mended].parent.iterdir() if p not in bad.values()).read_bytes())
    for step in (8, 6):  # 8 and 6 of 10 updates: in the second epoch
        path = run / f"checkpoints/step-{step:08}.ckpt"
        if path.exists():
            break
    assert main(["resume", str(path)]) == 0
    after = [(row["split"], row["epoch"], row["id"]) for row in rows(run, "skipped.jsonl")]
    assert len(after) == len({*after})
    assert {*after} <= {(row["split"], row["epoch"], row["id"]) for row in before}
    assert main(["resume", str(run / "checkpoints/step-00000003.ckpt")]) == 0
    after = [(row["split"], row["epoch"], row["id"]) for row in rows(run, "skipped.jsonl")]
    assert len(after) == len({*after})
    assert ("train", 1, mended) not in after
    assert {("train", 1, each) for each in bad if each != mended} <= {*after}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("max_errors=nan", "max_errors: nan is not allowed; set a share"),
        ("engine.timeout_s=0", "engine.timeout_s: 0 is not allowed; set a number of seconds above 0"),
    ],
)
def test_values(photos, capsys, override, told):
    assert train(photos, override) == 2
    assert told in capsys.readouterr().err


def harm(data: bytes, seed: int) -> bytes:
    """An image with a byte flipped, cut, or with a stretch of zeros."""
    numbers = random.Random(seed)
    at = numbers.randrange(len(data))
    if seed % 3 == 0:
        return data[:at] + bytes([data[at] ^ 1 << numbers.randrange(8)]) + data[at + 1 :]
    if seed % 3 == 1:
        return data[:at]
    end = min(len(data), at + numbers.randrange(1, len(data)))
    return data[:at] + bytes(end - at) + data[end:]


def campaign(root: Path, seeds: range) -> None:
    """Each seed harms one image. What can't be decoded is named, or listed, exactly, by any engine and ranks."""
    files = sorted(os.fsencode(each) for each in (root / "train").rglob("*.jpg"))
    for number, file in enumerate(files):
        path = Path(os.fsdecode(file))
        path.write_bytes(harm(path.read_bytes(), seeds[number]))
    source = open_source("folder", root)
    plan = make_plan(source, batch=20)
    one = make_plan(source, batch=1)
    bad = {}
    for request in one.requests(0):  # what this epoch's crops see, image by image
        try:
            one.fill(request, one.empty_batch(request).images, 0, 1)
        except DataError as error:
            bad[int(request.samples[0])] = str(error)
    assert bad
    assert all(line.startswith(source.name(sample)) and "\n" not in line for sample, line in bad.items())
    with closing(make_engine("threads", plan, 2)) as engine, pytest.raises(DataError) as caught:
        list(engine.stream(0))
    assert str(caught.value) in bad.values()
    told = []
    skipping = replace(plan, on_bad=OnBad.replace)
    for name, workers, ranks in (("inline", 0, 1), ("threads", 2, 1), ("processes", 2, 1), ("threads", 1, 2)):
        found: list[dict[int, object]] = []
        for rank in range(ranks):
            order = Order(len(source), 20 // ranks, plan.seed, Tail.drop, rank, ranks)
            with closing(make_engine(name, replace(skipping, order=order), workers)) as engine:
                batches = list(engine.stream(0))
            assert len(batches) == len(plan.order)
            found.append({each.id & SAMPLE: (each.reason, each.instead) for b in batches for each in b.skipped})
        told.append({key: value for part in found for key, value in part.items()})
    assert {*told[0]} == {*bad}
    assert all(each == told[0] for each in told)


def test_some_harmed_images(tmp_path):
    campaign(make_photos(tmp_path / "p", 40, 3), range(40))


@pytest.mark.nightly
def test_a_thousand_harmed_images(tmp_path):
    seeds = int(os.environ.get("EFFLOOP_SEEDS", "1000"))
    for first in range(0, seeds, 200):
        campaign(make_photos(tmp_path / str(first), 200, 3), range(first, first + 200))

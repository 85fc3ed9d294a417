"""`on_error=skip`: what can't be loaded is replaced, or left out, alike by every engine, from every format."""

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import READ_BY, make_decoder, make_engine, make_plan, open_source, write_as

from effloop.batch import Batch
from effloop.data.bad import OnBad
from effloop.data.engine import engines
from effloop.data.order import SAMPLE, Order
from effloop.data.plan import Plan
from effloop.data.source import Tail
from effloop.data.source.storage.writing import writers
from effloop.errors import ConfigError

ENGINES = [(name, workers) for name in engines.names() for workers in (0, 2) if workers or name == "inline"]


@pytest.fixture
def damaged(photos: Path, tmp_path: Path) -> Path:
    """Photos of which every sixth can't be loaded: cut, empty, zeroed, or no image at all."""
    root = shutil.copytree(photos, tmp_path / "damaged")
    for split in ("train", "val"):
        for number, file in enumerate(sorted((root / split).rglob("*.jpg"))[1::6]):
            data = file.read_bytes()
            file.write_bytes((data[: len(data) // 2], b"", bytes(len(data)), b"\xff\xd8 no image")[number % 4])
    return root


def bad_of(plan: Plan) -> set[int]:
    """What can't be loaded, found one by one."""
    found = set()
    for sample in range(len(plan.source)):
        try:
            plan.decoder.decode(plan.source.read(sample))
        except Exception:
            found.add(sample)
    return found


def loaded(plan: Plan, name: str = "inline", workers: int = 0, epoch: int = 0, seen: int = 0) -> list[Batch]:
    with closing(make_engine(name, plan, workers)) as engine:
        batches = list(engine.stream(epoch, seen))
        for batch in batches:
            batch.images = batch.images.clone()
        return batches


def told(batches: list[Batch]) -> list[Any]:
    """Everything about batches but the pixels."""
    return [[batch.ids.tolist(), batch.targets.tolist(), batch.valid.tolist(), [*batch.skipped]] for batch in batches]


@pytest.mark.parametrize(("name", "workers"), ENGINES)
@pytest.mark.parametrize("split", ["train", "val"])
def test_every_engine_skips_alike(damaged, name, workers, split):
    train = split == "train"
    plan = make_plan(open_source("folder", damaged, split), train=train)
    plan = replace(plan, on_bad=OnBad.replace if train else OnBad.leave_out)
    bad = bad_of(plan)
    assert bad
    for epoch in (0, 1):
        wanted, got = loaded(plan, epoch=epoch), loaded(plan, name, workers, epoch)
        assert told(got) == told(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert (one.images.float() - other.images.float()).abs().mean() < (2 if name == "dali" else 1e-9)
        skipped = [each for batch in got for each in batch.skipped]
        asked = {number for request in plan.requests(epoch) for number in request.samples[request.valid].tolist()}
        assert {each.id & SAMPLE for each in skipped} == bad & asked
        for batch in got:
            for row, sample in enumerate((batch.ids & SAMPLE).tolist()):
                assert not batch.valid[row] or sample not in bad
                assert not batch.valid[row] or batch.targets[row] == plan.source.targets[sample]
                assert batch.valid[row] or not batch.images[row].any()
        assert told(loaded(plan, name, workers, epoch, 8)) == told(wanted[1:])  # a function of the position


def test_ranks_skip_what_one_alone_does(damaged):
    plan = replace(make_plan(open_source("folder", damaged)), on_bad=OnBad.replace)
    alone = loaded(plan)
    orders = [Order(len(plan.source), 4, plan.seed, Tail.drop, rank, 2) for rank in range(2)]
    parts = [loaded(replace(plan, order=order)) for order in orders]
    assert len(parts[0]) == len(parts[1]) == len(alone)
    for number, batch in enumerate(alone):
        halves = [part[number] for part in parts]
        assert torch.equal(torch.cat([half.images for half in halves]), batch.images)
        assert torch.equal(torch.cat([half.targets for half in halves]), batch.targets)
        assert torch.equal(torch.cat([half.ids for half in halves]), batch.ids)


@pytest.mark.parametrize("form", [name for name in writers if name != "folder"])
def test_every_format_skips_what_its_checksums_find(photos, tmp_path, form):
    """One flipped byte in the last third of an image, which decoders may well accept."""
    root = write_as(form, photos, tmp_path / form)
    source = open_source(READ_BY.get(form, form), root)
    assert source.has_checksums
    bad, wanted = {3, 17}, {}
    for sample in bad:
        wanted[sample] = bytes(source.read(sample))
    del source
    for data in wanted.values():
        flip(root, data)
    source = open_source(READ_BY.get(form, form), root)
    plan = replace(make_plan(source), on_bad=OnBad.replace)
    skipped = {each.id & SAMPLE for batch in loaded(plan, "threads", 2) for each in batch.skipped}
    asked = {number for request in plan.requests(0) for number in request.samples.tolist()}
    assert skipped == bad & asked


def flip(root: Path, data: bytes) -> None:
    """Change a byte of these where they are in a file below a folder."""
    files = [root] if root.is_file() else [each for each in root.rglob("*") if each.is_file()]
    for file in sorted(files, key=lambda file: "val" in str(file.relative_to(root))):  # has the same images
        whole = bytearray(file.read_bytes())
        if (at := whole.find(data)) >= 0:
            whole[at + len(data) * 2 // 3] ^= 1
            file.write_bytes(whole)
            return
    raise AssertionError("not stored as it is")


class _Hungry(type(make_decoder("auto"))):  # type: ignore[misc]
    """Finds no memory for an image."""

    def decode_with_info(self, data, info, box=None, at_least=None):  # type: ignore[no-untyped-def]
        return bytearray(1 << 62)


@pytest.mark.parametrize(("name", "workers"), [each for each in ENGINES if each[0] != "dali"])
def test_too_little_memory_is_no_bad_sample(photos, name, workers):
    plan = make_plan(open_source("folder", photos), _Hungry(make_decoder("auto").config))
    with (
        closing(make_engine(name, replace(plan, on_bad=OnBad.replace), workers)) as engine,
        pytest.raises(ConfigError, match=r"^[^\n]+ can't be loaded: out of memory; set num_workers[^\n]+$"),
    ):
        next(iter(engine.stream(0)))

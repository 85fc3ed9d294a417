"""What every registered engine has to do. Inline is the reference; for an engine with a decoder of its own, itself."""

import multiprocessing
import re
import shutil
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from images import encode, photo
from plans import line, make_decoder, make_engine, make_plan, native_config, open_source

from effloop.batch import Batch, ImageSize
from effloop.cli.main import main
from effloop.convert.index import build_indexes
from effloop.data.augment.native.augment import NativeAugment
from effloop.data.engine import engines
from effloop.data.plan import Plan
from effloop.data.source import DataConfig, entropy
from effloop.data.source.config import Index
from effloop.data.source.entropy import with_indexes
from effloop.data.transfer import Transfer
from effloop.errors import ConfigError, DataError

CASES = [("inline", 0), ("threads", 0), ("threads", 2), ("processes", 1), ("processes", 2), ("auto", 3), ("dali", 2)]
assert {name for name, _ in CASES} == {*engines}
OWN_PIXELS = [name for name in engines.names() if not getattr(engines[name].factory, "exact", True)]
"""Engines that decode by themselves: their pixels are within 2 levels (mean of a batch) of inline's."""
every_engine = pytest.mark.parametrize(("name", "num_workers"), CASES)


@pytest.fixture(params=["train", "val"])
def plan(request: pytest.FixtureRequest, photos: Path) -> Plan:
    return make_plan(open_source("folder", photos, request.param), train=request.param == "train")


@pytest.fixture
def train_plan(photos: Path) -> Plan:
    return make_plan(open_source("folder", photos))


def inline(plan: Plan, epoch: int, samples_seen: int = 0) -> list[Batch]:
    return list(make_engine("inline", plan).stream(epoch, samples_seen))


def reference(name: str, plan: Plan, epoch: int, samples_seen: int = 0) -> list[Batch]:
    """What this engine must give, to the bit: the whole epoch's batches, from a position on."""
    if name not in OWN_PIXELS:
        return inline(plan, epoch, samples_seen)
    with closing(make_engine(name, plan)) as engine:
        return list(engine.stream(epoch))[samples_seen // plan.order.global_batch :]


def assert_same(got: Iterable[Batch], wanted: Iterable[Batch]) -> None:
    for one, other in zip(got, wanted, strict=True):
        for field in ("ids", "targets", "valid", "images"):
            a, b = getattr(one, field), getattr(other, field)
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            assert torch.equal(a, b), field


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """No thread and no process that wasn't there before."""
    threads = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive(), thread
    assert multiprocessing.active_children() == []


@every_engine
def test_batches_equal_the_references_to_the_bit(plan, name, num_workers):
    before = torch.get_rng_state()
    with nothing_left_behind(), closing(make_engine(name, plan, num_workers)) as engine:
        for epoch in (0, 1):
            assert_same(engine.stream(epoch), reference(name, plan, epoch))
        assert_same(engine.stream(0), reference(name, plan, 0))  # and back
    assert torch.equal(torch.get_rng_state(), before)  # global generators are left alone


@pytest.mark.parametrize("name", OWN_PIXELS)
def test_own_pixels_are_near_inlines(plan, name):
    with closing(make_engine(name, plan, 2)) as engine:
        for one, other in zip(engine.stream(1), inline(plan, 1), strict=True):
            assert (one.images.float() - other.images.float()).abs().mean() < 2
            one.images = other.images
            assert_same([one], [other])


@pytest.mark.parametrize(
    ("name", "num_workers", "channels_last"),
    [(*case, bool(case[1] % 2)) for case in CASES if getattr(engines[case[0]].factory, "fills_by_plan", True)],
)
def test_normalised_where_a_batch_is_filled(plan, name, num_workers, channels_last):
    """As the transfer to a CPU does it, to the bit; a kept batch stays what it is."""
    mean_std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    transfer = Transfer(torch.device("cpu"), *mean_std, channels_last=channels_last)
    wanted = [transfer.normalize(batch.images) for batch in inline(plan, 1)]
    with (
        nothing_left_behind(),
        closing(make_engine(name, replace(plan, output=transfer.host_output()), num_workers)) as engine,
    ):
        got = list(engine.stream(1))
        for one, other in zip(got, wanted, strict=True):
            assert one.images.stride() == other.stride()
            assert torch.equal(one.images, other)


@pytest.mark.parametrize(("name", "num_workers"), [("inline", 0), *((name, 2) for name in OWN_PIXELS)])
def test_shape_and_layout(plan, name, num_workers):
    with closing(make_engine(name, plan, num_workers)) as engine:
        batches = list(engine.stream(0))
    assert len(batches) == len(plan.order)
    for batch in batches:
        assert batch.images.shape == (8, 3, 24, 24)
        assert batch.images.dtype == batch.targets.dtype == torch.uint8
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert batch.ids.dtype == torch.int64
        assert batch.valid.dtype == torch.bool
        assert not batch.images[~batch.valid].any()
        assert batch.images[batch.valid].flatten(1).any(1).all()


@every_engine
def test_batches_stay_what_they_are(train_plan, name, num_workers):
    """Somebody who keeps a batch doesn't find another one in it later."""
    with closing(make_engine(name, train_plan, num_workers)) as engine:
        batches = engine.stream(0)
        first = next(batches)
        images = first.images.clone()
        rest = list(batches)
        assert torch.equal(first.images, images)
        assert_same([first, *rest], reference(name, train_plan, 0))


@every_engine
def test_from_a_position(train_plan, name, num_workers):
    with nothing_left_behind(), closing(make_engine(name, train_plan, num_workers)) as engine:
        with pytest.raises(ConfigError, match="samples_seen: 12 is inside a batch of 8"):
            list(engine.stream(0, 12))
        assert_same(engine.stream(1, 16), reference(name, train_plan, 1, 16))
        assert_same(engine.stream(1, 8 * len(train_plan.order)), [])
        assert_same(engine.stream(0), reference(name, train_plan, 0))


@every_engine
def test_leaving_early(train_plan, name, num_workers):
    with nothing_left_behind():
        engine = make_engine(name, train_plan, num_workers)
        for taken, _ in enumerate(engine.stream(0)):
            if taken == 1:
                break
        assert_same(engine.stream(1), reference(name, train_plan, 1))  # nothing of the epoch that was left
        for _ in engine.stream(2):
            break
        engine.close()


@every_engine
def test_two_epochs_at_a_time(train_plan, name, num_workers):
    with nothing_left_behind(), closing(make_engine(name, train_plan, num_workers)) as engine:
        pairs = list(zip(engine.stream(0), engine.stream(1), strict=True))
        for epoch, batches in enumerate(zip(*pairs, strict=True)):
            assert_same(batches, reference(name, train_plan, epoch))


@every_engine
def test_a_bad_sample_in_the_middle(photos, tmp_path, name, num_workers):
    plan = make_plan(open_source("folder", shutil.copytree(photos, tmp_path / "copy")))
    wanted = reference(name, plan, 0)
    bad = Path(plan.source.where, plan.source.key(int(wanted[2].ids[5])))
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    with nothing_left_behind(), closing(make_engine(name, plan, num_workers)) as engine:
        got = []
        with pytest.raises(DataError, match=f"^{bad} is a truncated JPEG: [^\n]+$"):  # noqa: PT012
            for batch in engine.stream(0):
                got.append(batch)
        assert_same(got, wanted[:2])  # those before it came
        bad.write_bytes(whole)
        assert_same(engine.stream(0), wanted)  # and it goes on when the file is mended


@every_engine
def test_of_several_bad_samples_the_first_is_named(photos, tmp_path, name, num_workers):
    shutil.copytree(photos, tmp_path / "photos")
    for number, file in enumerate(sorted((tmp_path / "photos/train").rglob("*.jpg"))):
        if number % 3:
            file.write_bytes(file.read_bytes()[:-200])
    plan = make_plan(open_source("folder", tmp_path / "photos"))
    with pytest.raises(DataError) as wanted:
        inline(plan, 0)
    for _ in range(5):
        with closing(make_engine(name, plan, num_workers)) as engine, pytest.raises(DataError) as got:
            list(engine.stream(0))
        assert str(got.value) == str(wanted.value)


@every_engine
def test_an_image_too_small_for_a_crop_is_named(photos, tmp_path, name, num_workers):
    root = shutil.copytree(photos, tmp_path / "photos")
    (root / "train/b/001.jpg").write_bytes(encode(photo(20, 20), "JPEG"))
    config = native_config(ops={"crop": {"op": "RandomCrop"}})
    plan = replace(
        make_plan(open_source("folder", root)), augment=NativeAugment(config, size=ImageSize.of(24), train=True)
    )
    wanted = (
        f"{root}/train/b/001.jpg can't be augmented: augment.ops.crop.size: 24x24 is more than the 20x20 pixels of an "
        "image; set it smaller, resize before, or set padding; set on_error=skip to do without it"
    )
    with closing(make_engine(name, plan, num_workers)) as engine, pytest.raises(DataError, match=line(wanted)):
        list(engine.stream(0))


class _Broken(type(make_decoder("auto"))):  # type: ignore[misc]
    """As a plugin's decoder may be."""

    def decode_with_info(self, data, info, box=None, at_least=None):  # type: ignore[no-untyped-def]
        raise ZeroDivisionError("no pixels at all")


@every_engine
def test_any_error_says_which_sample(photos, name, num_workers):
    if name in OWN_PIXELS:
        pytest.skip("this decoder isn't asked")
    plan = make_plan(open_source("folder", photos), _Broken(make_decoder("auto").config))
    with nothing_left_behind(), closing(make_engine(name, plan, num_workers)) as engine:
        with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
            next(iter(engine.stream(0)))
        told = "".join(traceback.format_exception(caught.value))
        assert re.search(f"while {re.escape(plan.source.where)}/.+ was loaded", told)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, to pin memory for")
@every_engine
def test_pinned_memory(train_plan, name, num_workers):
    if name in OWN_PIXELS:
        pytest.skip("with a GPU, its images are there")
    with closing(make_engine(name, train_plan, num_workers, device="cuda")) as engine:
        batches = list(engine.stream(0))
    assert all(batch.images.is_pinned() for batch in batches)
    assert_same(batches, reference(name, train_plan, 0))


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs that are large enough for entropy indexes to be of use, of several kinds of JPEG."""
    kinds = (
        {},
        {"subsampling": 0},
        {"progressive": True},
        {"optimize": True},
        {"mode": "L"},
        {"restart_marker_rows": 1},
    )
    root = tmp_path_factory.mktemp("larger")
    for number in range(18):
        path = root / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        options = kinds[number % len(kinds)]
        path.write_bytes(encode(photo(200 + number, 190, number), "JPEG", **options))  # type: ignore[arg-type]
    return root


@pytest.mark.parametrize(("name", "num_workers", "packed"), [(*case, n % 2 == 0) for n, case in enumerate(CASES)])
def test_entropy_indexes_change_no_pixel(name, num_workers, packed, larger, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain, decoder = open_source("folder", larger), make_decoder(region=True)
    if packed:
        command = ["convert", f"data.root={larger}", "split=train", "to=memmap", f"out={tmp_path / 'packed'}"]
        assert main(command) == 0
        indexed = open_source("memmap", tmp_path / "packed")
    else:
        build_indexes({"train": plain}, None, 1)
        indexed = with_indexes(plain, DataConfig(name="folder", root=str(larger), index=Index.read))
    found = [indexed.entropy_index(sample, indexed.read(sample)) for sample in range(len(indexed))]
    assert sum(index is not None for index in found) == 12
    wanted, plan = make_plan(plain, decoder), make_plan(indexed, decoder)
    for epoch in (0, 1):
        with closing(make_engine(name, plan, num_workers)) as engine:
            assert_same(engine.stream(epoch), reference(name, wanted, epoch))


@pytest.mark.parametrize(("name", "num_workers"), [("inline", 0), ("threads", 2), ("processes", 2)])
def test_indexes_are_built_while_batches_are_loaded(name, num_workers, larger, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(entropy, "SHARE", 1e9)  # of the time
    plain, decoder = open_source("folder", larger), make_decoder(region=True)
    source = with_indexes(plain, DataConfig(name="folder", root=str(larger)))
    for epoch in (0, 1, 2):  # an epoch leaves out the tail
        with closing(make_engine(name, make_plan(source, decoder), num_workers)) as engine:
            assert_same(engine.stream(epoch), inline(make_plan(plain, decoder), epoch))
    (report,) = build_indexes({"train": plain}, None, 1).values()
    assert (report.indexed, report.built) == (12, 0)

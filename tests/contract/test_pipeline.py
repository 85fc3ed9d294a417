"""Every engine with every source, either with every decoder: the same samples, with the same pixels."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from images import encode, exif, photo

from effloop.batch import Batch
from effloop.data.cache.cached import cached
from effloop.data.decode import Decoder, decoders
from effloop.data.engine import engines
from effloop.data.source import Cache, Source, sources
from effloop.data.source.storage.writing import writers
from effloop.errors import ConfigError

KINDS: dict[str, dict[str, Any]] = {
    "plain.jpg": {"fmt": "JPEG"},
    "restart.jpg": {"fmt": "JPEG", "restart_marker_blocks": 1},
    "grey.jpg": {"fmt": "JPEG", "mode": "L"},
    "progressive.jpg": {"fmt": "JPEG", "progressive": True},
    "some.png": {"fmt": "PNG"},
    "some.gif": {"fmt": "GIF"},
    "turned.jpg": {"fmt": "JPEG", "exif": exif(6)},
    "some.tif": {"fmt": "TIFF", "exif": exif(6)},
}
SPLITS = {"train": 45, "val": 11}  # samples; neither is a multiple of the batch
LEVELS = 2.0  # of 255, mean over an image: what decoders may differ by

every_decoder = pytest.mark.parametrize("decode", decoders.names())


def installed(decode: str) -> bool:
    try:
        plans.make_decoder(decode)
    except ConfigError:
        return False
    return True


DALI = find_spec("nvidia") and find_spec("nvidia.dali")
AVAILABLE = (  # decoders and engines: with one that isn't there, two others would meet in a test that is skipped
    [name for name in decoders.names() if installed(name)],
    [name for name in engines.names() if name != "dali" or DALI],
)

PAIRS = [*zip(AVAILABLE[0], itertools.cycle(AVAILABLE[1])), ("auto", "processes"), ("auto", "threads")]
"""Engines don't look at the decoder: each decoder meets one."""

STORED = sorted((*writers, *(f"table.{ending}" for ending in plans.TABLES)))  # what a dataset is written as

Opened = Callable[[str, str], Source]  # (format, split) -> the dataset's split in that format
Epochs = dict[str, list[Batch]]  # split -> the batches of an epoch


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of every kind, 60 to 120 pixels high and wide, in three classes."""
    root = tmp_path_factory.mktemp("mixed")
    for split, count in SPLITS.items():
        for number in range(count):
            name, options = list(KINDS.items())[number % len(KINDS)]
            path = root / split / "abc"[number % 3] / f"{number:02}-{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = photo(60 + 37 * number % 61, 60 + 23 * number % 61, seed=number + 100 * (split == "val"))
            path.write_bytes(encode(pixels, **options))
    return root


@pytest.fixture(scope="module")
def opened(mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Opens the dataset in a format, which is written once."""

    @cache
    def written(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        table, _, ending = name.rpartition(".")
        return plans.write_table(ending, mixed, folder) if table else plans.write_as(name, mixed, folder / "written")

    return lambda name, split: plans.open_source(plans.READ_BY.get(name, name), written(name), split)


@pytest.fixture(scope="module")
def wanted(mixed: Path) -> Callable[[str], Epochs]:
    """Decoder -> what the training thread loads with it from a folder."""

    @cache
    def reference(decode: str) -> Epochs:
        folder = {split: plans.open_source("folder", mixed, split) for split in SPLITS}
        return {split: one_epoch("inline", source, decoder_of(decode), split)[0] for split, source in folder.items()}

    return reference


def decoder_of(name: str, **options: bool) -> Decoder:
    try:
        return plans.make_decoder(name, **options)
    except ConfigError as error:
        pytest.skip(str(error))


def one_epoch(engine: str, source: Source, decoder: Decoder, split: str, times: int = 1) -> tuple[list[Batch], bool]:
    """The batches of epoch 1, by two workers, the last of `times` times; whether the engine is exact."""
    plan = plans.make_plan(source, decoder, train=split == "train", size=32)
    with closing(plans.make_engine(engine, plan, 2)) as made:
        for _ in range(times):
            batches = list(made.stream(1))
        return batches, made.exact


def assert_same(got: Sequence[Batch], wanted: Sequence[Batch], *, exact: bool = True) -> None:
    """The same samples; their pixels to the bit, or within 2 levels mean in every image."""
    for one, other in zip(got, wanted, strict=True):
        for field in ("ids", "targets", "valid", "images"):
            a, b = getattr(one, field), getattr(other, field)
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), field
            if exact or field != "images":
                assert a.equal(b), field
        assert (one.images.float() - other.images.float()).abs().mean((1, 2, 3)).max() <= LEVELS


def test_every_source_is_among_them():
    # all but the first two have tests of their own
    rest = {"auto", "embedded", "beton", "cifar", "hf", "idx", "masks", "npz", "zip"}
    assert {plans.READ_BY.get(name, name) for name in STORED} == set(sources) - rest


@pytest.mark.parametrize(("name", "decode", "engine"), plans.pairwise(STORED, *AVAILABLE))
def test_every_way_to_the_same_batches(name, decode, engine, opened, wanted):
    for split, batches in wanted(decode).items():
        got, exact = one_epoch(engine, opened(name, split), decoder_of(decode), split)
        assert_same(got, batches, exact=exact)


def test_the_reference_has_every_sample(wanted):
    """Or the comparisons would be of nothing."""
    epochs = wanted("pillow")
    train, val = (torch.cat([batch.ids[batch.valid] for batch in epochs[split]]) for split in SPLITS)
    assert len(train.unique()) == len(train) == 40
    assert val.tolist() == list(range(11))
    for batches in epochs.values():
        for batch in batches:
            assert batch.images[batch.valid].float().flatten(1).std(1).min() > 10


@every_decoder
def test_decoders_are_close_to_each_other(decode, wanted):
    for split, batches in wanted("pillow").items():
        assert_same(wanted(decode)[split], batches, exact=False)


@pytest.mark.parametrize(("decode", "engine"), PAIRS)
def test_regions_are_of_the_whole(decode, engine, opened, wanted):
    for split, batches in wanted(decode).items():
        got, exact = one_epoch(engine, opened("folder", split), decoder_of(decode, region=True), split)
        assert_same(got, batches, exact=exact)


@pytest.mark.parametrize(("decode", "engine"), PAIRS)
def test_turned_images_are_the_same_everywhere(decode, engine, opened):
    for split in SPLITS:
        wanted, _ = one_epoch("inline", opened("folder", split), decoder_of(decode, exif=True), split)
        got, exact = one_epoch(engine, opened("memmap", split), decoder_of(decode, exif=True, region=True), split)
        assert_same(got, wanted, exact=exact)


@pytest.mark.parametrize(("kind", "engine"), [(Cache.bytes, "threads"), (Cache.pixels, "processes")])
def test_what_is_kept_is_what_is_read(kind, engine, opened, wanted, tmp_path):
    decoder = decoder_of("auto")
    for split, batches in wanted("auto").items():
        source = cached(opened("memmap", split), kind, decoder, 50e6, folder=tmp_path)
        got, exact = one_epoch(engine, source, decoder, split, times=2)  # the second time from memory
        assert_same(got, batches, exact=exact)

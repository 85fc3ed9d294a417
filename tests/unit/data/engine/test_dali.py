import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from images import encode, exif, photo, png
from numpy.typing import NDArray
from plans import make_engine, make_plan, native_config, open_source, write_records

from effloop.batch import Batch, ImageSize
from effloop.data.augment.base import Device, Draws
from effloop.data.augment.native.augment import NativeAugment
from effloop.data.cache.cached import cached
from effloop.data.engine import Engine
from effloop.data.engine.dali import DaliConfig, DaliEngine
from effloop.data.image.header import pnm_header
from effloop.data.plan import Plan
from effloop.data.source import Cache
from effloop.errors import ConfigError, DataError

pytest.importorskip("nvidia.dali", reason="engine=dali needs nvidia-dali")

BIG = photo(120, 160)
PLAIN = {
    "420.jpg": encode(BIG, "JPEG", quality=90),
    "444.jpg": encode(BIG, "JPEG", quality=90, subsampling=0),
    "422.jpg": encode(BIG, "JPEG", quality=90, subsampling=1),
    "grey.jpg": encode(BIG, "JPEG", "L"),
    "rgb.jpg": encode(BIG, "JPEG", keep_rgb=True),
    "progressive.jpg": encode(BIG, "JPEG", progressive=True),
    "markers.jpg": encode(BIG, "JPEG", restart_marker_blocks=4),
    "turned.jpg": encode(BIG, "JPEG", exif=exif(6)),
    "rgb.png": encode(BIG, "PNG"),
    "grey.png": encode(BIG, "PNG", "L"),
    "lossy.webp": encode(BIG, "WEBP"),
    "lossless.webp": encode(BIG, "WEBP", lossless=True),
    "turned.webp": encode(BIG, "WEBP", exif=exif(6)),
    "24.bmp": encode(BIG, "BMP"),
    "one.jpg": encode(photo(1, 1), "JPEG"),
    "flat.jpg": encode(photo(3, 200), "JPEG"),
}
OTHERS = {
    "cmyk.jpg": encode(BIG, "JPEG", "CMYK"),
    "16.png": png(64, 48, 16, 0, np.linspace(0, 65535, 64 * 48).astype(">u2").tobytes()),
    "palette.png": encode(BIG, "PNG", "P"),
    "alpha.png": encode(BIG, "PNG", "RGBA"),
    "turned.png": encode(BIG, "PNG", exif=exif(6)),
    "palette.bmp": encode(BIG, "BMP", "P"),
    "raw.ppm": pnm_header(*BIG.shape) + BIG.tobytes(),
    "junk.jpg": encode(BIG, "JPEG") + b"behind the end",
}


def kinds(root: Path, images: Mapping[str, bytes], **options: bool) -> Plan:
    records = [(name.encode(), label % 2, data) for label, (name, data) in enumerate(images.items())]
    source = open_source("memmap", write_records("memmap", root / "set", ["a", "b"], train=records, val=records))
    return make_plan(source, **options)


def images(engine: Engine, epoch: int = 0) -> dict[int, torch.Tensor]:
    return {i: image for b in engine.stream(epoch) for i, image in zip(b.ids.tolist(), b.images, strict=True)}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("epoch", range(3))
def test_every_kind_looks_as_elsewhere(train, epoch, tmp_path):
    plan = kinds(tmp_path, PLAIN, train=train)
    wanted = images(make_engine("inline", plan), epoch)
    got = images(make_engine("dali", plan, 2), epoch)
    assert got.keys() == wanted.keys()
    assert len(got) == len(PLAIN)
    for i, name in enumerate(PLAIN):
        far = (got[i].float() - wanted[i].float()).abs()
        assert far.mean() <= 1, name  # the most seen: 0.17
        assert far.max() <= 4, name  # 2


@pytest.mark.parametrize("number", [0, 7])
def test_a_batch_with_what_dali_cant_decode(number, tmp_path, capfd):
    plan = kinds(tmp_path, {**dict([*PLAIN.items()][:number]), **OTHERS}, train=False)
    wanted, got = images(make_engine("inline", plan)), images(make_engine("dali", plan, 1))
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[i], wanted[i]) for i in wanted)
    assert capfd.readouterr().err == ""


def assert_same(got: list[Batch], wanted: list[Batch]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.images, other.images)


def test_batches_outlive_their_engine(photos):
    engine = make_engine("dali", make_plan(open_source("folder", photos)), 2)
    batches = list(engine.stream(0))
    copies = [batch.images.clone() for batch in batches]
    engine.close()
    for epoch in (1, 2):
        list(engine.stream(epoch))
    del engine
    assert all(torch.equal(batch.images, copy) for batch, copy in zip(batches, copies, strict=True))


def test_pixels_kept_in_memory(photos):
    plan = make_plan(open_source("folder", photos))
    kept = replace(plan, source=cached(plan.source, Cache.pixels, plan.decoder, 1e6))
    list(make_engine("inline", kept).stream(0))
    assert_same(list(make_engine("dali", kept, 2).stream(0)), list(make_engine("inline", plan).stream(0)))


def test_a_batch_of_padding_alone(photos):
    plan = make_plan(open_source("folder", photos, "val"), train=False)
    plan = replace(plan, order=replace(plan.order, batch_per_rank=5, rank=3, world_size=4))
    (batch,) = make_engine("dali", plan, 1).stream(0)
    assert not batch.valid.any()
    assert not batch.images.any()


def test_damage_that_only_decoding_finds(tmp_path):
    bad = bytearray(PLAIN["rgb.png"])
    bad[len(bad) // 2] ^= 0x55
    plan = kinds(tmp_path, {**PLAIN, "bad.png": bytes(bad)}, train=False)
    got = []
    with pytest.raises(DataError, match=rf"^{plan.source.where}/bad\.png is a damaged PNG: [^\n]+$"):  # noqa: PT012
        for batch in make_engine("dali", plan, 2).stream(0):
            got.append(batch)
    assert len(got) == 2


def test_a_batch_that_only_dali_refuses(tmp_path, capfd):
    """Our decoders have the last word, and what DALI was given behind that batch isn't lost."""
    whole = PLAIN["420.jpg"]
    odd = whole[:20] + b"\0\0\0" + whole[20:]  # junk between two segments: libjpeg skips it
    names = {f"{number:02}.jpg": odd if number == 9 else whole for number in range(40)}
    plan = kinds(tmp_path, names, train=False)
    wanted, engine = images(make_engine("inline", plan)), make_engine("dali", plan, 2)
    for _ in range(2):
        got = images(engine)
        assert got.keys() == wanted.keys()
        assert all((got[i].float() - image.float()).abs().mean() < 1 for i, image in wanted.items())
        assert torch.equal(got[9], wanted[9])
    warnings = [found for found in capfd.readouterr().err.splitlines() if found.startswith("effloop: ")]
    assert len(warnings) == 1
    assert "warning: engine=dali: DALI refused a batch that decode accepted, which is slow: " in warnings[0]


class Inverted(NativeAugment):
    """Does more than to crop, resize and flip."""

    def apply(self, region: NDArray[np.uint8], draws: Draws, row: int, out: NDArray[np.uint8]) -> None:
        super().apply(region, draws, row, out)
        out ^= 255


def test_an_augmentation_that_does_more_is_refused(photos):
    plan = make_plan(open_source("folder", photos))
    more = replace(plan, augment=Inverted(native_config(), size=ImageSize.of(24), train=True))
    with pytest.raises(ConfigError, match=r"^engine: dali can only crop, resize and flip.*; set engine=threads$"):
        make_engine("dali", more)


@pytest.mark.parametrize(
    ("ops", "fix"),
    [
        (["RandomResizedCrop", "RandomHorizontalFlip", "RandomGrayscale"], " or augment.device=gpu"),
        (["Resize", "RandomCrop"], ""),
        (["RandomGrayscale", "RandomResizedCrop"], ""),
    ],
)
def test_the_device_is_named_where_it_helps(photos, ops, fix):
    plan = make_plan(open_source("folder", photos))
    config = native_config(ops={op: {} for op in ops})
    more = replace(plan, augment=NativeAugment(config, size=ImageSize.of(24), train=True))
    with pytest.raises(ConfigError, match=f"on the host; set engine=threads{fix}$"):
        make_engine("dali", more)
    on_gpu = replace(plan, augment=NativeAugment(replace(config, device=Device.gpu), size=ImageSize.of(24), train=True))
    if fix:
        make_engine("dali", on_gpu).close()
    else:
        with pytest.raises(ConfigError, match=r"on the host; set engine=threads$"):
            make_engine("dali", on_gpu)


def test_without_the_package(photos, monkeypatch):
    plan = make_plan(open_source("folder", photos))
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)  # other packages of NVIDIA's stay
    with pytest.raises(ConfigError, match=r"needs the package 'nvidia.dali'; pip install 'effloop\[dali\]'"):
        DaliEngine(DaliConfig(name="dali"), plan, num_workers=0, device=torch.device("cpu"))

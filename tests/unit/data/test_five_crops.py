"""Five crops of each image: their pixels against Pillow's, their order, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from images import encode, photo
from PIL import Image
from plans import make_engine, make_plan, native_config, open_source

from effloop.batch import Batch, ImageSize
from effloop.data.augment.native.augment import NativeAugment
from effloop.data.five_crops import five_crops
from effloop.data.plan import Plan
from effloop.errors import ConfigError

SIZE, SHARE, BATCH = 24, 0.7, 4
SHAPES = [(50, 80), (81, 50), (60, 60), (50, 50), (99, 41), (40, 77)]


def make(root: Path, shapes: list[tuple[int, int]], share: float) -> Plan:
    """A validation of PNG images of these heights and widths."""
    for number, (height, width) in enumerate(shapes):
        for split in ("train", "val"):
            path = root / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(photo(height, width, seed=number), "PNG"))
    plan = make_plan(open_source("folder", root, "val"), train=False, batch=BATCH, size=SIZE)
    augment = NativeAugment(native_config(eval_ratio=share), size=ImageSize.of(SIZE), train=False)
    return Plan(plan.source, plan.decoder, augment, plan.order, plan.seed)


def by_pillow(plan: Plan, sample: int, place: str) -> np.ndarray:
    image = Image.open(io.BytesIO(bytes(plan.source.read(sample))))
    width, height = image.size
    side = round(SHARE * min(width, height))
    left, top = {
        "centre": ((width - side) // 2, (height - side) // 2),
        "top left": (0, 0),
        "top right": (width - side, 0),
        "bottom left": (0, height - side),
        "bottom right": (width - side, height - side),
    }[place]
    cut = image.crop((left, top, left + side, top + side))
    return np.asarray(cut.resize((SIZE, SIZE), Image.Resampling.BILINEAR))


def batches(plan: Plan) -> list[Batch]:
    return [
        Batch(batch.images.clone(), batch.targets, batch.ids, batch.valid)
        for batch in make_engine("inline", plan).stream(0)
    ]


def test_crops_are_pillows(tmp_path: Path) -> None:
    plan = make(tmp_path, SHAPES, SHARE)
    got, plain = batches(five_crops(plan)), batches(plan)
    assert len(got) == len(five_crops(plan).order) == 5 * len(plain)
    for number, batch in enumerate(got):
        wanted = plain[number // 5]
        for one, other in ((batch.ids, wanted.ids), (batch.valid, wanted.valid), (batch.targets, wanted.targets)):
            assert torch.equal(one, other)
        place = ("centre", "top left", "top right", "bottom left", "bottom right")[number % 5]
        for row in np.flatnonzero(batch.valid.numpy()).tolist():
            pixels = batch.images[row].permute(1, 2, 0).numpy().astype(int)
            assert abs(pixels - by_pillow(plan, int(batch.ids[row]), place)).max() <= 1, (number, row)
    for crops, centre in zip(got[::5], plain, strict=True):
        assert torch.equal(crops.images, centre.images)  # to the bit: the first is the evaluation's own


def test_one_and_the_same_crop_is_refused(tmp_path: Path) -> None:
    plan = make(tmp_path, [(30, 30), (41, 41)], 1.0)
    with pytest.raises(ConfigError, match=r"^tta: fivecrop has only one crop here.*set augment\.eval_ratio=0\.875"):
        five_crops(plan)


def test_a_training_has_no_five_crops(photos: Path) -> None:
    with pytest.raises(ConfigError, match="tta: fivecrop needs a crop for evaluation"):
        five_crops(make_plan(open_source("folder", photos)))

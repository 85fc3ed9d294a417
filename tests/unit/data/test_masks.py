"""Masks ride with their images: the same crops, flips and warps, in any engine."""

import os
import pickle
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from masked import make_masks, mask_of, write_pair
from numpy.typing import NDArray
from plans import make_engine
from runs import composed

import effloop
from effloop.batch import Batch, ImageSize
from effloop.data.augment import Augment, augments, operation
from effloop.data.augment.native import crops
from effloop.data.augment.native.augment import NativeAugment
from effloop.data.bad import OnBad
from effloop.data.cache.cached import CachedSource
from effloop.data.image.mask import count_classes, crop_mask, nearest_places
from effloop.data.masks import MaskPlan
from effloop.data.order import BatchRequest
from effloop.data.output import Output
from effloop.data.random import sample_keys, uniforms
from effloop.errors import ConfigError, DataError

SIDE = 24
LEVELS = np.full(256, 77, np.uint8)
LEVELS[[64, 255, 0, 114]] = 0, 1, 255, 255
"""Levels of images in these tests -> values of their masks: two classes, and what lies outside."""

GEOMETRY: dict[str, dict[str, Any]] = {
    "resized": {"crop": {"op": "RandomResizedCrop"}, "flip": {"op": "RandomHorizontalFlip"}},
    "scaled": {"crop": {"op": "RandomScaleCrop", "fill": 0}, "flip": {"op": "RandomVerticalFlip"}},
    "looking": {"crop": {"op": "RandomScaleCrop", "fill": 0, "ratio": [0.5, 3.0], "cat_max_ratio": 0.75}},
    "padded": {"size": {"op": "Resize", "size": [20, 22]}, "crop": {"op": "RandomCrop", "padding": 8}},
    "centred": {"size": {"op": "Resize", "size": 30}, "crop": {"op": "CenterCrop"}},
    "turned": {"crop": {"op": "RandomResizedCrop"}, "turn": {"op": "RandomRotation", "degrees": 180}},
    "warped": {
        "crop": {"op": "RandomResizedCrop"},
        "warp": {"op": "RandomAffine", "degrees": 30, "translate": [0.3, 0.3], "scale": [0.5, 2], "shear": 20},
    },
    "later": {"size": {"op": "Resize", "size": [40, 40]}, "crop": {"op": "RandomScaleCrop", "fill": 0}},
}
COLOURS = {
    "colour": {"op": "ColorJitter", "brightness": 0.5, "hue": 0.1},
    "grey": {"op": "RandomGrayscale", "p": 0.5},
    "blur": {"op": "GaussianBlur", "kernel_size": 3},
    "erase": {"op": "RandomErasing", "p": 1.0},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masks(tmp_path_factory.mktemp("masks"), {"train": 20, "val": 5})


def built(ops: Mapping[str, Any], library: str = "native", *, train: bool = True, **options: Any) -> Augment:
    config = replace(composed(f"augment={library}").augment, ops=dict(ops), **options)
    augment = augments.build(config, size=ImageSize.of(SIDE), train=train)
    return augment.with_masks()


def binary(height: int, width: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """An image of two levels, and the mask that says which: (H, W, 3) and (H, W)."""
    mask = (mask_of(height, width, seed) % 2).astype(np.uint8)
    return np.repeat(np.where(mask, 255, 64).astype(np.uint8)[:, :, None], 3, axis=2), mask


def nearest(region: NDArray[np.uint8], out: NDArray[np.uint8], flip: bool = False) -> None:
    """Resizes an image as masks are."""
    for channel in range(3):
        plane = np.empty(out.shape[:2], np.uint8)
        crop_mask(region[:, :, channel], (0, 0, *region.shape[:2]), plane)
        out[:, :, channel] = plane[:, ::-1] if flip else plane


def applied(augment: Augment, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(N, 24, 24, 3) and (N, 24, 24): images of two levels and their masks, augmented side by side."""
    pairs = [binary(19 + number % 23, 21 + number % 17, number % 5) for number in range(count)]
    draws = augment.draw(sample_keys(0, 0, np.arange(count)), np.array([mask.shape for _, mask in pairs]))
    images, masks = np.empty((count, *augment.size, 3), np.uint8), np.empty((count, *augment.size), np.uint8)
    for row, (image, mask) in enumerate(pairs):
        mask.flags.writeable = False
        augment.choose(draws, row, mask)
        top, left, height, width = draws.boxes[row]
        region = image[top : top + height, left : left + width]
        augment.apply(region, draws, row, images[row], (mask, masks[row]))
    return images, masks


@pytest.mark.parametrize("recipe", GEOMETRY)
def test_a_mask_stays_the_threshold_of_its_image(recipe, monkeypatch):
    for module in (operation, crops):
        monkeypatch.setattr(module, "resize_into", nearest)
    augment = built(GEOMETRY[recipe])
    assert isinstance(augment, NativeAugment)
    images, masks = applied(augment, 200)
    np.testing.assert_array_equal(LEVELS[images[:, :, :, 0]], masks)
    assert len(np.unique(masks)) == (2 if recipe in ("resized", "centred") else 3)
    assert len(np.unique(masks, axis=0)) > (100 if recipe != "centred" else 10)


@pytest.mark.parametrize(
    "ops",
    [
        {"crop": {"op": "RandomCrop", "size": SIDE, "pad_if_needed": True}, "flip": {"op": "RandomHorizontalFlip"}},
        {"crop": {"op": "CenterCrop", "size": SIDE}, "turn": {"op": "RandomRotation", "degrees": 90}},
        {"crop": {"op": "CenterCrop", "size": SIDE}, "any": {"op": "RandomPerspective", "interpolation": "nearest"}},
    ],
)
def test_torchvision_moves_masks_with_images(ops):
    images, masks = applied(built(ops, "torchvision"), 60)
    np.testing.assert_array_equal(LEVELS[images[:, :, :, 0]], masks)
    assert set(np.unique(masks)) == {0, 1, 255}


def test_albumentations_moves_masks_with_images():
    pytest.importorskip("albumentations")
    near = {"interpolation": "INTER_NEAREST"}
    turns = {"turn": {"op": "Rotate", "limit": 90, **near}, "warp": {"op": "Affine", "shear": 20, **near, "p": 1}}
    ops = {
        "pad": {"op": "PadIfNeeded", "min_height": 30, "min_width": 30},
        "crop": {"op": "RandomCrop", "height": SIDE, "width": SIDE},
        "flip": {"op": "HorizontalFlip"},
        "one": {"op": "OneOf", "transforms": turns},
    }
    images, masks = applied(built(ops, "albumentations"), 60)
    np.testing.assert_array_equal(LEVELS[images[:, :, :, 0]], masks)
    assert set(np.unique(masks)) == {0, 1, 255}


@pytest.mark.parametrize("library", ["native", "torchvision", "albumentations"])
def test_images_are_the_same_without_masks(library):
    if library == "albumentations":
        pytest.importorskip("albumentations")
    augment = augments.build(composed(f"augment={library}_colour").augment, size=ImageSize.of(SIDE), train=True)
    images, _ = applied(augment.with_masks(), 12)
    sizes = np.array([binary(19 + n % 23, 21 + n % 17, 0)[1].shape for n in range(12)])
    draws = augment.draw(sample_keys(0, 0, np.arange(12)), sizes)
    for row, wanted in enumerate(images):
        top, left, height, width = draws.boxes[row]
        image, out = binary(*sizes[row], row % 5)[0], np.empty((SIDE, SIDE, 3), np.uint8)
        augment.apply(image[top : top + height, left : left + width], draws, row, out)
        np.testing.assert_array_equal(out, wanted)


def test_colours_blur_and_erasing_leave_masks():
    _, masks = applied(built({**GEOMETRY["warped"], **COLOURS}), 40)
    np.testing.assert_array_equal(masks, applied(built(GEOMETRY["warped"]), 40)[1])


@pytest.mark.parametrize("policy", ["RandAugment", "TrivialAugmentWide"])
def test_of_a_policy_only_what_moves_pixels_moves_masks(policy):
    crop = {"crop": {"op": "RandomResizedCrop"}}
    plain, masks = applied(built(crop), 80)[1], applied(built({**crop, "policy": {"op": policy}}), 80)[1]
    moved = (plain != masks).any((1, 2)).mean()
    assert 0.2 < moved < 0.8
    assert (masks == 255).any()


@pytest.mark.parametrize("recipe", ["warped", "padded", "later"])
def test_on_batches_masks_are_what_they_are_on_the_host(recipe):
    ops = {**GEOMETRY[recipe], "flip": {"op": "RandomHorizontalFlip"}, **COLOURS}
    if recipe == "warped":
        ops["policy"] = {"op": "RandAugment"}
    host, device = (applied_on(built(ops, device=where)) for where in _devices())
    assert torch.equal(host, device)


def _devices() -> list[Any]:
    return [composed(f"augment.device={name}").augment.device for name in ("cpu", "gpu")]


def applied_on(augment: Augment) -> torch.Tensor:
    images, masks = applied(augment, 24)
    keys = sample_keys(0, 0, np.arange(24))
    batch = torch.from_numpy(images).permute(0, 3, 1, 2)
    done, cut = augment.on_device(batch, keys, torch.from_numpy(masks))
    assert cut is not None
    assert done.shape[2:] == cut.shape[1:] == (SIDE, SIDE)
    return cut


def test_no_class_takes_more_of_a_crop_than_allowed():
    """Against a plain transcript of mmsegmentation's RandomCrop."""
    count, ratio = 100, 0.6
    ops = {"crop": {"op": "RandomScaleCrop", "ratio": [1.0, 3.0], "cat_max_ratio": ratio}}
    augment = built(ops)
    mask = np.zeros((60, 80), np.uint8)
    mask[:, 40:], mask[:, 70:] = 1, 255
    draws = augment.draw(augment_keys := sample_keys(0, 0, np.arange(count)), np.tile(mask.shape, (count, 1)))
    numbers = uniforms(augment.host[0].keys(augment_keys), 23)  # type: ignore[attr-defined]
    redrawn = 0
    for row in range(count):
        factor = (1.0 + 2.0 * numbers[row, 0]) * SIDE / 60
        height, width = int(60 * factor + 0.5), int(80 * factor + 0.5)
        corners = iter(numbers[row, 1:].reshape(-1, 2))
        for _attempt in range(11):
            high, wide = next(corners)
            top, left = int(high * (height - SIDE + 1)), int(wide * (width - SIDE + 1))
            begin = np.floor(left * 80 / width + 0.5), np.floor((left + SIDE) * 80 / width + 0.5)
            cut = mask[0, nearest_places(np.array([int(begin[0])]), np.array([int(begin[1] - begin[0])]), SIDE)[0]]
            values, counts = np.unique(cut, return_counts=True)
            counts = counts[values != 255]
            if len(counts) > 1 and counts.max() / counts.sum() < ratio:
                break
            redrawn += _attempt < 10
        augment.choose(draws, row, mask)
        assert abs(draws.boxes[row, 0] - top * 60 / height) <= 0.5
        assert draws.boxes[row, 1] == int(begin[0])
    assert redrawn > count


def test_nearest_is_torchs_on_pixel_centres():
    generator = np.random.default_rng(0)
    for height, width in ((4, 8), (16, 8), (3, 12)):  # whole scales, at which torch's are exact as well
        mask = generator.integers(0, 9, (8, 4), dtype=np.uint8)
        out, wanted = np.empty((height, width), np.uint8), torch.from_numpy(mask)[None, None]
        crop_mask(mask, (0, 0, 8, 4), out)
        wanted = torch.nn.functional.interpolate(wanted, (height, width), mode="nearest-exact")
        np.testing.assert_array_equal(out, wanted[0, 0].numpy())
        counts = count_classes(mask[:, ::-1], (0, 0, 8, 4), (height, width))
        np.testing.assert_array_equal(counts, np.bincount(np.sort(out, axis=None), minlength=256))


def test_evaluation_crops_letterboxes_and_squashes_masks(monkeypatch):
    for module in (operation, crops):
        monkeypatch.setattr(module, "resize_into", nearest)
    image, mask = binary(20, 60, 0)
    for how, bars in (("crop", 0), ("letterbox", 2 / 3), ("squash", 0)):
        config = composed(f"augment.eval={how}").augment
        augment = augments.build(config, size=ImageSize.of(SIDE), train=False).with_masks()
        draws = augment.draw(sample_keys(0, 0, np.arange(1)), np.array([mask.shape]))
        out, found = np.empty((SIDE, SIDE, 3), np.uint8), np.empty((SIDE, SIDE), np.uint8)
        top, left, height, width = draws.boxes[0]
        region = image[top : top + height, left : left + width]
        augment.apply(region, draws, 0, out, (mask, found))
        np.testing.assert_array_equal(LEVELS[out[:, :, 0]], found)
        assert (found == 255).mean() == pytest.approx(bars)


def test_what_cannot_take_masks_is_refused():
    crop, flip = {"crop": {"op": "RandomResizedCrop"}}, {"flip": {"op": "RandomHorizontalFlip"}}
    with pytest.raises(ConfigError, match=r"augment.ops.any.*RandAug"):
        built({**crop, "any": {"op": "RandAugment"}}, "torchvision")
    with pytest.raises(ConfigError, match=r"augment.ops.crop.*cat_max_ratio=1"):
        built({**flip, "crop": {"op": "RandomScaleCrop", "cat_max_ratio": 0.5}})


def make_plan(root: Path, split: str = "train", **changes: Any) -> MaskPlan:
    config = composed("data=masks", f"data.root={root}", f"image_size={SIDE}", "batch_size=8", "num_workers=0")
    with closing(effloop.build_loader(config, split=split)) as loader:
        assert isinstance(loader.plan, MaskPlan)
        return replace(loader.plan, **changes)


def copied(batches: Any) -> list[Batch]:
    return [replace(each, images=each.images.clone(), targets=each.targets.clone()) for each in batches]


def assert_same(got: list[Batch], wanted: list[Batch]) -> None:
    for one, other in zip(got, wanted, strict=True):
        for name in ("images", "targets", "ids", "valid"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize(("split", "output"), [("train", "normalised"), ("val", "uint8")])
def test_every_engine_loads_the_same_masks(root, split, output):
    plan = make_plan(root, split, **({"output": Output()} if output == "uint8" else {}))
    with closing(make_engine("inline", plan)) as engine:
        wanted = copied(engine.stream(1))
    assert wanted[0].targets.dtype == torch.uint8
    assert set(wanted[0].targets.unique().tolist()) == {0, 1, 2, 255}
    if split == "val":
        assert (wanted[-1].targets[~wanted[-1].valid] == 255).all()
    for name, workers in (("threads", 2), ("processes", 2)):
        with closing(make_engine(name, plan, workers)) as engine:
            assert_same(copied(engine.stream(1)), wanted)
            assert_same(copied(engine.stream(1, 8)), wanted[1:])


@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_a_bad_mask_is_a_bad_sample(tmp_path, engine):
    root = make_masks(tmp_path, {"train": 16, "val": 2})
    plan = make_plan(root)
    path = root / "train" / "masks" / "0003.png"
    state = os.stat(path)
    path.write_bytes(path.read_bytes()[:60].ljust(state.st_size, b"\0"))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with closing(make_engine(engine, plan, 2)) as loads, pytest.raises(DataError, match=r"0003.jpg has a mask"):
        list(loads.stream(0))
    with closing(make_engine(engine, replace(plan, on_bad=OnBad.replace), 2)) as loads:
        batches = copied(loads.stream(0))
    (skipped,) = (each for batch in batches for each in batch.skipped)
    assert skipped.id == 3
    with closing(make_engine(engine, replace(plan, on_bad=OnBad.leave_out), 2)) as loads:
        left_out = next(batch for batch in copied(loads.stream(0)) if batch.skipped)
    assert (left_out.targets[skipped.row] == 255).all()
    assert not left_out.valid[skipped.row]


def test_a_mask_of_another_size_or_with_another_value_is_refused(tmp_path):
    root = make_masks(tmp_path, {"train": 8, "val": 2})
    plan = make_plan(root)
    image, mask = binary(30, 40, 0)
    request = BatchRequest(0, np.arange(1), np.ones(1, np.bool_))
    for bad, said in ((mask[:, :30], "30"), (np.full_like(mask, 7), "value 7")):
        write_pair(root / "train", "0000.jpg", image, bad)
        with pytest.raises(DataError, match=f"0000.jpg has a mask.*{said}"):
            plan.fill(request, plan.empty_batch(request).images, 0, 1)


@pytest.mark.parametrize("cache", ["bytes", "pixels"])
def test_a_memory_cache_changes_nothing(root, cache):
    words = ("data=masks", f"data.root={root}", f"image_size={SIDE}", "batch_size=8", "num_workers=0")
    words += ("data.cache_gb=0.01",)
    plain = copied(effloop.build_loader(composed(*words)).epoch(0))
    with closing(effloop.build_loader(composed(*words, f"data.cache={cache}"))) as loader:
        assert_same(copied(loader.epoch(0)), plain)
        source = loader.plan.source
        assert isinstance(source, CachedSource)
        assert source.region.kept() == 2 * len(source)
        source.source.read_mask = None  # type: ignore[method-assign,assignment]
        assert_same(copied(loader.epoch(0)), plain)
        again = pickle.loads(pickle.dumps(source))
        assert (again.kind, again.mask_format, again.classes) == (source.kind, source.mask_format, source.classes)


def test_the_recipe_for_masks_is_chosen_unless_another_is(root):
    data = ("data=masks", f"data.root={root}")
    ops = composed(*data, "augment.ops.flip.p=0.25").augment.ops
    assert "RandomScaleCrop" in str(ops)
    assert ops["flip"]["p"] == 0.25
    assert "RandomScaleCrop" not in str(composed(*data, "augment=native_rand").augment.ops)


def test_masks_are_not_mixed(root):
    config = composed("data=masks", f"data.root={root}", "augment.mixup=0.2", "batch_size=8")
    with pytest.raises(ConfigError, match=r"augment\.mixup"):
        effloop.build_loader(config)

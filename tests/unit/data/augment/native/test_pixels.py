import random
from collections import Counter
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2 as T
import torchvision.transforms.v2.functional as F
from images import photo
from laws import assert_same_law, drawn, keys
from plans import pairwise

from effloop.data.augment.native import crops
from effloop.data.augment.native import pixels as module
from effloop.data.augment.native.augment import all_operations
from effloop.data.augment.native.pixels import GaussianBlur, RandomErasing
from effloop.data.augment.native.policy import NAMES, PolicyDraws
from effloop.data.augment.operation import BadParameterError, PixelOperation
from effloop.data.random import words, words_on_device

COUNT = 12
JITTER = {"brightness": 0.4, "contrast": [0.3, 1.5], "saturation": 0.5, "hue": 0.1}
PARAMETERS: dict[str, dict[str, Any]] = {
    "ColorJitter": JITTER,
    "RandomGrayscale": {"p": 0.5},
    "RandomSolarize": {"threshold": 128},
    "RandomPosterize": {"bits": 4},
    "RandomAutocontrast": {},
    "RandomEqualize": {},
    "RandomAdjustSharpness": {"sharpness_factor": 2},
    "RandomInvert": {},
    "RandomVerticalFlip": {},
}


def images(size: tuple[int, int]) -> np.ndarray:
    """(12, H, W, 3): photos, every other as noise."""
    noise = np.random.default_rng(0).integers(0, 256, (COUNT, *size, 3), np.uint8)
    return np.stack([noise[row] if row % 2 else photo(*size, row) // 2 + 30 for row in range(COUNT)])


def by_one(operation: PixelOperation, pixels: np.ndarray, found: Any) -> np.ndarray:
    out = pixels.copy()
    for row, image in enumerate(out):
        operation.apply_inplace(image, found, row)
    return out


def by_batch(operation: PixelOperation, pixels: np.ndarray, found: Any) -> np.ndarray:
    out = operation.apply_batch(torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2), found)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert out.dtype == torch.uint8
    return out.permute(0, 2, 3, 1).numpy()


def chosen(found: Any) -> np.ndarray:
    """(N,) bool: whether it is done at all."""
    return found.choice[:, 0] > 0 if isinstance(found, PolicyDraws) else found


def torchvisions(transform: T.Transform, image: np.ndarray, **parameters: Any) -> np.ndarray:
    tensor = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    return transform.transform(tensor, parameters).permute(1, 2, 0).numpy()


@pytest.mark.parametrize("size", [(64, 64), (37, 51)])
@pytest.mark.parametrize("name", PARAMETERS)
def test_on_the_host_and_by_batches_the_same(name, size):
    operation = all_operations()[name](**PARAMETERS[name])
    found, pixels = drawn(operation, COUNT, size), images(size)
    one = by_one(operation, pixels, found)
    difference = np.abs(one.astype(int) - by_batch(operation, pixels, found))
    if "hue" in PARAMETERS[name]:  # a level of difference, which what comes after it may stretch
        assert difference.max() <= 3
        assert (difference > 0).mean() < 1e-3
    else:
        assert not difference.any()
    assert 0 < (one != pixels).any(axis=(1, 2, 3)).mean() <= 1


@pytest.mark.parametrize("name", list(PARAMETERS)[1:])
def test_those_that_are_drawn_are_torchvisions(name):
    operation, transform = all_operations()[name](**PARAMETERS[name]), getattr(T, name)(**PARAMETERS[name])
    found, pixels = drawn(operation, COUNT, (37, 51)), images((37, 51))
    parameters = {"num_input_channels": 3} if name == "RandomGrayscale" else {}
    wanted = [
        torchvisions(transform, image, **parameters) if done else image
        for image, done in zip(pixels, chosen(found), strict=True)
    ]
    np.testing.assert_array_equal(by_one(operation, pixels, found), np.stack(wanted))


@pytest.mark.parametrize("name", list(PARAMETERS)[1:])
def test_share_of_the_changed(name):
    given = {key: value for key, value in PARAMETERS[name].items() if key != "p"}
    assert all_operations()[name](**given).p == getattr(T, name)(**given).p
    pixels, never = images((9, 8)), all_operations()[name](**given, p=0)
    np.testing.assert_array_equal(by_batch(never, pixels, drawn(never, COUNT)), pixels)
    assert abs(chosen(drawn(all_operations()[name](**given, p=0.3))).mean() - 0.3) < 0.02


def by_colour(found: PolicyDraws, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(N, count) which of brightness, contrast, saturation, hue comes first, second, ...; (N, count) their levels."""
    turns = np.select([found.choice == NAMES.index(name) for name in ("Brightness", "Contrast", "Color")], [0, 1, 2], 3)
    return turns, np.take_along_axis(found.level, turns.argsort(axis=1), axis=1)[:, :count]


@pytest.mark.parametrize("size", [(64, 64), (37, 51)])
def test_jitter_is_torchvisions(size):
    operation, pixels = module.ColorJitter(brightness=0.4, contrast=[0.3, 1.5], saturation=0.5), images(size)
    found = drawn(operation, COUNT, size)
    transform = T.ColorJitter(0.4, (0.3, 1.5), 0.5)
    wanted = []
    for image, turns, amounts in zip(pixels, *by_colour(found, 3), strict=True):
        names = ("brightness_factor", "contrast_factor", "saturation_factor")
        factors = dict(zip(names, amounts.tolist(), strict=True))
        wanted.append(torchvisions(transform, image, fn_idx=torch.from_numpy(turns), hue_factor=None, **factors))
    np.testing.assert_array_equal(by_one(operation, pixels, found), np.stack(wanted))


def jitters(count: int = 10_000, **given: Any) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    transform = T.ColorJitter(**given)
    rows = [transform.make_params([]) for _ in range(count)]
    factors = {
        name: np.array([row[f"{name}_factor"] for row in rows])
        for name in ("brightness", "contrast", "saturation", "hue")
    }
    return factors | {"order": np.stack([row["fn_idx"].numpy() for row in rows])}


def test_jitter_follows_torchvisions_law():
    (turns, amounts), wanted = by_colour(drawn(module.ColorJitter(**JITTER)), 4), jitters(**JITTER)
    for number, name in enumerate(JITTER):
        assert_same_law(amounts[:, number], wanted[name])
    orders = [Counter(map(tuple, order.tolist())) for order in (turns, wanted["order"])]
    assert len(orders[0]) == len(orders[1]) == 24
    for order in orders:  # 417 each; five standard deviations are 100
        assert all(317 < count < 517 for count in order.values())
    # The factors know nothing of each other, nor of the order.
    table = np.corrcoef(np.column_stack([amounts, turns[:, :3]]).T)[:4]
    assert np.abs(table - np.eye(4, 7)).max() < 0.04


def test_jitter_with_a_probability():
    operation, pixels = module.ColorJitter(brightness=[0.1, 0.2], p=0.4), images((9, 8))
    assert abs(chosen(drawn(operation)).mean() - 0.4) < 0.02
    found = drawn(operation, COUNT)
    changed = (by_one(operation, pixels, found) != pixels).any(axis=(1, 2, 3))
    np.testing.assert_array_equal(changed, chosen(found))
    np.testing.assert_array_equal(by_batch(operation, pixels, found), by_one(operation, pixels, found))


def rows_of(found: Any, row: int) -> list[Any]:
    fields = [found] if isinstance(found, np.ndarray) else [*vars(found).values()] if is_dataclass(found) else found
    return [field[row].tolist() for field in fields if field is not None]


EACH = PARAMETERS | {"RandomErasing": {"value": "random"}, "GaussianBlur": {"kernel_size": [3, 5]}}
EACH |= {name: {} for name in ("RandAugment", "TrivialAugmentWide", "AutoAugment", "AugMix", "ThreeAugment")}
EACH |= {"TimmAutoAugment": {"config": "rand-m9-mstd0.5-inc1"}}


@pytest.mark.parametrize("name", EACH)
def test_a_row_depends_on_its_own_key_and_size(name):
    operation = all_operations()[name](**EACH[name])
    sizes = np.array([[30 + row, 41] for row in range(50)])
    together = operation.draw(keys(50), sizes)
    order = np.random.default_rng(0).permutation(50)
    shuffled = operation.draw(keys(50)[order], sizes[order])
    for place, row in enumerate(order.tolist()):
        alone = operation.draw(keys(50)[row : row + 1], sizes[row : row + 1])
        assert rows_of(together, row) == rows_of(alone, 0) == rows_of(shuffled, place)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ColorJitter", {"brightness": [1e4, 1e4]}),
        ("ColorJitter", {"contrast": [1e4, 1e4]}),
        ("ColorJitter", {"saturation": [1e4, 1e4]}),
        ("RandomAdjustSharpness", {"sharpness_factor": 1e4, "p": 1}),
    ],
)
def test_the_largest_factors_are_torchvisions(name, given):
    operation, pixels = all_operations()[name](**given), images((64, 48))
    found = drawn(operation, COUNT)
    tensors = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2)
    wanted = getattr(T, name)(**given)(tensors).permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(by_batch(operation, pixels, found), wanted)
    np.testing.assert_array_equal(by_one(operation, pixels, found), wanted)


def test_vertical_flip():
    operation, pixels = crops.RandomVerticalFlip(p=1), images((7, 5))
    np.testing.assert_array_equal(by_one(operation, pixels, drawn(operation, COUNT)), pixels[:, ::-1])


@pytest.mark.parametrize(
    ("size", "kernel", "way"), pairwise([(64, 48), (37, 51), (13, 12)], [1, 3, 9, 23, (5, 3)], ["batch", "one"])
)
def test_the_pixels_are_torchvisions(size, kernel, way):
    noise = np.random.default_rng(0).integers(0, 256, (4, *size, 3), np.uint8)
    pixels = np.concatenate([noise, np.stack([photo(*size, row) for row in range(4)])])
    both = [*kernel] if isinstance(kernel, tuple) else [kernel, kernel]
    operation = GaussianBlur(kernel if isinstance(kernel, int) else both, [0.1, 3.0])
    found, tensors = drawn(operation, len(pixels), size), torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2)
    sigmas = zip(tensors.contiguous(), found.sigma.tolist(), strict=True)
    wanted = torch.stack([F.gaussian_blur(image, both, [sigma, sigma]) for image, sigma in sigmas])
    got = (by_batch if way == "batch" else by_one)(operation, pixels, found)
    tensors = torch.from_numpy(got).permute(0, 3, 1, 2)
    difference = (tensors.int() - wanted.int()).abs()
    assert difference.max() <= 1
    assert int((difference > 0).sum()) <= 1 + 1e-4 * difference.numel()


def test_sigma_follows_torchvisions_law():
    torch.manual_seed(0)
    transform = T.GaussianBlur(5, (0.3, 1.7))
    wanted = [transform.make_params([])["sigma"][0] for _ in range(10_000)]
    assert_same_law(drawn(GaussianBlur(5, [0.3, 1.7])).sigma, wanted)
    assert (drawn(GaussianBlur(5, 0.8)).sigma == np.float32(0.8)).all()


@pytest.mark.parametrize("kernel", [1, 3, 23])
def test_the_narrowest_is_the_image_and_the_widest_a_mean(kernel):
    pixels = photo(64, 48)[None]
    tensors = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2)
    operation = GaussianBlur(kernel, 1e-3)
    assert torch.equal(operation.apply_batch(tensors, drawn(operation, 1)), tensors)
    assert np.ptp(drawn(GaussianBlur(kernel, 1e4), 1).across) < 1e-6


def test_images_may_be_as_small_as_the_kernel_reaches():
    assert GaussianBlur(7).out_sizes(np.array([[4, 4], [9, 5]])).tolist() == [[4, 4], [9, 5]]
    with pytest.raises(BadParameterError, match=r"^kernel_size: \[7, 7\] is not allowed; set at most 5"):
        GaussianBlur(7).out_sizes(np.array([[4, 4], [9, 3]]))


def torchvisions_erasing(size: tuple[int, int], **given: Any) -> np.ndarray:
    """(10000, 4) top, left, height, width; zeros where no attempt fits."""
    torch.manual_seed(0)
    transform, image = T.RandomErasing(p=1, **given), torch.empty(3, *size, dtype=torch.uint8)
    rows = (transform.make_params([image]) for _ in range(10_000))
    return np.array([[row[key] if row["v"] is not None else 0 for key in "ijhw"] for row in rows])


@pytest.mark.parametrize(
    ("size", "given"),
    [
        ((224, 224), {}),
        ((64, 200), {}),
        ((40, 30), {"scale": [0.3, 0.9], "ratio": [0.1, 2.0]}),
        ((224, 224), {"scale": [0.001, 0.1], "ratio": [1e-3, 1e3]}),
        ((20, 400), {"scale": [0.7, 0.95], "ratio": [0.8, 1.2]}),  # never fits
    ],
)
@pytest.mark.nightly
def test_boxes_follow_torchvisions_law(size, given):
    found, wanted = drawn(RandomErasing(p=1, **given), size=size).boxes[:, 0], torchvisions_erasing(size, **given)
    for column in range(4):
        assert_same_law(found[:, column], wanted[:, column])
    assert_same_law(found[:, 0] + found[:, 2] / 2, wanted[:, 0] + wanted[:, 2] / 2)
    assert_same_law(found[:, 2] * found[:, 3], wanted[:, 2] * wanted[:, 3])
    assert abs((found[:, 2] == 0).mean() - (wanted[:, 2] == 0).mean()) < 0.02
    assert (found >= 0).all()
    assert (found[:, :2] + found[:, 2:] <= size).all()


def test_share_of_the_erased():
    for p in (0.0, 0.25, 1.0):
        share = (drawn(RandomErasing(p), size=(224, 224)).boxes[:, 0, 2] > 0).mean()
        assert share == p if p in (0, 1) else abs(share - p) < 0.02
    assert RandomErasing().p == T.RandomErasing().p


@pytest.mark.parametrize(
    ("size", "value", "colour"),
    [((64, 48), 0, [0, 0, 0]), ((37, 51), 99.0, [99, 99, 99]), ((37, 51), [1, 2, 3], [1, 2, 3])],
)
def test_the_box_takes_the_value(size, value, colour):
    operation = RandomErasing(p=0.7, value=value)
    found, pixels = drawn(operation, 12, size), np.full((12, *size, 3), 200, np.uint8)
    one = by_one(operation, pixels, found)
    np.testing.assert_array_equal(one, by_batch(operation, pixels, found))
    for image, (top, left, height, width) in zip(one, found.boxes[:, 0].tolist(), strict=True):
        assert (image[top : top + height, left : left + width] == colour).all()
        assert (image == 200).all(axis=2).sum() == size[0] * size[1] - height * width


@pytest.mark.parametrize("value", ["random", "normal"])
@pytest.mark.parametrize("size", [(64, 48), (37, 51), (5, 3)])
def test_noise_is_the_images_own(size, value):
    operation = RandomErasing(p=0.7, value=value, scale=[0.2, 0.6], count=3)
    found, pixels = drawn(operation, 12, size), np.full((12, *size, 3), 200, np.uint8)
    one = by_one(operation, pixels, found)
    np.testing.assert_array_equal(one, by_batch(operation, pixels, found))
    alone = operation.draw(keys(12)[5:6], np.array([size]))
    np.testing.assert_array_equal(by_batch(operation, pixels[:1], alone)[0], one[5])


def test_noise_is_even():
    operation = RandomErasing(p=1, value="random", scale=[0.5, 0.6], ratio=[1, 1])
    found, pixels = drawn(operation, 4, (224, 224)), np.zeros((4, 224, 224, 3), np.uint8)
    pairs = zip(by_one(operation, pixels, found), found.boxes[:, 0].tolist(), strict=True)
    boxes = [image[top : top + height, left : left + width] for image, (top, left, height, width) in pairs]
    for box in boxes:
        counts = np.bincount(box.ravel(), minlength=256)
        assert ((counts - box.size / 256) ** 2 / (box.size / 256)).sum() < 370  # chi-squared, 255 degrees of freedom
        neighbours = np.corrcoef(box[:, 1:].ravel(), box[:, :-1].ravel())[0, 1]
        assert abs(neighbours) < 0.02
    assert abs(np.corrcoef(boxes[0][:100, :100].ravel(), boxes[1][:100, :100].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize("by", [by_one, by_batch])
def test_normal_noise_is_timms_once_normalised(by):
    """N(0, 1) but for rounding to levels and what lies beyond black and white."""
    oracle = pytest.importorskip("timm.data.random_erasing")
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    operation = RandomErasing(p=1, value="normal", scale=[0.9, 0.9], ratio=[1, 1], mean=mean.tolist(), std=std.tolist())
    found, pixels = drawn(operation, 4, (200, 200)), np.zeros((4, 200, 200, 3), np.uint8)
    (top, left, height, width), image = found.boxes[0, 0], by(operation, pixels, found)[0]
    got = (image[top : top + height, left : left + width] / 255 - mean) / std
    torch.manual_seed(0)
    erasing = oracle.RandomErasing(1, 0.9, 0.9, 1, 1, mode="pixel", device="cpu")
    normal = erasing(torch.full((3, 200, 200), 9.0)).numpy()
    for channel, each in enumerate(got.reshape(-1, 3).T):
        levels = np.rint(255 * (mean[channel] + std[channel] * normal[channel][normal[channel] != 9.0])).clip(0, 255)
        assert_same_law(each.round(6), ((levels / 255 - mean[channel]) / std[channel]).round(6))
        assert abs(np.corrcoef(each[1:], each[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(got[..., 0].ravel(), got[..., 1].ravel())[0, 1]) < 0.02
    assert np.abs(got).max() < 2.7  # of ImageNet's mean and deviation, black and white


@pytest.mark.slow
def test_several_boxes_follow_timms_law():
    """How many pixels they cover, and how many rows and columns they touch."""
    oracle = pytest.importorskip("timm.data.random_erasing").RandomErasing
    operation = RandomErasing(p=0.6, scale=[0.1, 1 / 3], ratio=[0.3, 1 / 0.3], value=9, count=3)
    found, pixels = drawn(operation, 8000, (32, 40)), np.zeros((8000, 32, 40, 3), np.uint8)
    erasing, images = oracle(0.6, 0.1, 1 / 3, mode="const", max_count=3, device="cpu"), torch.ones(8000, 3, 32, 40)
    random.seed(0)
    ours, theirs = by_batch(operation, pixels, found)[..., 0] == 9, erasing(images)[:, 0].numpy() == 0
    for axes in ((1, 2), 1, 2):
        covered = [of.sum(axis=axes) if axes == (1, 2) else of.any(axis=axes).sum(axis=1) for of in (ours, theirs)]
        assert_same_law(*covered)
    np.testing.assert_array_equal(by_one(operation, pixels[:50], found)[..., 0] == 9, ours[:50])


def test_words_are_the_same_on_the_device():
    wanted = words(keys(7), 23, 50)
    got = words_on_device(torch.from_numpy(keys(7).view(np.int64)), 23, 50)
    np.testing.assert_array_equal(got.numpy().view(np.uint64), wanted)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2 as T
from laws import assert_same_law, drawn, keys

from effloop.data.augment.native.erasing import ErasingDraws, RandomErasing
from effloop.data.augment.operation import BadParameterError
from effloop.data.random import words, words_on_device


def torchvisions(size: tuple[int, int], **given: Any) -> np.ndarray:
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
def test_boxes_follow_torchvisions_law(size: tuple[int, int], given: dict[str, Any]) -> None:
    found, wanted = drawn(RandomErasing(p=1, **given), size=size).boxes, torchvisions(size, **given)
    for column in range(4):
        assert_same_law(found[:, column], wanted[:, column])
    assert_same_law(found[:, 0] + found[:, 2] / 2, wanted[:, 0] + wanted[:, 2] / 2)
    assert_same_law(found[:, 2] * found[:, 3], wanted[:, 2] * wanted[:, 3])
    assert abs((found[:, 2] == 0).mean() - (wanted[:, 2] == 0).mean()) < 0.02
    assert (found >= 0).all()
    assert (found[:, :2] + found[:, 2:] <= size).all()


def test_share_of_the_erased() -> None:
    for p in (0.0, 0.25, 1.0):
        share = (drawn(RandomErasing(p), size=(224, 224)).boxes[:, 2] > 0).mean()
        assert share == p if p in (0, 1) else abs(share - p) < 0.02
    assert RandomErasing().p == T.RandomErasing().p


def erased(operation: RandomErasing, found: ErasingDraws, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By one and one, and by the batch."""
    one = pixels.copy()
    for row, image in enumerate(one):
        operation.apply_inplace(image, found, row)
    batch = operation.apply_batch(torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2), found)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert batch.dtype == torch.uint8
    return one, batch.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("size", [(64, 48), (37, 51)])
@pytest.mark.parametrize(("value", "colour"), [(0, [0, 0, 0]), (99.0, [99, 99, 99]), ([1, 2, 3], [1, 2, 3])])
def test_the_box_takes_the_value(size: tuple[int, int], value: Any, colour: list[int]) -> None:
    operation = RandomErasing(p=0.7, value=value)
    found, pixels = drawn(operation, 12, size), np.full((12, *size, 3), 200, np.uint8)
    one, batch = erased(operation, found, pixels)
    np.testing.assert_array_equal(one, batch)
    for image, (top, left, height, width) in zip(one, found.boxes.tolist(), strict=True):
        assert (image[top : top + height, left : left + width] == colour).all()
        assert (image == 200).all(axis=2).sum() == size[0] * size[1] - height * width


@pytest.mark.parametrize("size", [(64, 48), (37, 51), (5, 3)])
def test_noise_is_the_images_own(size: tuple[int, int]) -> None:
    operation = RandomErasing(p=0.7, value="random", scale=[0.2, 0.6])
    found, pixels = drawn(operation, 12, size), np.full((12, *size, 3), 200, np.uint8)
    one, batch = erased(operation, found, pixels)
    np.testing.assert_array_equal(one, batch)
    alone = operation.draw(keys(12)[5:6], np.array([size]))
    np.testing.assert_array_equal(erased(operation, alone, pixels[:1])[1][0], one[5])


def test_noise_is_even() -> None:
    operation = RandomErasing(p=1, value="random", scale=[0.5, 0.6], ratio=[1, 1])
    found, pixels = drawn(operation, 4, (224, 224)), np.zeros((4, 224, 224, 3), np.uint8)
    boxes = [
        image[top : top + height, left : left + width]
        for image, (top, left, height, width) in zip(
            erased(operation, found, pixels)[0], found.boxes.tolist(), strict=True
        )
    ]
    for box in boxes:
        counts = np.bincount(box.ravel(), minlength=256)
        assert ((counts - box.size / 256) ** 2 / (box.size / 256)).sum() < 370  # chi-squared, 255 degrees of freedom
        neighbours = np.corrcoef(box[:, 1:].ravel(), box[:, :-1].ravel())[0, 1]
        assert abs(neighbours) < 0.02
    assert abs(np.corrcoef(boxes[0][:100, :100].ravel(), boxes[1][:100, :100].ravel())[0, 1]) < 0.03


def test_words_are_the_same_on_the_device() -> None:
    wanted = words(keys(7), 23, 50)
    got = words_on_device(torch.from_numpy(keys(7).view(np.int64)), 23, 50)
    np.testing.assert_array_equal(got.numpy().view(np.uint64), wanted)


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"p": 1.5}, "p: 1.5 is not"),
        ({"scale": [0.5, 0.1]}, "scale: [0.5, 0.1] is not"),
        ({"scale": [0.1, 1.1]}, "scale: [0.1, 1.1] is not"),
        ({"ratio": [0, 1]}, "ratio: [0, 1] is not"),
        (
            {"ratio": [1e-320, 1]},
            "ratio: [1e-320, 1] is not allowed; set [smallest, largest], at least 0.001",
        ),
        ({"value": 256}, "value: 256 is not allowed; set a whole number from 0 to 255, three of them, or random"),
        ({"value": 127.9}, "value: 127.9 is not"),
        ({"value": [0, 0, 0.5]}, "value: [0, 0, 0.5] is not"),
        ({"value": True}, "value: True is not"),
        ({"value": 10**320}, "value: 1000"),
        ({"value": [1, 2]}, "value: [1, 2] is not"),
        ({"value": "noise"}, "value: noise is not"),
        ({"value": None}, "value: None is not"),
    ],
)
def test_bad_parameters(given: dict[str, Any], start: str) -> None:
    with pytest.raises(BadParameterError) as error:
        RandomErasing(**given)
    assert str(error.value).startswith(start)

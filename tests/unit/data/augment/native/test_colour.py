from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2 as T
import torchvision.transforms.v2.functional as F
from images import photo
from laws import assert_same_law, drawn, keys
from torch import Tensor

from effloop.data.augment.native import colour, flips, host
from effloop.data.augment.operation import BadParameterError, PixelOperation, operations

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


def torchvisions(transform: T.Transform, image: np.ndarray, **parameters: Any) -> np.ndarray:
    tensor = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    return transform.transform(tensor, parameters).permute(1, 2, 0).numpy()


@pytest.mark.parametrize("size", [(64, 64), (37, 51)])
@pytest.mark.parametrize("name", PARAMETERS)
def test_on_the_host_and_by_batches_the_same(name: str, size: tuple[int, int]) -> None:
    operation = operations[name](**PARAMETERS[name])
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
def test_those_that_are_drawn_are_torchvisions(name: str) -> None:
    operation, transform = operations[name](**PARAMETERS[name]), getattr(T, name)(**PARAMETERS[name])
    found, pixels = drawn(operation, COUNT, (37, 51)), images((37, 51))
    parameters = {"num_input_channels": 3} if name == "RandomGrayscale" else {}
    wanted = [
        torchvisions(transform, image, **parameters) if chosen else image
        for image, chosen in zip(pixels, found, strict=True)
    ]
    np.testing.assert_array_equal(by_one(operation, pixels, found), np.stack(wanted))


@pytest.mark.parametrize("name", list(PARAMETERS)[1:])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_share_of_the_changed(name: str, p: float) -> None:
    operation = operations[name](**(PARAMETERS[name] | {"p": p}))
    share = drawn(operation).mean()
    assert share == p if p in (0, 1) else abs(share - p) < 0.02
    pixels = images((9, 8))
    if p == 0:
        np.testing.assert_array_equal(by_batch(operation, pixels, drawn(operation, COUNT)), pixels)


def test_defaults_are_torchvisions() -> None:
    for name in list(PARAMETERS)[1:]:
        given = {key: value for key, value in PARAMETERS[name].items() if key != "p"}
        assert operations[name](**given).p == getattr(T, name)(**given).p


@pytest.mark.parametrize("size", [(64, 64), (37, 51)])
def test_jitter_is_torchvisions(size: tuple[int, int]) -> None:
    operation, pixels = colour.ColorJitter(brightness=0.4, contrast=[0.3, 1.5], saturation=0.5), images(size)
    found = drawn(operation, COUNT, size)
    transform = T.ColorJitter(0.4, (0.3, 1.5), 0.5)
    wanted = []
    for image, turns, amounts in zip(pixels, found.turns, found.amounts.tolist(), strict=True):
        names = ("brightness_factor", "contrast_factor", "saturation_factor")
        factors = dict(zip(names, amounts, strict=False))
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


def test_jitter_follows_torchvisions_law() -> None:
    found, wanted = drawn(colour.ColorJitter(**JITTER)), jitters(**JITTER)
    for number, name in enumerate(JITTER):
        assert_same_law(found.amounts[:, number], wanted[name])
    orders = [Counter(map(tuple, order.tolist())) for order in (found.turns, wanted["order"])]
    assert len(orders[0]) == len(orders[1]) == 24
    for order in orders:  # 417 each; five standard deviations are 100
        assert all(317 < count < 517 for count in order.values())
    # The factors know nothing of each other, nor of the order.
    table = np.corrcoef(np.column_stack([found.amounts, found.turns[:, :3]]).T)[:4]
    assert np.abs(table - np.eye(4, 7)).max() < 0.04


def test_jitter_draws_no_more_than_is_given() -> None:
    found = drawn(colour.ColorJitter(brightness=0.2, contrast=0.2))
    assert Counter(map(tuple, found.turns.tolist())).keys() == {(0, 1), (1, 0)}
    assert abs((found.turns[:, 0] == 0).mean() - 0.5) < 0.02
    operation, pixels = colour.ColorJitter(brightness=0, contrast=[1, 1], hue=[0, 0]), images((9, 8))
    for way in (by_one, by_batch):
        np.testing.assert_array_equal(way(operation, pixels, drawn(operation, COUNT)), pixels)


def test_jitter_with_a_probability() -> None:
    operation, pixels = colour.ColorJitter(brightness=[0.1, 0.2], p=0.4), images((9, 8))
    assert abs((drawn(operation).turns[:, 0] == 0).mean() - 0.4) < 0.02
    found = drawn(operation, COUNT)
    changed = (by_one(operation, pixels, found) != pixels).any(axis=(1, 2, 3))
    np.testing.assert_array_equal(changed, found.turns[:, 0] == 0)
    np.testing.assert_array_equal(by_batch(operation, pixels, found), by_one(operation, pixels, found))


def rows_of(found: Any, row: int) -> list[Any]:
    fields = [found] if isinstance(found, np.ndarray) else [getattr(found, name) for name in found.__dataclass_fields__]
    return [field[row].tolist() for field in fields]


EACH = PARAMETERS | {"RandomErasing": {"value": "random"}, "GaussianBlur": {"kernel_size": [3, 5]}}


@pytest.mark.parametrize("name", EACH)
def test_a_row_depends_on_its_own_key_and_size(name: str) -> None:
    operation = operations[name](**EACH[name])
    sizes = np.array([[30 + row, 41] for row in range(50)])
    together = operation.draw(keys(50), sizes)
    order = np.random.default_rng(0).permutation(50)
    shuffled = operation.draw(keys(50)[order], sizes[order])
    for place, row in enumerate(order.tolist()):
        alone = operation.draw(keys(50)[row : row + 1], sizes[row : row + 1])
        assert rows_of(together, row) == rows_of(alone, 0) == rows_of(shuffled, place)


@pytest.mark.parametrize("name", EACH)
def test_global_generators_are_left_alone(name: str) -> None:
    state, numpys = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    operation = pickle.loads(pickle.dumps(operations[name](**EACH[name])))
    found, pixels = pickle.loads(pickle.dumps(drawn(operation, COUNT))), images((64, 48))
    assert np.abs(by_one(operation, pixels, found).astype(int) - by_batch(operation, pixels, found)).max() <= 1
    assert torch.equal(state, torch.random.get_rng_state())
    np.testing.assert_array_equal(numpys, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ColorJitter", {"brightness": [1e4, 1e4]}),
        ("ColorJitter", {"contrast": [1e4, 1e4]}),
        ("ColorJitter", {"saturation": [1e4, 1e4]}),
        ("RandomAdjustSharpness", {"sharpness_factor": 1e4, "p": 1}),
    ],
)
def test_the_largest_factors_are_torchvisions(name: str, given: dict[str, Any]) -> None:
    operation, pixels = operations[name](**given), images((64, 48))
    found = drawn(operation, COUNT)
    tensors = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2)
    wanted = getattr(T, name)(**given)(tensors).permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(by_batch(operation, pixels, found), wanted)
    np.testing.assert_array_equal(by_one(operation, pixels, found), wanted)


@pytest.mark.parametrize("opencv", [True, False])
def test_vertical_flip(opencv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not opencv:
        monkeypatch.setattr("effloop.data.image.resize.opencv", lambda: None)
    operation, pixels = flips.RandomVerticalFlip(p=1), images((7, 5))
    np.testing.assert_array_equal(by_one(operation, pixels, drawn(operation, COUNT)), pixels[:, ::-1])


def test_functions_of_one_image_are_those_that_batches_have() -> None:
    tensor: Tensor = torch.from_numpy(photo(9, 8)).permute(2, 0, 1).contiguous()
    image = photo(9, 8)
    host.contrast(image, 0.7)
    np.testing.assert_array_equal(image, F.adjust_contrast(tensor, float(np.float32(0.7))).permute(1, 2, 0))


@pytest.mark.parametrize(
    ("name", "given", "start"),
    [
        ("ColorJitter", {"brightness": -0.1}, "brightness: -0.1 is not allowed; set a number from 0 to 10000, or ["),
        ("ColorJitter", {"contrast": [1.2, 0.8]}, "contrast: [1.2, 0.8] is not allowed; set a number"),
        ("ColorJitter", {"saturation": [-1, 1]}, "saturation: [-1, 1] is not"),
        ("ColorJitter", {"saturation": "much"}, "saturation: much is not"),
        ("ColorJitter", {"brightness": True}, "brightness: True is not"),
        ("ColorJitter", {"brightness": float("nan")}, "brightness: nan is not"),
        ("ColorJitter", {"hue": 0.6}, "hue: 0.6 is not allowed; set a number from 0 to 0.5, or ["),
        (
            "ColorJitter",
            {"contrast": 1e39},
            "contrast: 1e+39 is not allowed; set a number from 0 to 10000, or [",
        ),
        ("ColorJitter", {"contrast": [1e39, 1e39]}, "contrast: [1e+39, 1e+39] is not"),
        ("ColorJitter", {"hue": [-0.7, 0.1]}, "hue: [-0.7, 0.1] is not"),
        ("ColorJitter", {"p": 2}, "p: 2 is not allowed; set a probability"),
        ("RandomGrayscale", {"p": -1}, "p: -1 is not"),
        ("RandomSolarize", {"threshold": 256}, "threshold: 256 is not allowed; set a number from 0 to 255"),
        ("RandomPosterize", {"bits": 9}, "bits: 9 is not allowed; set a number from 0 to 8"),
        ("RandomPosterize", {"bits": 3.5}, "bits: 3.5 is not allowed; set a whole number"),
        ("RandomAdjustSharpness", {"sharpness_factor": -1}, "sharpness_factor: -1 is not allowed; set a number from"),
        ("RandomAdjustSharpness", {"sharpness_factor": 1e39}, "sharpness_factor: 1e+39 is not"),
        ("RandomVerticalFlip", {"p": "half"}, "p: half is not"),
        ("RandomVerticalFlip", {"p": 10**320}, "p: 1000"),
    ],
)
def test_bad_parameters(name: str, given: dict[str, Any], start: str) -> None:
    with pytest.raises(BadParameterError) as error:
        operations[name](**given)
    assert str(error.value).startswith(start)
    assert "\n" not in str(error.value)

import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from images import photo
from runs import composed
from torchvision.transforms import v2

from effloop.batch import ImageSize
from effloop.data.augment import Augment, augments, recipe
from effloop.data.augment import torchvision as vision
from effloop.data.augment.library import LibraryAugment
from effloop.data.augment.seeded import seeded
from effloop.data.random import sample_keys
from effloop.errors import ConfigError, DataError

SIDE = 32
SQUARE = ImageSize(SIDE, SIDE)
SIZES = np.array([(80, 60), (64, 64), (50, 90), (7, 300), (375, 500)])
KEYS = sample_keys(0, 0, np.arange(len(SIZES)))

CROP = lambda: v2.RandomResizedCrop(SIDE, scale=(0.5, 1.0))  # noqa: E731
RESIZE = lambda: [v2.Resize((384, 384)), v2.RandomCrop(SIDE), v2.RandomHorizontalFlip()]  # noqa: E731
PLAIN: dict[str, list[Any]] = {
    "torchvision": [CROP(), v2.RandomHorizontalFlip()],
    "torchvision_colour": [CROP(), v2.RandomHorizontalFlip(), v2.ColorJitter(0.2, 0.2, 0.2, 0.05)],
    "torchvision_trivial": [CROP(), v2.RandomHorizontalFlip(), v2.TrivialAugmentWide()],
    "torchvision_rand": [CROP(), v2.RandomHorizontalFlip(), v2.RandAugment()],
    "torchvision_resize_crop": [*RESIZE(), v2.RandomApply([v2.ColorJitter(0.2, 0.2)], p=0.2)],
    "torchvision_resize_crop_jitter": [*RESIZE(), v2.ColorJitter(0.2, 0.2)],
}

NEEDED: dict[str, dict[str, Any]] = {
    "ColorJitter": {"brightness": 0.3, "contrast": 0.3, "saturation": [0.5, 2], "hue": 0.1},
    "GaussianBlur": {"kernel_size": 3},
    "Pad": {"padding": [2, 3], "fill": [1, 2, 3]},
    "RandomAdjustSharpness": {"sharpness_factor": 2},
    "RandomAffine": {"degrees": 10, "translate": [0.1, 0.1], "scale": [0.5, 1.5], "shear": [-3, 3, -3, 3], "fill": 9},
    "RandomApply": {"transforms": {"RandomPosterize": {"bits": 3}, "more": {"op": "RandomInvert"}}},
    "RandomChoice": {"transforms": {"RandomInvert": {}, "RandomSolarize": {"threshold": 100}}, "p": [1, 3]},
    "RandomOrder": {"transforms": {"RandomHorizontalFlip": {}, "RandomRotation": {"degrees": [0, 90]}}},
    "RandomPosterize": {"bits": 3},
    "RandomResize": {"min_size": 20, "max_size": 40},
    "RandomRotation": {"degrees": 30, "interpolation": "bilinear", "expand": True},
    "RandomShortestSize": {"min_size": [20, 30]},
    "RandomSolarize": {"threshold": 100},
    "ScaleJitter": {"target_size": [40, 40]},
}


def build(ops: dict[str, Any]) -> LibraryAugment:
    built = augments.build(replace(composed("augment=torchvision").augment, ops=ops), size=SQUARE, train=True)
    assert isinstance(built, LibraryAugment)
    return built


def shipped(name: str) -> Augment:
    return augments.build(composed(f"augment={name}").augment, size=SQUARE, train=True)


def host(augment: Augment, keys: np.ndarray = KEYS, sizes: np.ndarray = SIZES) -> torch.Tensor:
    """(N, 3, S, S) uint8, channels_last, of photographs of these sizes."""
    draws = augment.draw(keys, sizes)
    out = np.empty((len(keys), *augment.size, 3), np.uint8)
    for row, size in enumerate(sizes.tolist()):
        top, left, height, width = draws.boxes[row]
        image = photo(*size)
        image.flags.writeable = False
        augment.apply(image[top : top + height, left : left + width], draws, row, out[row])
    return torch.from_numpy(out).permute(0, 3, 1, 2)


def made(name: str) -> Any:
    return recipe.build_operation(name, NEEDED.get(name, {}), vision.operations(), "here", SQUARE)


@pytest.mark.parametrize("name", PLAIN)
def test_recipe_gives_what_plain_torchvision_gives(name):
    augment = shipped(name)
    got = host(augment)
    for row, size in enumerate(SIZES.tolist()):
        image = torch.from_numpy(photo(*size)).permute(2, 0, 1)
        for plain, step in zip(PLAIN[name], augment.steps, strict=True):
            torch.manual_seed(int(step.keys(KEYS)[row]))
            image = plain(image)
        assert torch.equal(got[row], image), size


@pytest.mark.parametrize("name", vision.NAMES)
def test_operation_draws_from_its_key_alone(name):
    operation, plain = made(name).op, []
    image = torch.from_numpy(photo(40, 50)).permute(2, 0, 1).contiguous()
    before = image.clone()
    for key in range(6):
        torch.manual_seed(key)
        plain.append(operation(image))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    for key in reversed(range(6)):
        with seeded(key):
            got = operation(image)
        assert got.shape[0] == 3
        assert got.dtype == torch.uint8
        assert torch.equal(got, plain[key])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002
    assert torch.equal(image, before)


def test_the_set_is_all_that_makes_an_image_of_an_image():
    others = (
        "ClampBoundingBoxes ClampKeyPoints Compose ConvertBoundingBoxFormat ConvertImageDtype CutMix FiveCrop JPEG "
        "Lambda LinearTransformation MixUp Normalize PILToTensor RandomIoUCrop SanitizeBoundingBoxes "
        "SanitizeKeyPoints SetClampingMode TenCrop ToDtype ToImage ToPILImage ToPureTensor ToTensor Transform "
        "UniformTemporalSubsample"
    )
    classes = {name for name, value in vars(v2).items() if isinstance(value, type) and issubclass(value, v2.Transform)}
    assert classes - {"ToTensor", *others.split()} <= set(vision.NAMES) <= classes


@pytest.mark.parametrize("options", [{}, {"antialias": False}, {"interpolation": "bicubic"}, {"size": [48, 40]}])
def test_crop_before_decoding_is_the_crop_of_the_whole_image(options):
    augment = build({"RandomResizedCrop": options, "CenterCrop": {}})
    crop, step = augment.steps[0].op, augment.steps[0]
    draws = augment.draw(KEYS, SIZES)
    for row, size in enumerate(SIZES.tolist()):
        torch.manual_seed(int(step.keys(KEYS)[row]))
        wanted = crop.op(torch.from_numpy(photo(*size)).permute(2, 0, 1))
        top, left, height, width = draws.boxes[row]
        got, _ = crop.resize(photo(*size)[top : top + height, left : left + width])
        np.testing.assert_array_equal(got, wanted.permute(1, 2, 0).numpy())


def test_a_line_of_pixels_has_a_box():
    """Torchvision's has no pixel here, and fails."""
    augment = build({"RandomResizedCrop": {"ratio": [0.1, 0.4], "scale": [0.9, 1.0]}})
    assert augment.draw(KEYS[:1], np.array([[1, 50]])).boxes.tolist() == [[0, 25, 1, 1]]


def test_sizes_that_differ_are_seen_however_seldom():
    crop = {"op": "RandomResizedCrop"}
    for last in (
        {"op": "RandomZoomOut", "p": 0.001},
        {"op": "RandomRotation", "degrees": 10, "expand": True},
        {"op": "RandomApply", "p": 0.001, "transforms": {"CenterCrop": {"size": 8}}},
        {"op": "RandomOrder", "transforms": {"RandomCrop": {"size": SIDE}, "Pad": {"padding": 4}}},
        {"op": "RandomResize", "min_size": 32, "max_size": 34},
    ):
        with pytest.raises(ConfigError, match=r"^augment.ops: the recipe leaves images of several sizes"):
            build({"crop": crop, "last": last})
        build({"crop": crop, "last": last, "end": {"op": "CenterCrop"}})


def test_the_smallest_of_several_sizes_must_do():
    ops = {"RandomShortestSize": {"min_size": [40, 30, 50]}, "RandomCrop": {}}
    with pytest.raises(ConfigError, match=r"^augment.ops.RandomCrop: RandomCrop fails: Required crop size \(32, 32\)"):
        build(ops)
    build({**ops, "RandomShortestSize": {"min_size": [40, 32, 50]}})


def test_what_is_too_seldom_to_be_seen_is_named_when_it_happens():
    seldom = {"op": "RandomChoice", "p": [1, 1e-5], "transforms": {"Identity": {}, "CenterCrop": {"size": 8}}}
    augment = build({"crop": {"op": "RandomResizedCrop"}, "last": seldom})
    augment.steps[1].op.op.p = [0.0, 1.0]
    with pytest.raises(DataError, match=r"^is 8x8 pixels after augment.ops, and not 32x32 as all in a batch; end the"):
        host(augment)


def test_crop_larger_than_an_image_is_named_when_it_happens():
    augment = build({"RandomCrop": {}})
    host(augment, KEYS[:2], np.array([[32, 40], [300, 32]]))
    with pytest.raises(DataError, match=r"^can't be augmented: augment.ops.RandomCrop: RandomCrop fails: Required"):
        host(augment, KEYS[:1], np.array([[31, 90]]))


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"op": "RandomPosterise", "bits": 3}, ": no operation 'RandomPosterise';...did you mean 'RandomPosterize'?"),
    *[({"op": name}, f": no operation '{name}'; have ") for name in ("Lambda", "__import__", "functional.resize")],
    ({"op": "RandomPosterize", "bit": 1}, ": RandomPosterize has no parameter 'bit'; ...did you mean 'bits'?"),
    ({"op": "RandomErasing", "inplace": True}, ": RandomErasing has no parameter 'inplace'; have p, scale,"),
    # found by building it
    ({"op": "RandomPosterize"}, ": RandomPosterize can't take its parameters:...'bits'; have bits, p"),
    ({"op": "ColorJitter", "hue": 0.6}, ": ColorJitter can't take its parameters: hue values should be between"),
    # by trying it, however seldom it is done
    ({"op": "RandomPosterize", "bits": 9}, ": RandomPosterize fails: bits must be...[0, 8], got 9...of 1031x1033"),
    ({"op": "RandomSolarize", "threshold": 256, "p": 0.1}, ": RandomSolarize fails: Threshold should be...but got 256"),
    ({"op": "Grayscale", "num_output_channels": 1}, ": Grayscale fails: it gives uint8 of shape (24, 24, 1)"),
    ({"op": "RandomRotation", "degrees": 3, "fill": [1, 2]}, ": RandomRotation fails: ...'fill'...(2 != 3)"),
    ({"op": "Pad", "padding": 99, "padding_mode": "reflect"}, ": Pad fails: ...images of 1031x1033"),
    ({"op": "RandomResizedCrop", "scale": [2, 1]}, ": RandomResizedCrop fails: ...from=2 > to=1...are to be augmented"),
    ({"op": "RandomResizedCrop", "size": 0}, ": RandomResizedCrop fails: ...sizes should be greater than 0"),
    ({"op": "Resize", "interpolation": "bilinaer"}, ".interpolation: bilinaer...did you mean 'bilinear'?"),
    ({"op": "AutoAugment", "policy": "imagnet"}, ".policy: imagnet is not allowed;...did you mean 'imagenet'?"),
    # containers
    ({"op": "RandomApply", "transforms": {"a": None}}, ".transforms: it has none; write {LABEL: {op: NAME"),
    ({"op": "RandomApply", "transforms": {"a": {"op": "Lambda"}}}, ".transforms.a: no operation 'Lambda'; have"),
    ({"op": "RandomApply", "transforms": {"a": 3}}, ".transforms.a: 3 is not allowed; write {op: NAME"),
    (
        {"op": "RandomApply", "transforms": {"b": {"op": "RandomApply", "transforms": {"RandomInvert": {"p": 2}}}}},
        ".transforms.b.transforms.RandomInvert: RandomInvert can't take its parameters: `p` should be",
    ),
    ({"op": "RandomChoice", "transforms": {"Identity": {}}, "p": [0]}, ": RandomChoice can't take its...zero"),
)


def test_bad_input_is_one_line():
    for operation, message in REFUSED:
        pattern = ".*".join(map(re.escape, message.split("...")))
        with pytest.raises(ConfigError, match=f"^augment.ops.bad{pattern}") as caught:
            build({"crop": {"op": "RandomResizedCrop", "size": 24}, "bad": operation, "end": {"op": "CenterCrop"}})
        assert "\n" not in str(caught.value)


def test_threads_share_none():
    def draw(key: int) -> list[float]:
        with seeded(key):
            meeting.wait()  # both are inside
            return [float(torch.rand(1)) for _ in range(200)]

    alone = []
    for key in (1, 2):
        torch.manual_seed(key)
        alone.append([float(torch.rand(1)) for _ in range(200)])
    meeting = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(draw, (1, 2))) == alone


def test_torch_computes_on_one_thread_in_it_and_elsewhere_as_before():
    def inside() -> tuple[int, int, int]:
        torch.set_num_threads(3)
        before = torch.get_num_threads()
        with seeded(0):
            within = torch.get_num_threads()
        return before, within, torch.get_num_threads()

    usual = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(inside).result() == (3, 1, 3)
        with ThreadPoolExecutor(1) as pool:  # what starts later isn't touched
            assert pool.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == usual
    finally:
        torch.set_num_threads(usual)

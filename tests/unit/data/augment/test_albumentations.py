import inspect
import os
import pickle
import random
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from images import photo
from plans import line
from runs import composed

import effloop
from effloop.batch import ImageSize
from effloop.data.augment import Augment, albumentations, augments, recipe
from effloop.data.random import sample_keys, uniforms, words
from effloop.errors import ConfigError

pytest.importorskip("albumentations")
A = albumentations.library()
cv2 = pytest.importorskip("cv2")

SIDE = 32
SQUARE = ImageSize(SIDE, SIDE)
KEYS = sample_keys(0, 0, np.arange(16))
SIZES = np.array([[60, 80], [83, 61]])[np.arange(16) % 2]
NEEDED: dict[str, dict[str, Any]] = {  # where the library has no default, or one that does nothing
    "Affine": {"rotate": [-20, 20], "scale": [0.8, 1.2]},
    "Crop": {"x_max": 40, "y_max": 40},
    "CropAndPad": {"px": [-4, 4]},
    "GridElasticDeform": {"num_grid_xy": [4, 4], "magnitude": 5},
    "LongestMaxSize": {"max_size": 40},
    "RandomSizedCrop": {"min_max_height": [30, 50]},
    "SmallestMaxSize": {"max_size": 40},
    "XYMasking": {"num_masks_x": [1, 3], "mask_x_length": 5},
    **{name: {"transforms": {"some": {"op": "Rotate"}, "ColorJitter": {"p": 1}}} for name in albumentations.CONTAINERS},
}


def build(ops: dict[str, Any] | None = None, name: str = "albumentations", **fields: Any) -> Augment:
    config = composed(f"augment={name}").augment
    if ops is not None:
        config.ops = ops
    for field, value in fields.items():
        setattr(config, field, value)
    return augments.build(config, size=SQUARE, train=True)


def apply(augment: Augment, row: int, draws: Any = None) -> np.ndarray:
    draws = augment.draw(KEYS, SIZES) if draws is None else draws
    top, left, height, width = draws.boxes[row].tolist()
    image = photo(*SIZES[row].tolist())
    image.flags.writeable = False
    out = np.full((SIDE, SIDE, 3), 77, np.uint8)
    augment.apply(image[top : top + height, left : left + width], draws, row, out)
    return out


def images(augment: Augment) -> np.ndarray:
    draws = augment.draw(KEYS, SIZES)
    return np.stack([apply(augment, row, draws) for row in range(len(KEYS))])


# The shipped recipes, written with the library's own classes


def crop_and_flip() -> list[Any]:
    return [
        A.RandomResizedCrop((SIDE, SIDE), scale=(0.5, 1.0), ratio=(0.75, 1.3333333333333333)),
        A.HorizontalFlip(p=0.5),
    ]


def resize_and_crop() -> list[Any]:
    return [A.Resize(384, 384), A.RandomCrop(SIDE, SIDE), A.HorizontalFlip(p=0.5)]


RECIPES = {
    "albumentations_colour": lambda: [*crop_and_flip(), A.ColorJitter(0.2, 0.2, 0.2, 0.05, p=1)],
    "albumentations_resize_crop": lambda: [*resize_and_crop(), A.RandomBrightnessContrast(0.2, 0.2, p=0.2)],
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_what_the_library_makes_of_whole_images_by_the_same_generators(name):
    augment = build(name=name)
    plain = RECIPES[name]()
    assert len(augment.steps) == len(plain)
    for row, got in enumerate(images(augment)):
        wanted = photo(*SIZES[row].tolist())
        for step, transform in zip(augment.steps, plain, strict=True):
            key = int(step.keys(KEYS[row : row + 1])[0])
            transform.set_random_state(np.random.Generator(np.random.Philox(key=key)), albumentations.KeyedRandom(key))
            wanted = transform(image=wanted)["image"]
        np.testing.assert_array_equal(got, wanted)


def test_only_the_box_is_decoded_where_a_crop_comes_first():
    augment = build()
    assert augment.at_least == (SIDE, SIDE)
    assert augment.at_least is augment.at_least  # not computed for each image
    assert (augment.draw(KEYS, SIZES).boxes[:, 2:] < SIZES).all(1).mean() > 0.5
    larger = build({"RandomResizedCrop": {"size": 50}, "CenterCrop": {}})
    assert larger.at_least == (50, 50)
    for whole in (build(name="albumentations_resize_crop"), build({"RandomResizedCrop": {"p": 0.5}, "Resize": {}})):
        assert whole.at_least is None
        np.testing.assert_array_equal(whole.draw(KEYS, SIZES).boxes[:, 2:], SIZES)
    sized = build({"RandomSizedCrop": {"min_max_height": [30, 50]}})
    assert (sized.draw(KEYS, SIZES).boxes[:, 2:] < SIZES).all()


@pytest.mark.nightly
def test_the_library_is_imported_when_the_part_is_built_and_asks_no_network():
    code = """
import socket, sys, os
def refuse(*args, **kwargs): print("network", args); os._exit(3)
socket.getaddrinfo = socket.socket.connect = refuse
import effloop, cv2
from effloop.batch import ImageSize
from effloop.data.augment import augments
assert not {"albumentations", "pydantic", "scipy"} & set(sys.modules)
config = effloop.compose(["augment=albumentations"]).augment
augments.build(config, size=ImageSize.of(32), train=False)
assert "albumentations" not in sys.modules
augments.build(config, size=ImageSize.of(32), train=True)
assert "albumentations" in sys.modules
assert cv2.getNumThreads() <= 1
"""
    environment = {**os.environ, "NO_ALBUMENTATIONS_UPDATE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Operations


def test_every_transform_of_images_may_be_named_or_is_left_out():
    bases = {A.ImageOnlyTransform, A.DualTransform}
    kinds = {name: kind for name, kind in vars(A).items() if inspect.isclass(kind) and kind not in bases}
    known = {name for name, kind in kinds.items() if issubclass(kind, tuple(bases))}
    volumes = {name for name in known if issubclass(kinds[name], A.Transform3D)}
    assert set(albumentations.names()) == (known - volumes - albumentations.LEFT_OUT) | set(albumentations.CONTAINERS)
    assert known >= albumentations.LEFT_OUT


@pytest.fixture
def global_generators() -> Any:
    """Whether global generators stand where they stood: seeds them, and returns what they give then."""

    def seed() -> None:
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        random.seed(5)
        cv2.setRNGSeed(5)

    def numbers() -> list[float]:
        some = np.zeros(2)
        cv2.randu(some, 0, 1)
        return [*some.tolist(), *torch.rand(2).tolist(), *np.random.rand(2).tolist(), random.random()]  # noqa: NPY002

    seed()
    wanted = numbers()
    seed()
    yield
    assert numbers() == wanted


@pytest.mark.parametrize("name", albumentations.names())
def test_an_operation_depends_on_the_key_alone(name, global_generators):
    made = recipe.build_operation(name, {"p": 0.9, **NEEDED.get(name, {})}, albumentations.operations(), "here", SQUARE)
    image = photo(60, 80)
    image.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [made(key, image)[0] for key in (1, 2, 2**64 - 1)]
    for result in results:
        assert result.dtype == np.uint8
        assert result.shape[2:] == (3,)
    other = pickle.loads(pickle.dumps(made))
    with ThreadPoolExecutor(1) as pool:
        for key, result in ((2**64 - 1, results[2]), (1, results[0])):
            np.testing.assert_array_equal(other(key, image)[0], result)
            np.testing.assert_array_equal(pool.submit(made, key, image).result()[0], result)
    np.testing.assert_array_equal(image, photo(60, 80))


# Bad input


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    *[({"op": name}, f": no operation '{name}'; have ") for name in ("Lambda", "__import__", "GaussNoise")],
    ({"op": "HorizontalFlip", "q": 1}, ": HorizontalFlip has no parameter 'q'; have p"),
    # by the library's own checks of parameters
    ({"op": "HorizontalFlip", "p": 2}, ".p: 2 is not allowed; set a number from 0 to 1"),
    ({"op": "OneOf", "p": 2, "transforms": {"b": {"op": "NoOp"}}}, ".p: 2 is not allowed; set a number from 0 to 1"),
    ({"op": "RandomSizedCrop"}, ": RandomSizedCrop can't take its parameters: min_max_height: Field required; have "),
    ({"op": "Blur", "blur_limit": [-3, 5]}, ": Blur can't take its parameters: blur_limit"),
    ({"op": "RandomResizedCrop", "interpolation": "INTER_LINAER"}, ".interpolation: OpenCV has no 'INTER_LINAER'"),
    # by trying it, however seldom it is done
    ({"op": "Sharpen", "method": "gaussian", "kernel_size": 4, "p": 0.01}, ": Sharpen fails: error: OpenCV"),
    ({"op": "ToGray", "num_output_channels": 1, "p": 0.01}, ": ToGray fails: it gives uint8 of shape (32, 32), and a"),
    ({"op": "Resize", "height": 2**31}, ": Resize fails: error: OpenCV"),
    # containers
    ({"op": "OneOf"}, ".transforms: it has none; write {LABEL: {op: NAME, PARAMETER: VALUE}, ...}"),
    ({"op": "OneOf", "transforms": {"b": 3}}, ".transforms.b: 3 is not allowed; write {op: NAME, PARAMETER: VALUE}"),
    (
        {"op": "Sequential", "transforms": {"b": {"op": "OneOf", "transforms": {"c": {"op": "Rotat"}}}}},
        ".transforms.b.transforms.c: no operation 'Rotat'; have ",
    ),
    ({"op": "SomeOf", "n": 2, "transforms": {"b": {"op": "NoOp"}}}, ": SomeOf can't take its parameters: `n` is"),
)


def test_bad_input_is_one_line():
    for operation, message in REFUSED:
        with pytest.raises(ConfigError) as raised:
            build({"size": {"op": "Resize"}, "bad": operation, "end": {"op": "Resize"}})
        assert str(raised.value).startswith(f"augment.ops.bad{message}")
        assert "\n" not in str(raised.value)


def test_sizes_of_outputs_are_checked():
    for last, message in (
        ({"op": "RandomScale", "p": 0.01}, "the recipe leaves images of several sizes, which make no batch; "),
        ({"op": "Resize", "width": 40}, "the recipe gives images of 32x40, and image_size is 32; "),
    ):
        with pytest.raises(ConfigError, match=f"^augment.ops: {message}"):
            build({"size": {"op": "Resize"}, "last": last})


def test_libraries_run_on_the_host():
    for name in ("albumentations", "torchvision"):
        config = effloop.compose([f"augment={name}", "augment.device=gpu"]).augment
        message = (
            f"augment.device: gpu is not allowed, {name} runs on the host only; set augment.device=cpu, or augment="
        )
        with pytest.raises(ConfigError, match=line(message + "native")):
            augments.build(config, size=SQUARE, train=True)


def test_a_container_may_give_images_their_size():
    crop, resize, nothing = {"op": "RandomResizedCrop"}, {"op": "Resize", "p": 1}, {"op": "NoOp"}
    for some in (
        {"op": "OneOf", "transforms": {"a": crop, "b": resize}, "p": 1},
        {"op": "Sequential", "transforms": {"a": {"op": "RandomScale"}, "b": resize}, "p": 1},
        {"op": "SomeOf", "transforms": {"a": resize, "b": nothing}, "n": 2},
    ):
        assert build({"some": some}).size == (SIDE, SIDE)
    larger = {"op": "PadIfNeeded", "min_height": 40, "min_width": 40, "p": 1}
    with pytest.raises(ConfigError, match=r"^augment.ops: the recipe leaves images of several sizes"):
        build({"crop": crop, "some": {"op": "OneOf", "transforms": {"a": nothing, "b": larger}}})


GENERATED = np.array([0, 1, 12345678901234567, 2**64 - 1], np.uint64)


def test_pythons_numbers_are_the_keys():
    for key in GENERATED:
        generator = albumentations.KeyedRandom(int(key))
        assert [generator.random() for _ in range(9)] == uniforms(np.array([key]), 9)[0].tolist()
        generator.seed(int(key))
        first, second, third = words(np.array([key]), 0, 3)[0].tolist()
        assert generator.getrandbits(64) == first
        assert generator.getrandbits(96) == (second << 64 | third) >> 32
        assert generator.getrandbits(0) == 0


def test_nothing_is_left_of_the_key_before():
    generators = albumentations.Generators()
    generators.seed(7)
    wanted = generators.numpy.integers(1000, dtype=np.uint32), generators.python.gauss()
    generators.numpy.integers(1000, size=4, dtype=np.uint32)
    generators.seed(7)
    assert (generators.numpy.integers(1000, dtype=np.uint32), generators.python.gauss()) == wanted

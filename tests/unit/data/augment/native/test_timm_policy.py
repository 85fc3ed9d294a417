"""timm's policies against timm's own: what is drawn how often, and the pixels, which timm makes with Pillow."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from images import photo
from laws import assert_same_law, same_law_p
from laws import drawn as drawn_by
from PIL import Image
from timm.data import auto_augment as timms

from effloop.batch import ImageSize
from effloop.data.augment.base import RecipeConfig
from effloop.data.augment.native import host
from effloop.data.augment.native.augment import NativeAugment
from effloop.data.augment.native.policy import NAMES, Policy, PolicyDraws
from effloop.data.augment.native.timm_policy import ThreeAugment, TimmAutoAugment
from effloop.errors import ConfigError

FILL = (124, 116, 104)
SIZE = (96, 128)
OF_RAND = ("rand-m9-mstd0.5-inc1", "rand-m7-n3-p0.7", "rand-m15-mstd101-mmax20", "rand-m6-tweights")
OTHERS = (
    "rand-n3-t3aw",
    "rand-t3a",
    "augmix-m5-d3-mstd1",
    "augmix",
    "v0-mstd0.5",
    "v0r",
    "original",
    "originalr",
    "3a",
)
WARPS = {"ShearX": "shear_x", "ShearY": "shear_y", "TranslateX": "translate_x_abs", "TranslateY": "translate_y_abs"}
FUNCTIONS = {**WARPS, "AutoContrast": "auto_contrast", "SolarizeAdd": "solarize_add", "GaussianBlur": "gaussian_blur"}
FUNCTIONS |= {name: name.lower() for name in NAMES if name not in FUNCTIONS}
INTEGERS = ("Posterize", "Solarize", "SolarizeAdd")


def by_timm(image: np.ndarray, name: str, level: float, filter_: int) -> np.ndarray:
    """(H, W, 3) uint8, by timm's function for an operation of ours."""
    arguments = [] if name in ("AutoContrast", "Equalize", "Invert") else [int(level) if name in INTEGERS else level]
    if name.startswith("Translate"):
        arguments = [-level]
    changed = getattr(timms, FUNCTIONS[name])(Image.fromarray(image), *arguments, resample=filter_, fillcolor=FILL)
    return np.asarray(changed)


def each_operation(config: str, count: int) -> tuple[Policy, PolicyDraws]:
    """The first operation that is drawn for each image, alone."""
    policy = TimmAutoAugment(config)
    drawn = drawn_by(policy, count, SIZE)
    return policy, PolicyDraws(drawn.choice[:, :1], drawn.level[:, :1], drawn.matrix[:, :1], drawn.sampling[:, :1])


def test_pixels_are_those_of_pillow():
    """Of warps to the bit, in a batch but for the last bits of coordinates; of all others within 1 level."""
    seen = Counter()
    for config in ("rand-m9-mstd2-inc1-p1", "3a"):
        policy, drawn = each_operation(config, 120)
        images = np.stack([photo(*SIZE, row) for row in range(120)])
        changed = policy.apply_batch(torch.from_numpy(images.copy()).permute(0, 3, 1, 2), drawn)
        batch = changed.permute(0, 2, 3, 1).numpy()
        for row, image in enumerate(images):
            name, level = NAMES[drawn.choice[row, 0]], float(drawn.level[row, 0])
            wanted = by_timm(image, name, level, (2, 3)[drawn.sampling[row, 0]]).astype(int)
            alone = image.copy()
            policy.apply_inplace(alone, drawn, row)
            moves = name in WARPS or name == "Rotate"
            assert np.abs(alone - wanted).max() <= (0 if moves else 1), name
            off = np.abs(batch[row].astype(int) - alone)
            assert off.max() <= 1 or (moves and (off > 1).any(2).mean() < 0.001), name
            seen[name] += 1
    assert len(seen) == 16


def recorded(config: str, count: int) -> list[tuple[str, float]]:
    """What timm draws: operations of `NAMES`, and their levels."""
    noted: list[tuple[str, float]] = []

    def note(name: str, image: Any, *level: float, **_: Any) -> Any:
        name, values = name.replace("Increasing", "").replace("Original", "").replace("Rel", ""), list(level)
        if name == "Desaturate":
            name, values = "Color", [min(1.0, max(0.0, 1 - level[0]))]
        if name == "GaussianBlurRand":
            name, values = "GaussianBlur", [random.uniform(0.1, 2.0 * level[0])]
        if name.startswith("Translate"):
            values = [-level[0] * SIZE[name == "TranslateX"]]
        noted.append((name, max(0, values[0]) if name == "Posterize" else values[0] if values else 0.0))
        return image

    hparams = {"img_mean": FILL, "translate_const": 57} | ({"translate_pct": 0.3} if "augmix" in config else {})
    kind = config.partition("-")[0]
    make = {"rand": timms.rand_augment_transform, "augmix": timms.augment_and_mix_transform}
    theirs = make.get(kind, timms.auto_augment_transform)(config, hparams)
    for op in theirs.ops if kind in make else [op for row in theirs.policy for op in row]:
        op.aug_fn = lambda image, *level, _name=op.name, **rest: note(_name, image, *level, **rest)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (timm's generator)
    image = Image.new("RGB", (2, 2))
    for _ in range(count):
        theirs(image)
    return noted


def assert_drawn_as_timm(config: str, count: int) -> float:
    """p of the chi-squared test, by operation and twentieth of the range of its levels."""
    noted, drawn = recorded(config, count), drawn_by(TimmAutoAugment(config), count, SIZE)
    got = [(NAMES[choice], level) for choice, level in zip(drawn.choice.flat, drawn.level.flat, strict=True) if choice]
    if not any(word in config for word in ("mstd", "augmix", "3a")):
        assert {*got} == {*noted}  # every level, to the bit
    edges = {}
    for name in NAMES:
        levels = sorted(level for kind, level in noted if kind == name)
        edges[name] = levels[:: max(1, len(levels) // 20)]
    counts = (Counter((name, int(np.searchsorted(edges[name], at))) for name, at in each) for each in (got, noted))
    return same_law_p(*counts)


@pytest.mark.parametrize("config", [*OF_RAND, *OTHERS])
def test_operations_and_levels_are_drawn_as_timms(config):
    assert assert_drawn_as_timm(config, 500 if "augmix" in config else 1_500) > 0.001


def test_depths_and_shares_of_augmix_are_timms():
    ours = drawn_by(TimmAutoAugment("augmix"), 2_000, SIZE)
    assert ours.choice.shape == (2_000, 9)
    depths = (ours.choice.reshape(-1, 3, 3) > 0).sum(2)
    assert {*depths.flat} == {1, 2, 3}
    assert not TimmAutoAugment("augmix").takes_masks


def test_three_augment_is_timms_3a():
    """timm desaturates where DeiT III makes grey: the same pixels."""
    noted, drawn = recorded("3a", 2_000), drawn_by(ThreeAugment(), 2_000)
    got = [(NAMES[choice], level) for choice, level in zip(drawn.choice.flat, drawn.level.flat, strict=True)]
    names = {"Color": "Grayscale"}
    assert same_law_p(Counter(name for name, _ in got), Counter(names.get(name, name) for name, _ in noted)) > 0.001
    assert {level for name, level in got if name == "Solarize"} == {128.0}
    sigmas = ([level for name, level in each if name == "GaussianBlur"] for each in (got, noted))
    assert_same_law(*sigmas)
    desaturated, grey = photo(*SIZE)[None].repeat(2, 0)
    host.saturation(desaturated, 0.0, 1.0)
    host.grayscale(grey)
    np.testing.assert_array_equal(grey, desaturated)


BAD = ["", "rnad-m9", "rand-x3", "rand-m9.5", "rand-t3b", "rand-mstdinf", "rand-n10000", "augmix-w0", "v0-m3", 9]


@pytest.mark.parametrize("config", [*BAD, "rand-n16-tweights"])
def test_a_bad_spelling_is_one_line(config):
    recipe = RecipeConfig(name="native", ops={"policy": {"op": "TimmAutoAugment", "config": config}})
    with pytest.raises(ConfigError, match=r"^augment\.ops\.policy\.config: .*is not allowed; set .*") as failure:
        NativeAugment(recipe, size=ImageSize.of(32), train=True)
    assert "\n" not in str(failure.value)

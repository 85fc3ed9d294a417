"""Parameters of native operations that are refused, in one line that names them."""

from typing import Any

import pytest

from effloop.batch import ImageSize
from effloop.data.augment.base import RecipeConfig
from effloop.data.augment.native.augment import NativeAugment, all_operations
from effloop.data.augment.operation import BadParameterError
from effloop.errors import ConfigError

NAN, HUGE = float("nan"), 10**320  # a float has no room for it
REFUSED: tuple[tuple[str, str, dict[str, Any], list[Any]], ...] = (
    ("Resize", "size", {}, [0, True, 32.5, 16_385, 10**30]),
    ("CenterCrop", "size", {}, [[32, 10**6]]),
    ("RandomResizedCrop", "size", {}, [[32]]),
    ("RandomResizedCrop", "ratio", {"size": 32}, [[1e-320, 1], [1, HUGE]]),
    ("RandomCrop", "padding", {"size": 32}, [True, 1.0, 32]),
    ("RandomCrop", "padding", {"size": [64, 32], "padding_mode": "reflect"}, [16, 31]),
    ("RandomCrop", "padding_mode", {"size": 32}, ["edge", None]),
    ("RandomHorizontalFlip", "p", {"alternate": True}, [0.6, 1]),
    ("RandomHorizontalFlip", "alternate", {}, ["maybe", 1, None]),
    ("RandomScaleCrop", "fill", {"size": 32}, [256, 0.5, [1, 2], "black"]),
    ("RandomRotation", "degrees", {}, [-1, True, "30", [1, 2, 3], [2, 1]]),
    ("RandomRotation", "interpolation", {"degrees": 10}, ["bicubic"]),
    ("RandomRotation", "fill", {"degrees": 10}, [256, [1, 2], "black", HUGE]),
    ("RandomAffine", "translate", {"degrees": 10}, [0.1, [0.1, 1.1]]),
    ("RandomAffine", "scale", {"degrees": 10}, [[0, 1], [5e-324, 5e-324], [1, 1e4], 2]),
    ("RandomAffine", "shear", {"degrees": 10}, [-3, [1, 2, 3], [1, 2, 4, 3]]),
    ("RandAugment", "num_ops", {}, [-1, 1.5, 15, 10**10]),
    ("RandAugment", "magnitude", {}, [31, -1, True]),
    ("RandAugment", "num_magnitude_bins", {}, [1, 10**13, HUGE]),
    ("RandAugment", "interpolation", {}, ["lanczos"]),
    ("RandAugment", "fill", {}, [-1]),
    ("TrivialAugmentWide", "num_magnitude_bins", {}, ["31", 1001]),
    ("TrivialAugmentWide", "interpolation", {}, [None]),
    ("TrivialAugmentWide", "fill", {}, [[0, 0, 0, 0]]),
    ("AutoAugment", "policy", {}, ["ImageNet", None, 3]),
    ("AugMix", "severity", {}, [0, 11, 1.5]),
    ("AugMix", "mixture_width", {}, [0, 11]),
    ("AugMix", "chain_depth", {}, [-2, True]),
    ("TimmAutoAugment", "interpolation", {"config": "v0"}, ["nearest", None]),
    ("TimmAutoAugment", "fill", {"config": "v0"}, [None, 1.5, [1, 2]]),
    ("ColorJitter", "brightness", {}, [-0.1, True, NAN]),
    ("ColorJitter", "contrast", {}, [[1.2, 0.8], 1e39, [1e39, 1e39]]),
    ("ColorJitter", "saturation", {}, [[-1, 1], "much"]),
    ("ColorJitter", "hue", {}, [0.6, [-0.7, 0.1]]),
    ("ColorJitter", "p", {}, [2]),
    ("RandomGrayscale", "p", {}, [-1]),
    ("RandomVerticalFlip", "p", {}, ["half", HUGE]),
    ("RandomSolarize", "threshold", {}, [256]),
    ("RandomPosterize", "bits", {}, [9, 3.5]),
    ("RandomAdjustSharpness", "sharpness_factor", {}, [-1, 1e39]),
    ("GaussianBlur", "kernel_size", {}, [4, [3, 5, 7], -1, 3.5, "large"]),
    ("GaussianBlur", "sigma", {"kernel_size": 3}, [0, [2, 1], 1e-300, [1, 1e5]]),
    ("GaussianBlur", "p", {"kernel_size": 3}, [1.5]),
    ("RandomErasing", "p", {}, [1.5]),
    ("RandomErasing", "scale", {}, [[0.5, 0.1], [0.1, 1.1]]),
    ("RandomErasing", "ratio", {}, [[0, 1], [1e-320, 1]]),
    ("RandomErasing", "value", {}, [256, 127.9, [0, 0, 0.5], True, HUGE, [1, 2], "noise", None]),
    ("RandomErasing", "count", {}, [0, 1.5, 101, True]),
    ("RandomErasing", "mean", {"value": "normal"}, [0.5, [], [0.5, 0.5], [0.1, 0.2, 124]]),
    ("RandomErasing", "std", {"value": "normal"}, ["x", [0.1, 0.2, NAN]]),
)


def test_a_bad_parameter_is_named():
    for name, parameter, others, values in REFUSED:
        for value in values:
            with pytest.raises(BadParameterError, match=rf"^{parameter}: .*is not allowed; set ") as failure:
                all_operations()[name](**{**others, parameter: value})
            assert "\n" not in str(failure.value)


def test_only_one_operation_alternates():
    flips = {each: {"op": each, "alternate": True} for each in ("RandomHorizontalFlip", "RandomVerticalFlip")}
    ops = {"RandomResizedCrop": {}, **flips}
    with pytest.raises(ConfigError, match=r"^augment\.ops\.RandomVerticalFlip\.alternate: .*both would flip the same"):
        NativeAugment(RecipeConfig(name="native", ops=ops), size=ImageSize.of(32), train=True)


def test_the_largest_size_is_taken():
    config = RecipeConfig(name="native", ops={"Resize": {"size": [16_384, 16_384]}})
    assert NativeAugment(config, size=ImageSize.of(16_384), train=True).size == (16_384, 16_384)
    with pytest.raises(ConfigError, match=r"^augment.ops.RandomResizedCrop.size: 20000 is not allowed; set a number"):
        NativeAugment(RecipeConfig(name="native", ops={"RandomResizedCrop": {}}), size=ImageSize.of(20_000), train=True)

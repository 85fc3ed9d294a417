from __future__ import annotations

from typing import Any

import pytest
from plans import line

from effloop.batch import ImageSize
from effloop.data.augment.native.augment import NativeAugment, NativeConfig
from effloop.data.augment.operation import BadParameterError, operations
from effloop.errors import ConfigError

NO_SIZE = "is not allowed; set a number of pixels from 1 to 16384, or [height, width]"
NO_RATIO = "is not allowed; set [smallest, largest], at least 0.001 and at most 1000"
NO_PADDING = "is not allowed; set a number of pixels, at least 0 and less than size"


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("Resize", {"size": 0}, f"size: 0 {NO_SIZE}"),
        ("Resize", {"size": True}, f"size: True {NO_SIZE}"),
        ("Resize", {"size": 32.5}, f"size: 32.5 {NO_SIZE}"),
        ("Resize", {"size": 16_385}, f"size: 16385 {NO_SIZE}"),
        ("Resize", {"size": 10**30}, f"size: {10**30} {NO_SIZE}"),
        ("CenterCrop", {"size": [32, 10**6]}, f"size: [32, 1000000] {NO_SIZE}"),
        ("RandomResizedCrop", {"size": [32]}, f"size: [32] {NO_SIZE}"),
        ("RandomResizedCrop", {"size": 32, "ratio": [1e-320, 1]}, f"ratio: [1e-320, 1] {NO_RATIO}"),
        ("RandomResizedCrop", {"size": 32, "ratio": [1, 10**320]}, f"ratio: [1, {10**320}] {NO_RATIO}"),
        ("RandomCrop", {"size": 32, "padding": True}, f"padding: True {NO_PADDING}"),
        ("RandomCrop", {"size": 32, "padding": 1.0}, f"padding: 1.0 {NO_PADDING}"),
        ("RandomCrop", {"size": 32, "padding": 32}, f"padding: 32 {NO_PADDING}"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_parameters(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameterError, match=line(message)):
        operations[name](**given)


def test_the_largest_size_is_taken() -> None:
    config = NativeConfig(name="native", ops={"Resize": {"size": [16_384, 16_384]}})
    assert NativeAugment(config, size=ImageSize.of(16_384), train=True).size == (16_384, 16_384)
    with pytest.raises(ConfigError, match=line(f"augment.ops.RandomResizedCrop.size: 20000 {NO_SIZE}")):
        NativeAugment(NativeConfig(name="native", ops={"RandomResizedCrop": {}}), size=ImageSize.of(20_000), train=True)

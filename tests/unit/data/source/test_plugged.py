"""Sources that plugins write: what is refused, and what is taken as it is meant."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from images import encode, photo
from omegaconf import MISSING

from effloop.data.source import DataConfig, Kind, Source, sources
from effloop.errors import ConfigError, DataError

IMAGE = encode(photo(8, 8), "BMP")


class Plain(Source):
    """Eight images of two classes."""

    more: dict[str, Any] = {}

    def __init__(self, config: DataConfig, split: str) -> None:
        self.classes = ("a", "b")
        self.labels = np.arange(8, dtype=np.uint8) % 2
        for name, value in self.more.items():
            setattr(self, name, value)

    def read(self, index: int) -> bytes:
        return IMAGE

    def raw_key(self, index: int) -> bytes:
        return b"%d" % index


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    sources._found.pop("mine", None)


def build(kind: type[Source]) -> Source:
    sources._found.pop("mine", None)
    sources.register("mine", DataConfig)(kind)
    return sources.build(DataConfig("mine", root=MISSING), "train")


def having(**more: Any) -> Source:
    return build(type("Mine", (Plain,), {"more": more}))


def of(**methods: Any) -> Source:
    return build(type("Mine", (Plain,), methods))


LABELS = np.arange(8) % 2


@pytest.mark.parametrize("labels", [LABELS, LABELS.tolist(), torch.from_numpy(LABELS), LABELS.astype(bool)])
def test_labels_of_any_kind(labels):
    source = having(labels=labels, classes=["a", "b"])
    assert (source.classes, source.labels.dtype, source.labels.tolist()) == (("a", "b"), np.uint8, LABELS.tolist())


def test_properties_stay():
    class Mine(Plain):
        def __init__(self, config: DataConfig, split: str) -> None: ...

        @property
        def classes(self) -> tuple[str, ...]:  # type: ignore[override]
            return ("a", "b")

        @property
        def labels(self) -> Any:  # type: ignore[override]
            return LABELS

    assert build(Mine).labels is LABELS


def test_attributes_that_are_values():
    source = having(
        targets=np.ones((8, 2), np.uint8), kind=Kind.flags, where="/data/mine", files=["any"], lock=object()
    )
    assert (len(source), source.where, source.target_name(0)) == (8, "/data/mine", "a, b")


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"size": 20}, r"'size' is a method of every source, size\(self, index\); rename yours"),
        ({"name": "mine"}, "'name' is a method"),
        ({"kind": "classes"}, "kind is 'classes'; of every source it is a Kind"),
        ({"classes": "ab"}, "classes are 'ab'; set different names"),
        ({"classes": ("a", "a")}, "set different names"),
        ({"labels": LABELS - 1}, r"labels are int64 \(8,\) up to 0; set \(N,\) whole numbers from 0 to 1"),
        ({"labels": LABELS + 1}, "up to 2; set"),
        ({"labels": ["a", "b"] * 4}, "labels are <U1"),
    ],
)
def test_attributes_that_are_refused(more, line):
    with pytest.raises(ConfigError, match=f"^data=mine: .*{line}"):
        having(**more)


@pytest.mark.parametrize(
    ("methods", "line"),
    [
        ({"size": lambda self: 20}, r"Mine: 'size' is a method of every source, size\(self, index\); rename yours"),
        ({"verify": True}, "Mine: 'verify' is a method"),
        ({"where": lambda self: "here"}, "Mine: 'where' is no method of a source"),
        ({"__init__": lambda self, config: None}, "data=mine: Mine gets a config and a split: too many"),
        ({"__len__": lambda self: 9}, r"has 9 samples by len\(\) and 8 targets"),
        ({"raw_key": lambda self, index: "0"}, r"raw_key\(0\) is '0'; return bytes"),
        ({"read": lambda self, index: photo(8, 8)}, r"read\(0\) returns a ndarray; return the bytes of an image file"),
        ({"fingerprint": lambda self: {"samples": 8}}, r"fingerprint\(\) is {'samples': 8}; return samples"),
    ],
)
def test_methods_that_are_refused(methods, line):
    with pytest.raises(ConfigError, match=line):
        of(**methods)


def test_what_is_missing():
    class Half(Source):
        def read(self, index: int) -> bytes:
            return IMAGE

    with pytest.raises(ConfigError, match=r"^data=mine: .*Half lacks raw_key$"):
        build(Half)
    with pytest.raises(ConfigError, match=r"^data=mine: has no classes or no labels; set both$"):
        of(__init__=lambda self, config, split: None)
    with pytest.raises(DataError, match=r"^data=mine: Mine has no samples$"):
        having(labels=[])

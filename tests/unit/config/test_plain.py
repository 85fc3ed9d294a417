"""Configs as plain values, and these as YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
from omegaconf import OmegaConf

from effloop.config.plain import as_plain, holds_interpolation, plain_yaml


class Colour(Enum):
    red = "r"


@dataclass
class Inner:
    rate: float | None = None
    share: float | int = 1
    colour: Colour | None = Colour.red


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    scale: float = 1.0
    size: Any = 3
    names: list[str] = field(default_factory=lambda: ["a", "1", "y", "1e-3", "é", "~", "null", "a: b", "x " * 60])
    ops: dict[str, Any] = field(default_factory=lambda: {"flip": {"p": 1, "sizes": [1, 2.5]}, "None": None})


@pytest.mark.parametrize("config", [Outer(), Outer(Inner(3, 2.5, None), 2, [24, 40])])
def test_values_and_text_are_omegaconfs(config: Outer) -> None:
    found, wanted = as_plain(config), OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert repr(found) == repr(wanted)  # 2 is not 2.0
    assert plain_yaml(found) == OmegaConf.to_yaml(OmegaConf.create(found))


def test_interpolations_are_found_anywhere() -> None:
    assert holds_interpolation({"a": [{"b": "x${oc.env:HOME}"}]})
    assert holds_interpolation({"${a}": 1})
    assert not holds_interpolation({"a": ["$", "{", 1, None], "b": "}"})

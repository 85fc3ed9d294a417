"""What `python -m effloop convert` is asked for: its options, read and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effloop.convert.reencode import Recipe
from effloop.data.source.storage.writing import SHARD_BYTES, writers
from effloop.errors import ConfigError
from effloop.registry import choices

SPLITS = ("train", "val")
_MB = 1 << 20


@dataclass(frozen=True)
class ConvertOptions:
    """What is to be written.

    Attributes:
        to: the format, one of `writers`.
        outputs: path -> how its images are made anew; None copies them as they are.
        splits: which of `train` and `val`.
        shard_bytes: a file of a format that spreads over several ends after the record that reaches this.
    """

    to: str
    outputs: Mapping[Path, Recipe | None]
    splits: tuple[str, ...] = SPLITS
    shard_bytes: int = SHARD_BYTES

    @classmethod
    def parse(cls, words: Sequence[str], config_keys: Iterable[str]) -> tuple[ConvertOptions, list[str]]:
        """The options among `words`, and the rest, which are overrides of the config.

        Args:
            words: `to=NAME out=PATH [payload=original|jpeg|raw] [quality=1-100|source|lossless]
                [max_side=N[,N ...]] [restart=auto|none|N] [color=rgb|gray] [split=train|val|both]
                [shard_mb=N]`, a MB being 2**20 bytes, and overrides.
            config_keys: the keys that the config's root has.

        Raises:
            ConfigError: an option is missing, unknown, wrong or contradicts another.
        """
        options, overrides = {}, []
        known, config_keys = (*_PARSERS, "to", "out"), [*config_keys]
        for word in words:
            key, equals, value = word.partition("=")
            if key in known and equals:
                options[key] = value
            elif "." in key or key in config_keys:
                overrides.append(word)
            else:
                raise ConfigError(f"convert: no option '{key}'; {choices(key, known)}")
        for key in ("to", "out"):
            if not options.get(key):
                fix = "set out=PATH" if key == "out" else choices("", writers)
                raise ConfigError(f"{key} is missing; {fix}")
        if options["to"] not in writers:
            raise ConfigError(f"to: no format '{options['to']}'; {choices(options['to'], writers)}")
        given = {key: parser(key, options[key]) for key, parser in _PARSERS.items() if key in options}
        return cls(
            to=options["to"],
            outputs=_outputs(_resolved(options["out"]), given),
            splits=given.get("split", SPLITS),
            shard_bytes=given.get("shard_mb", SHARD_BYTES // _MB) * _MB,
        ), overrides


def _one_of(*words: str, number: tuple[int, int] = (1, 0)) -> Callable[[str, str], Any]:
    """A parser that takes one of some words, or a whole number in a range."""
    first, last = number

    def parse(key: str, value: str) -> str | int:
        if value in words:
            return value
        if value.isdecimal() and first <= int(value) <= last:
            return int(value)
        allowed = [*words, *([f"a whole number from {first} to {last:,}"] if first <= last else [])]
        raise ConfigError(f"{key}: '{value}' is not allowed; set {' or '.join(allowed)}")

    return parse


def _several(key: str, value: str) -> tuple[int, ...]:
    """Sizes in pixels, `500` or `500,256`."""
    parse = _one_of(number=(1, 65_500))
    sizes = tuple(int(parse(key, part)) for part in value.split(","))
    if len(set(sizes)) < len(sizes):
        raise ConfigError(f"{key}: '{value}' names a size twice; name each once")
    return sizes


def parse_splits(key: str, value: str) -> tuple[str, ...]:
    """`train`, `val`, or for both of them `both` or `train,val`, in this order.

    Raises:
        ConfigError: anything else.
    """
    parts = SPLITS if value == "both" else tuple(value.split(","))
    if len(set(parts)) < len(parts) or not set(parts) <= set(SPLITS):
        raise ConfigError(
            f"{key}: '{value}' is not allowed; set train, val or both; their names in the data are "
            "data.train_split and data.val_split"
        )
    return tuple(split for split in SPLITS if split in parts)


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "payload": _one_of("original", "jpeg", "raw"),
    "quality": _one_of("source", "lossless", number=(1, 100)),
    "max_side": _several,
    "restart": _one_of("auto", "none", number=(1, 65_500)),
    "color": _one_of("rgb", "gray"),
    "split": parse_splits,
    "shard_mb": _one_of(number=(1, 1 << 30)),
}
_FOR_PIXELS = ("max_side", "quality", "color", "restart")
"""Options that ask for other bytes than the original's."""
_EXCLUDED = {
    ("payload", "original"): _FOR_PIXELS,
    ("payload", "raw"): ("quality", "restart"),
    ("quality", "lossless"): ("max_side", "color"),
}
"""What can't be had together with an option's value."""


def _outputs(out: Path, given: Mapping[str, Any]) -> dict[Path, Recipe | None]:
    """Where which images go: one dataset for each size."""
    for (key, value), others in _EXCLUDED.items():
        for other in others:
            if given.get(key) == value and other in given:
                raise ConfigError(f"{other}: contradicts {key}={value}; drop one of them")
    if given.get("payload") == "original" or not any(key in given for key in ("payload", *_FOR_PIXELS)):
        return {out: None}
    recipe = {key: given[key] for key in ("payload", "quality", "restart", "color") if key in given}
    sizes = given.get("max_side", (None,))
    if len(sizes) == 1:
        return {out: Recipe(**recipe, max_side=sizes[0])}
    return {out.with_name(f"{out.stem}-{size}{out.suffix}"): Recipe(**recipe, max_side=size) for size in sizes}


def _resolved(out: str) -> Path:
    path = Path(os.path.abspath(os.path.expanduser(out)))
    if not os.path.isdir(path.parent):  # unlike Path's own, it never raises
        raise ConfigError(f"out: '{out}' can't be made, the folder {path.parent} is not there; make it or set out=PATH")
    if not path.name:
        raise ConfigError(f"out: '{out}' has no name; set out=PATH")
    return path

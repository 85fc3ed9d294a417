"""What stays together when data is divided: each sample, or the groups of `data.group`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from effloop.data.random import Uint64s, hashes
from effloop.data.source.base import Source, printable
from effloop.data.source.config import DataConfig
from effloop.errors import ConfigError, DataError
from effloop.registry import choices

_CHUNK = 1 << 18  # samples whose names are in memory at a time


def units_of(source: Source, config: DataConfig) -> tuple[Uint64s, NDArray[np.int64] | None]:
    """(U,) hashes of what stays together, and (N,) which one each sample is in; None: each sample is one.

    Raises:
        ConfigError, DataError: `data.group` says nothing of a sample, or there are too few groups.
    """
    if config.group is None:
        return np.concatenate([hashes(texts, config.split_seed) for texts in _names(source)]), None
    found = np.concatenate([hashes(texts, config.split_seed) for texts in _groups(source, config.group)])
    units, group = np.unique(found, return_inverse=True)
    least = config.folds or 2
    if len(units) < least:
        only = "is the same for all" if len(units) == 1 else f"has {len(units)} values for"
        fix = f"data.folds={len(units)} or another column" if len(units) > 1 else "another column"
        raise ConfigError(
            f"data.group: '{config.group}' {only} {len(source):,} samples of {source.where}; {least} groups or more "
            f"are needed: set {fix}"
        )
    return units, group


def _names(source: Source) -> Iterator[list[bytes]]:
    """The names of all samples, piece by piece."""
    for start in range(0, len(source), _CHUNK):
        yield source.raw_keys(start, min(start + _CHUNK, len(source)))


def _groups(source: Source, group: str) -> Iterator[Sequence[bytes]]:
    """What group each sample is in, piece by piece: a column's texts, or what a pattern finds in the names."""
    if group in source.columns:
        yield from column_texts(source, group, "group")
        return
    pattern = _pattern(source, group)
    for names in _names(source):
        matches = [pattern.search(name) for name in names]
        without = [name for name, match in zip(names, matches, strict=True) if match is None or match[1] is None]
        if without:
            more = f" and {len(without) - 3:,} more" if len(without) > 3 else ""
            raise ConfigError(
                f"data.group: '{group}' finds nothing in {', '.join(map(printable, without[:3]))}{more}; "
                "set a pattern that all names have"
            )
        yield [match[1] for match in matches if match]


def column_texts(source: Source, name: str, key: str) -> Iterator[Sequence[bytes]]:
    """What a column has of all samples, piece by piece.

    Raises:
        DataError: it has nothing of one; `data.KEY` asked for it.
    """
    for start in range(0, len(source), _CHUNK):
        texts = source.column(name, start, min(start + _CHUNK, len(source)))
        if empty := [row for row, text in enumerate(texts) if not text]:
            raise DataError(f"data.{key}: {source.name(start + empty[0])} has nothing in the column '{name}'; fill it")
        yield texts


def _pattern(source: Source, group: str) -> re.Pattern[bytes]:
    """`data.group` as a regular expression.

    Raises:
        ConfigError: it is none with a group in it, and no column either.
    """
    has = f"{choices(group, source.columns)}, or " if source.columns else ""
    fix = f"{has}set a regular expression for the names with what to group by in parentheses: 'data.group=\"(.*)/\"'"
    try:
        pattern = re.compile(group.encode())
    except re.error as error:
        raise ConfigError(f"data.group: '{group}' is no regular expression: {error}; {fix}") from None
    if pattern.groups != 1:
        raise ConfigError(f"data.group: {source.where} has no column '{group}'; {fix}")
    return pattern

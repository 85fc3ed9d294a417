"""Samples that `data.exclude` leaves out, by their names."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Set
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from effloop.data.source import tables
from effloop.data.source.base import USUAL, WHOLE, NoSplitError, Source, classes_without_samples, printable
from effloop.data.source.config import DataConfig
from effloop.data.source.division import Part, names_of, write_parts
from effloop.data.source.storage.kept import open_kept
from effloop.data.source.view import View
from effloop.errors import ConfigError, DataError, EffLoopError

_COMPARED = 10_000  # names that are compared for the one nearest to a wrong one
_VERSION = 1  # of the rules: another number gives other kept files


def without(source: Source, config: DataConfig, split: str, whole_of: Callable[[str], Source]) -> Source:
    """A split, or its part by `data.val` or `data.fold`, without the samples that the table of `data.exclude` names.

    They are looked for once; which ones stay is kept in a file, which all processes map.

    Raises:
        ConfigError: the table can't be read, or names what isn't there.
        DataError: a class, or the split, would be left without samples.
    """
    path = Path(os.path.expanduser(config.exclude or ""))
    if not os.path.isfile(path):
        raise ConfigError(f"data.exclude: '{config.exclude}' is no file that is there; set data.exclude=FILE, or null")
    whole = source.source if isinstance(source, Part) else source

    def write(kept: Path) -> None:
        ids = np.asarray(source.ids) if isinstance(source, Part) else np.arange(len(source))
        ids = ids[~_left_out(path, whole, config, split, whole_of)[ids]]
        _check(path, source, View(whole, ids), config)
        parts = np.full(len(whole), -1, np.int8)
        parts[ids] = 0
        write_parts(kept, whole, parts, ["stays"])

    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        how = [_VERSION, digest, split, config.allow_missing_classes, source.identity()]
        kept = open_kept("exclude", config.index_dir, how, write)
    except OSError as error:
        raise ConfigError(f"data.exclude: {path} can't be read: {error.strerror}; set data.exclude=FILE") from None
    if not (count := len(source) - len(kept["stays"])):
        return source
    return Part(whole, kept, "stays", f"all but {count:,} of {source.where}")


def _left_out(
    path: Path, source: Source, config: DataConfig, split: str, whole_of: Callable[[str], Source]
) -> NDArray[np.bool_]:
    """(N,) which samples of a split, before it is divided, are left out."""
    rows = names_in(path)
    anywhere = rows.pop("", set())

    def is_here(of: str) -> bool:
        if of == split or split == WHOLE:
            return True
        if of in USUAL and split in USUAL:
            return config.divides  # by names of the whole: another division has them elsewhere
        try:
            return whole_of(of).identity() == source.identity()
        except NoSplitError as error:
            raise ConfigError(f"data.exclude: {path} has rows of the split '{tables.shown(of)}': {error}") from None

    own = [names for of, names in rows.items() if is_here(of)]
    found, missing = _called(source, names := anywhere.union(*own))
    for other in USUAL:
        if other != split and (elsewhere := missing & anywhere):
            with suppress(EffLoopError):  # there is no such split
                missing -= elsewhere - _called(whole_of(other), elsewhere)[1]
    if missing:
        first = min(missing)[:200]
        raise ConfigError(
            f"data.exclude: {len(missing):,} of {len(names):,} names in {path} are of no sample in {source.where}, "
            f"such as '{first.decode()}' (nearest: '{_nearest(first, source)}'); correct these rows or remove them"
        )
    return found


def names_in(path: Path) -> dict[str, set[bytes]]:
    """{split: names of samples to leave out, as `Source.key` has them}; the split is empty where a row has none."""
    found = defaultdict[str, set[bytes]](set)
    try:
        table = tables.open_table(path)
        places = {name: place for name in ("name", "split", "exclude") if (place := table.first([name])) is not None}
        if "name" not in places:
            raise table.wrong(f"has no column 'name' (have {', '.join(table.columns[:8])}); name the samples in one")
        for number, texts in table.rows([*places.values()]):
            row = dict(zip(places, texts, strict=True))
            if (flag := tables.FLAGS.get((text := row.get("exclude", "1").strip()).lower())) is None:
                raise DataError(
                    f"{table.at(number)}: '{tables.shown(text[:80])}' in 'exclude'; write 1, to leave out, or 0"
                )
            if flag and not row["name"]:
                raise DataError(f"{table.at(number)}: nothing in 'name'; name a sample, or remove the row")
            if flag:
                found[row.get("split", "").strip()].add(printable(tables.encoded(row["name"])).encode())
    except DataError as error:
        raise ConfigError(f"data.exclude: {error}") from None
    return found


def _called(source: Source, names: Set[bytes]) -> tuple[NDArray[np.bool_], set[bytes]]:
    """(N,) which samples have one of these names, and the names that no sample has."""
    found, left = np.zeros(len(source), np.bool_), {name: name for name in names}
    for _ in range(2):
        escaped, start, seen = any(b"\\" in text for text in left), 0, set[bytes]()
        for piece in names_of(source) if left else ():
            texts = [printable(key).encode() for key in piece] if escaped else piece  # others are the same as text
            there = [row for row, text in enumerate(texts) if text in left]
            found[[start + row for row in there]] = True
            seen.update(texts[row] for row in there)
            start += len(texts)
        # Then without the apostrophes by which tables of ours keep a name from being a formula.
        left = {re.sub(rb"(^|;)'", rb"\1", text): name for text, name in left.items() if text not in seen}
    return found, {*left.values()}


def _nearest(name: bytes, source: Source) -> str:
    """Of samples with the same file name, or else of the first ones, the name that is most like another."""
    last = name.rpartition(b"/")[2]
    alike = [*islice((key for key in chain(*names_of(source)) if key.endswith(last)), _COMPARED)]
    texts = [*map(printable, alike or islice(chain(*names_of(source)), _COMPARED))]
    return difflib.get_close_matches(name.decode(), texts, 1, 0.0)[0]


def _check(path: Path, source: Source, found: View, config: DataConfig) -> None:
    """Refuse what leaves a split or, of those with samples, a class without any."""
    lacking = sorted({*classes_without_samples(found)} - {*classes_without_samples(source)})
    if len(found) and (not lacking or config.allow_missing_classes):
        return
    what = f"class '{lacking[0]}'" + (f" and of {len(lacking) - 1:,} more" if lacking[1:] else "") if len(found) else ""
    fix = "remove rows of it" + (", or set data.allow_missing_classes=true" if what else "")
    raise DataError(f"data.exclude: {path} leaves no sample of {what and f'the {what} in '}{source.where}; {fix}")

"""Data of one split, divided into training and validation by a keyed hash of the samples' names.

A sample is on its side because of its name, and not of its place: another order changes nothing, and a sample that is
added moves at most one other of its class. See `_blocks` for how.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.random import Uint64s, hashes
from effloop.data.source.base import Fingerprint, Kind, Source, at_most, class_counts, printable, target_bytes
from effloop.data.source.config import DataConfig
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter
from effloop.data.source.storage.kept import open_kept
from effloop.data.source.view import View, unwrapped
from effloop.errors import PROGRAM, ConfigError, DataError
from effloop.registry import choices

FOLD = "fold"  # the column that says which fold a sample is of, where `data.folds` doesn't
COPIES = "copies"  # `data.group` for what `keep_copies` has kept

_CHUNK = 1 << 18  # samples whose names are in memory at a time
_ROWS = 1 << 14  # of flags that are copied at a time
_VERSION = 1  # of the rules: another number gives other kept files


class Part(View):
    """A part of a source, such as of a divided one the training part, by the file that `write_parts` has written, by
    which it is pickled, too.
    """

    def __init__(self, source: Source, kept: ColumnFile, name: str, where: str) -> None:
        super().__init__(source, kept[name], where=where, fingerprint=kept.meta["fingerprints"][name])
        self._made_of = (source, kept, name, where)

    def __reduce__(self) -> tuple[Any, ...]:
        return Part, self._made_of


def part_of(source: Source, config: DataConfig, split: str) -> Part:
    """The training or the validation part of a source, as `data.val` or `data.fold` divides it.

    The division is made once and kept in a file, which all processes map: 10 million samples take 10 s the first time,
    and then 0.2 ms.

    Raises:
        ConfigError, DataError: the data can't be divided so.
    """
    how = [config.val, config.folds, config.fold, config.group, config.split_seed, config.allow_missing_classes]
    if config.group == COPIES and COPIES not in source.columns:
        how.append(_copies(source, config).meta["sha256"])

    def write(path: Path) -> None:
        write_parts(path, source, held_out(source, config).astype(np.int8), ("train", "val"))

    kept = open_kept("division", config.index_dir, [_VERSION, how, source.identity()], write)
    return Part(source, kept, split, f"{_share(config, split)} of {source.where}")


def _share(config: DataConfig, split: str) -> str:
    """What part of the data a split is: `20 %`, `all but fold 1 of 5`."""
    if config.val is not None:
        return f"{100 * (config.val if split == 'val' else 1 - config.val):.4g} %"
    of = f" of {config.folds}" if config.folds else ""
    return f"{'' if split == 'val' else 'all but '}fold {config.fold}{of}"


def held_out(source: Source, config: DataConfig) -> NDArray[np.bool_]:
    """(N,) whether each sample validates."""
    if config.val is None and config.folds is None:
        found = _texts_equal(source, FOLD, config)
    else:
        units, group = units_of(source, config)
        strata = _strata(source)
        if group is None:
            found = _blocks(strata, units, None, config)
        else:
            of_groups = _most_frequent(strata, group, len(units))
            blocks = _blocks(of_groups, units, np.bincount(group, minlength=len(units)), config)
            if config.val is not None:
                _fill_in(blocks, strata, group, of_groups, units)
            found = blocks[group]
    _check_both(source, found, config)
    return found


def _strata(source: Source) -> NDArray[Any]:
    """(N,) what is divided alike: the class; of flags the rarest; all, where targets are numbers or masks."""
    if not source.classes or source.kind is Kind.masks:
        return np.zeros(len(source), np.uint8)
    if source.kind is Kind.classes:
        return at_most(source.labels, len(source.classes))
    order, targets = np.argsort(class_counts(source), kind="stable"), source.targets
    strata = np.full(len(source), len(order))
    for start in range(0, len(source), _ROWS):
        flags = targets[start : start + _ROWS][:, order]
        rows = np.flatnonzero(flags.any(axis=1))
        strata[start + rows] = order[flags[rows].argmax(axis=1)]
    return strata


def _most_frequent(strata: NDArray[Any], group: NDArray[np.int64], num_groups: int) -> NDArray[np.int64]:
    """(G,) the stratum that most samples of a group are in; of several the first."""
    number = int(strata.max()) + 1
    pairs, counts = np.unique(group * number + strata, return_counts=True)
    order = np.lexsort((-(pairs % number), counts, pairs // number))
    best = np.empty(num_groups, np.int64)
    best[pairs[order] // number] = pairs[order] % number  # of several for a group the last stays
    return best


def _fill_in(
    found: NDArray[np.bool_],
    strata: NDArray[Any],
    group: NDArray[np.int64],
    of_groups: NDArray[np.int64],
    units: Uint64s,
) -> None:
    """Give each side a group of every stratum of which it has no sample, where there are two groups or more."""
    number = int(strata.max()) + 1
    several = np.bincount(of_groups, minlength=number) > 1
    for side, pick in ((True, np.argmin), (False, np.argmax)):
        counts = np.bincount(strata[found[group] == side], minlength=number)
        for stratum in np.flatnonzero(several & (counts == 0)).tolist():
            groups = np.flatnonzero(of_groups == stratum)
            found[groups[pick(units[groups])]] = side


def _blocks(
    strata: NDArray[Any], units: Uint64s, sizes: NDArray[np.int64] | None, config: DataConfig
) -> NDArray[np.bool_]:
    """(U,) which units validate: of each stratum, in the order of the hashes, a run of `data.val` of its samples."""
    order = np.lexsort((units, strata))
    ends = np.flatnonzero(np.diff(strata[order], append=-1)) + 1
    starts = np.concatenate([[0], ends[:-1]])
    found = np.zeros(len(order), np.bool_)
    lengths = np.ones(len(order), np.int64) if sizes is None else sizes[order]
    before = np.cumsum(lengths) - lengths  # samples in front of each unit
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        run = order[start:end]
        total = int(lengths[start:end].sum())
        if config.val is not None and sizes is None:
            found[run[: min(max(int(config.val * total + 0.5), 1), total - 1)]] = True
            continue
        # Drawn, else all strata would give their remainders to the same side or fold.
        shift = hashes([b"%d" % strata[run[0]]], config.split_seed)[0] / 2.0**64
        places = (before[start:end] - before[start] + lengths[start:end] * shift) / total
        found[run] = places < config.val if config.val is not None else _folds(places, config) == config.fold
    return found


def _folds(places: NDArray[np.float64], config: DataConfig) -> NDArray[np.int64]:
    """(U,) the fold of each unit of a stratum, by its place in it, from 0 to 1."""
    assert config.folds is not None
    folds: NDArray[np.int64] = (places * config.folds).astype(np.int64)
    if len(folds) < config.folds:
        return folds
    # Large groups would skip folds: each unit is at most one fold further, and enough are left for the last ones.
    numbers = np.arange(len(folds))
    folds = np.minimum(np.minimum.accumulate(folds - numbers), 0) + numbers
    return np.maximum(folds, config.folds - (len(folds) - numbers))


def _texts_equal(source: Source, column: str, config: DataConfig) -> NDArray[np.bool_]:
    """(N,) whether a column says `data.fold`."""
    if column not in source.columns:
        raise ConfigError(
            f"data.fold: {config.fold} of how many? {source.where} has no column '{column}'; set data.folds=5"
        )
    wanted, there, pieces = str(config.fold).encode(), set[bytes](), []
    for texts in column_texts(source, column, "fold"):
        there.update(texts)
        pieces.append(np.array([text == wanted for text in texts], np.bool_))
    if not (found := np.concatenate(pieces)).any():
        raise ConfigError(
            f"data.fold: no sample of {source.where} has {config.fold} in its column '{column}', which has "
            f"{', '.join(map(printable, sorted(there)[:8]))}; set one of them"
        )
    return found


def _check_both(source: Source, found: NDArray[np.bool_], config: DataConfig) -> None:
    """Refuse a division with an empty part, or one that lacks a class."""
    key = "data.val" if config.val is not None else "data.fold"
    own_folds = config.val is None and config.folds is None
    if source.kind is Kind.classes and source.classes and not config.allow_missing_classes and not own_folds:
        _check_classes(source, found, config, key)
    if found.all() or not found.any():
        what = (
            f"one sample alone ({source.key(0)})" if len(source) == 1 else f"{len(source):,} samples in too few groups"
        )
        raise DataError(f"{key}: {source.where} has {what}, which can't be divided; set data.val_split to other data")


def _check_classes(source: Source, found: NDArray[np.bool_], config: DataConfig, key: str) -> None:
    """Refuse a class that only one part has, or that has fewer samples than folds."""
    total, val = class_counts(source), class_counts(View(source, np.flatnonzero(found)))
    least = config.folds or 2
    lacking = np.flatnonzero((total > 0) & ((val == 0) | (val == total) | (total < least)))
    if len(lacking):
        first, more = int(lacking[0]), f" (and {len(lacking) - 1:,} more)" if len(lacking) > 1 else ""
        count = int(total[first])
        grouped = config.group is not None and count >= least
        few = f"{count:,} sample{'s' * (count > 1)}" + " in too few groups" * grouped
        fix = "set another data.group" if grouped else "add samples"
        fix += f", set data.folds={count}" if config.folds and 1 < count < least else ""
        raise DataError(
            f"{key}: the class '{source.classes[first]}'{more} has {few} in {source.where}, so that a split would lack "
            f"it: {fix}, or set data.allow_missing_classes=true"
        )


def write_parts(path: Path, source: Source, found: NDArray[np.int8], parts: Sequence[str]) -> None:
    """Write which samples are in which part, by (N,) their places in `parts` or -1, and the parts' fingerprints."""
    prints = [Fingerprint() for _ in (*parts, None)]
    for start in range(0, len(source), _CHUNK):
        stop = min(start + _CHUNK, len(source))
        targets = source.target_rows[start:stop]
        plain = source.kind is Kind.classes
        labels = targets.tolist() if plain else [0] * (stop - start)
        names, places = source.raw_keys(np.arange(start, stop)).items(), found[start:stop].tolist()
        for row, (name, label, place) in enumerate(zip(names, labels, places, strict=True)):
            target = b"" if plain else target_bytes(targets[row])
            prints[place].add(name, label, source.size(start + row), target)
    dtype = np.uint32 if len(found) < 1 << 32 else np.uint64
    meta = {"fingerprints": {part: each.result() for part, each in zip(parts, prints, strict=False)}}
    with ColumnWriter(path, meta) as writer:
        for place, part in enumerate(parts):
            writer.add(part, np.flatnonzero(found == place).astype(dtype))


def units_of(source: Source, config: DataConfig) -> tuple[Uint64s, NDArray[np.int64] | None]:
    """(U,) hashes of what stays together, and (N,) which one each sample is in; None: each sample is one."""
    texts = names_of(source) if config.group is None else _groups(source, config.group, config)
    found = np.concatenate([hashes(piece, config.split_seed) for piece in texts])
    if config.group is None:
        return found, None
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


def names_of(source: Source) -> Iterator[list[bytes]]:
    """The names of all samples, piece by piece."""
    for start in range(0, len(source), _CHUNK):
        yield source.raw_keys(np.arange(start, min(start + _CHUNK, len(source)))).items()


def _groups(source: Source, group: str, config: DataConfig) -> Iterator[Sequence[bytes]]:
    """What group each sample is in, piece by piece: a column's texts, the name of a copy of it, or what a pattern finds
    in the names.
    """
    if group in source.columns:
        yield from column_texts(source, group, "group")
        return
    if group == COPIES:
        first = _copies(source, config)["first"]
        for start in range(0, len(first), _CHUNK):
            yield source.raw_keys(first[start : start + _CHUNK].astype(np.int64)).items()
        return
    pattern = _pattern(source, group)
    for names in names_of(source):
        matches = [pattern.search(name) for name in names]
        without = [name for name, match in zip(names, matches, strict=True) if match is None or match[1] is None]
        if without:
            more = f" and {len(without) - 3:,} more" if len(without) > 3 else ""
            raise ConfigError(
                f"data.group: '{group}' finds nothing in {', '.join(map(printable, without[:3]))}{more}; "
                "set a pattern that all names have"
            )
        yield [match[1] for match in matches if match]


def keep_copies(
    splits: Mapping[str, Source], index_dir: str | None, groups: Sequence[Sequence[tuple[str, int]]]
) -> None:
    """Keep what samples are copies of each other, for `data.group=copies`.

    Args:
        splits: all that were searched, by their names.
        index_dir: `data.index_dir`.
        groups: a split and the number of a sample in it for each copy; groups with a sample in common become one.

    Raises:
        ConfigError: the cache folder can't be written.
    """
    parts = {split: (*unwrapped(source), unwrapped(source)[0].identity()) for split, source in splits.items()}
    for whole, _, identity in parts.values():
        own = [[int(parts[split][1][row]) for split, row in each if parts[split][2] == identity] for each in groups]
        rows = sorted({*chain(*own)}, key=whole.raw_key)
        rank = {row: place for place, row in enumerate(rows)}
        sets, lowest = [np.array([rank[row] for row in each]) for each in own if each], np.arange(len(rows))
        while any(np.ptp(lowest[each]) for each in sets):
            for each in sets:
                lowest[each] = lowest[each].min()
        first = np.arange(len(whole))
        first[rows] = np.array(rows, np.int64)[lowest]
        open_kept(COPIES, index_dir, [_VERSION, identity], partial(_write_copies, first), lambda _: False)


def _write_copies(first: NDArray[np.int64], path: Path) -> None:
    with ColumnWriter(path, {"sha256": hashlib.sha256(first.data).hexdigest()}) as writer:
        writer.add("first", first)


def _copies(source: Source, config: DataConfig) -> ColumnFile:
    """For each sample the first one, by name, of the copies of it: itself where there are none."""

    def missing(_: Path) -> None:
        raise ConfigError(
            f"data.group: copies haven't been looked for in {source.where} as it is now; run {PROGRAM} audit "
            f"data.root={config.root} first, or set another data.group"
        )

    return open_kept(COPIES, config.index_dir, [_VERSION, source.identity()], missing)


def column_texts(source: Source, name: str, key: str) -> Iterator[Sequence[bytes]]:
    """What a column has of all samples, piece by piece."""
    for start in range(0, len(source), _CHUNK):
        texts = source.column(name, start, min(start + _CHUNK, len(source)))
        if empty := [row for row, text in enumerate(texts) if not text]:
            raise DataError(f"data.{key}: {source.name(start + empty[0])} has nothing in the column '{name}'; fill it")
        yield texts


def _pattern(source: Source, group: str) -> re.Pattern[bytes]:
    """`data.group` as a regular expression."""
    has = f"{choices(group, source.columns)}, or " if source.columns else ""
    fix = f"{has}set a regular expression for the names with what to group by in parentheses: 'data.group=\"(.*)/\"'"
    try:
        pattern = re.compile(group.encode())
    except re.error as error:
        raise ConfigError(f"data.group: '{group}' is no regular expression: {error}; {fix}") from None
    if pattern.groups != 1:
        raise ConfigError(f"data.group: {source.where} has no column '{group}'; {fix}")
    return pattern

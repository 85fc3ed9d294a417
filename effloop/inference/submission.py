"""Tables of predictions as others want them: ids, columns, and rows and values as a sample file has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from effloop.data.source import Source
from effloop.data.source.tables import open_table
from effloop.data.source.view import View
from effloop.errors import ConfigError, DataError, warn
from effloop.inference.options import Id
from effloop.inference.predict import Columns
from effloop.inference.trained import Trained
from effloop.task import Task

_SEPARATORS = "| ,;"  # of several labels in a cell


def ids_of(source: Source, how: Id, parts: int = 1) -> list[str]:
    """What a table calls each image; of a name the last `parts` of its path, of 0 all below the folder of all."""
    paths = [key.decode("utf-8", "backslashreplace") for key in source.raw_keys(np.arange(len(source))).items()]
    if how == "path":
        return paths
    pieces = [path.split("/") for path in paths]
    start = -parts or len(os.path.commonprefix([each[:-1] for each in pieces]))  # noqa: RUF071 - of lists
    names = ["/".join(each[start:]) for each in pieces]
    return names if how == "name" else [os.path.splitext(name)[0] for name in names]


@dataclass(frozen=True)
class Submission:
    """A table with ids and, of each image, the class, labels or number, or a column for each of the model's outputs."""

    header: Sequence[str]  # names of the columns, the ids' first
    ids: Sequence[str]  # of the samples
    taken: Sequence[str]  # columns of `Task.predictions` that the others are
    encode: Callable[[str], str]  # what is written for a text in them
    words: str  # what they hold
    rows: Sequence[Sequence[str]]  # of the sample file, whose values images have that can't be used; or none

    def table(self, problems: Collection[int], samples: Sequence[int], found: Columns) -> Columns:
        """The columns of some samples, whose predictions are `found`; those with problems have none."""
        bad = [row for row, sample in enumerate(samples) if sample in problems] if self.rows else []
        columns: dict[str, Any] = {self.header[0]: [self.ids[sample] for sample in samples]}
        for place, (name, key) in enumerate(zip(self.header[1:], self.taken, strict=True), start=1):
            values: Any = found[key]
            values = values.copy() if isinstance(values, np.ndarray) else [it and self.encode(it) for it in values]
            for row in bad:
                values[row] = _like(values, self.rows[samples[row]][place])
            columns[name] = values
        return columns


def _like(values: NDArray[np.float32] | list[str], text: str) -> float | str:
    """A cell of the sample file as a value of a column."""
    if not isinstance(values, np.ndarray):
        return text
    with suppress(ValueError):
        return float(text)
    return np.nan


def submission(
    trained: Trained, source: Source, how: Id | None, columns: Sequence[str], like: Path | None
) -> tuple[Submission, Source]:
    """The table for a source by the names of its columns, or like a sample file; and the images in its order."""
    header, rows = tuple(columns), []
    if like:
        sample = open_table(like)
        header, rows = sample.columns, [[*texts] for _, texts in sample.rows(range(len(sample.columns)))]
        if not rows:
            raise sample.wrong("has no rows; name a file with a row for each image")
        if columns and tuple(columns) != header:
            raise ConfigError(f"columns: {','.join(columns)} contradict {like}, which has {','.join(header)}; drop one")
    values = [{row[place].strip() for row in rows} - {""} for place in range(1, len(header))]
    what = f"like: {like}" if like else "columns: the table"
    taken, encode, words = contents(trained.task, trained.target_names, header, values, what)
    if like:
        source, ids = _in_order(source, [row[0] for row in rows], how, like)
    else:
        ids = unique_ids(source, how or "path")
    return Submission(header, ids, taken, encode, words, rows), source


def unique_ids(source: Source, how: Id) -> list[str]:
    """`ids_of`, each of one image alone, else a ConfigError."""
    ids = ids_of(source, how)
    if len(set(ids)) < len(ids):
        seen: dict[str, int] = {}
        first, second = next((seen[it], n) for n, it in enumerate(ids) if seen.setdefault(it, n) != n)
        raise ConfigError(f"id: '{ids[second]}' is {source.key(first)} and {source.key(second)}; set id=path")
    return ids


def _in_order(source: Source, wanted: list[str], how: Id | None, like: Path) -> tuple[Source, list[str]]:
    """The images that a sample file's ids name, in its order; others are left out with a warning."""
    depths = {each.count("/") + 1 for each in wanted}
    parts = depths.pop() if len(depths) == 1 else 0
    ways: list[Id] = [how] if how else ["stem", "name", "path"]
    found = max((ids_of(source, way, parts) for way in ways), key=lambda ids: len({*ids} & {*wanted}))
    places = {each: number for number, each in enumerate(found)}
    if missing := [each for each in wanted if each not in places]:
        have = f"images are {', '.join(found[:3])}, …" if len(missing) == len(wanted) else "name them, too"
        what = f"{like}: {len(missing):,} of {len(wanted):,} ids are of no image: {', '.join(missing[:3])}"
        raise DataError(f"{what}{', …' * (len(missing) > 3)}; {have}")
    named = {*wanted}
    if twice := [each for number, each in enumerate(found) if each in named and places[each] != number]:
        raise DataError(f"{like}: the id '{twice[0]}' is of several images; name one folder of them")
    if extra := [each for each in found if each not in named]:
        names = ", ".join(extra[:3]) + ", …" * (len(extra) > 3)
        warn(f"{like} has no row for {len(extra):,} of {len(found):,} images, which are left out: {names}")
    return View(source, np.array([places[each] for each in wanted], np.int64)), wanted


def contents(
    task: Task, names: Sequence[str], header: Sequence[str], values: Sequence[set[str]], what: str
) -> tuple[list[str], Callable[[str], str], str]:
    """Which columns of `Task.predictions` a table has after the ids, how texts in them are written, and in words."""
    rest = [*header[1:]]
    have = task.predictions(torch.zeros(1, len(names) or 1), names, every=True)
    first = next(iter(have))
    in_words = isinstance(have[first], list)
    outputs = {name: key for name in names if (key := f"p_{name}" if in_words else name) in have}
    if rest and {*rest} == {*outputs} and (len(rest) > 1 or not in_words):
        return [outputs[name] for name in rest], str, "the model's outputs"
    if len(rest) != 1 or not (in_words or len(have) == 1):
        one = "one for what is predicted, or " * in_words
        raise ConfigError(
            f"{what} has the columns {','.join(header)}; give it one for ids, and {one}each of {','.join(names[:8])}"
        )
    texts = values[0] if values else set[str]()
    if not in_words:
        return [first], str, "a number"
    if not task.ranks:
        if separator := next((each for each in _SEPARATORS if _all_in(texts, each, names)), ""):
            return [first], lambda text: text.replace("|", separator), f"labels with '{separator}' between"
        raise ConfigError(
            f"{what} has '{max(texts - {*names}, key=len, default='')}' in '{rest[0]}'; write labels "
            f"({', '.join(names[:8])}) with one of '{_SEPARATORS}' between, or a column for each"
        )
    whole = all(map(str.isdecimal, texts))
    if len(names) == 2 and not whole and all(map(_is_number, texts)):
        return [outputs[names[1]]], str, f"the probability of '{names[1]}'"
    if texts <= {*names} or (whole and all(map(str.isdecimal, names))):
        return [first], str, "the class"
    if texts <= {str(number) for number in range(len(names))}:
        return [first], lambda text: str(names.index(text)), f"the number of the class, from 0, '{names[0]}'"
    raise ConfigError(
        f"{what} has '{min(texts - {*names})}' in '{rest[0]}', no class ({', '.join(names[:8])}) and no number of one, "
        f"0 to {len(names) - 1}; write one of these"
    )


def _all_in(texts: set[str], separator: str, names: Sequence[str]) -> bool:
    return {part.strip() for text in texts for part in text.split(separator)} - {""} <= {*names}


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        return 0 <= float(text) <= 1
    return False

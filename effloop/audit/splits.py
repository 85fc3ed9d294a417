"""What is wrong with splits and classes as a whole: groups on both sides, shares, classes with few images, spelling."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from effloop.audit.findings import Finding, Place
from effloop.data.random import hashes
from effloop.data.source.base import Kind, Source, class_counts, printable
from effloop.data.source.vocabulary import is_group

_FEW, _SHARE = 10, 0.1  # training images of a class, and of the average class's
_LEVEL, _FACTOR = 0.01, 1.5  # of a test of all classes, and between shares
_RARER = 20  # how much more frequent a class is than one that is mistyped
_SHOWN = 6  # examples of a class or a group
_INSERTED, _REPLACED = 4, 6  # letters of a name of which one is left out or added, or is another one
_CHUNK = 1 << 18  # samples whose texts are in memory at a time


def find(splits: Mapping[str, Source]) -> list[Finding]:
    """Find what is wrong with the groups and classes of a dataset, from its index alone: nothing is read or decoded.

    Classes are looked at where targets are classes or flags.
    """
    pairs = [*combinations(splits, 2)]
    found = [finding for pair in pairs for finding in _groups(splits, *pair)]
    if all(source.kind in (Kind.classes, Kind.flags) and source.classes for source in splits.values()):
        counts: dict[str, Counter[str]] = {}
        for split, source in splits.items():
            counts[split] = Counter(dict(zip(source.classes, class_counts(source).tolist(), strict=True)))
        found += [*_few(splits, counts), *_spelling(splits, counts)]
        found += [finding for pair in pairs for finding in _shares(splits, counts, *pair)]
    return found


def _groups(splits: Mapping[str, Source], one: str, other: str) -> Iterator[Finding]:
    """Columns that look like groups, such as patients, and have values in both of two splits."""
    for column in splits[one].columns:
        if not is_group(column) or column not in splits[other].columns:
            continue
        sides = [_hashes(splits[split], column) for split in (one, other)]
        both = np.setdiff1d(np.intersect1d(sides[0], sides[1]), [0])
        if not len(both):
            continue
        images = [np.flatnonzero(np.isin(side, both)) for side in sides]
        places = [[int(np.argmax(side == value)) for value in both[:_SHOWN]] for side in sides]
        texts = [printable(splits[one].column(column, row, row + 1)[0]) for row in places[0]]
        text = f"{len(both):,} of {len(np.unique(np.concatenate(sides))):,} values of '{column}' are in {one} "
        text += f"({len(images[0]):,} images) and {other} ({len(images[1]):,} images): {', '.join(texts)}"
        text += ", …" * (len(both) > _SHOWN)
        examples = [Place(split, row) for split, rows in zip((one, other), places, strict=True) for row in rows]
        yield Finding("group", tuple(examples), text, len(images[1]))


def _hashes(source: Source, column: str) -> NDArray[np.uint64]:
    """(n,) hashes of what a column has of each sample; 0 for nothing."""
    pieces = []
    for start in range(0, len(source), _CHUNK):
        texts = source.column(column, start, min(start + _CHUNK, len(source)))
        pieces.append(hashes(texts, 0) * np.array([bool(text.strip()) for text in texts]))
    return np.concatenate(pieces)


def _few(splits: Mapping[str, Source], counts: Mapping[str, Counter[str]]) -> Iterator[Finding]:
    """Classes that the first split, which is trained on, has less than `_FEW` images of, or less than a tenth of the
    average class's: cleanlab's threshold (`datalab` 2.x, `ClassImbalanceIssueManager`); or that another one lacks.
    """
    train, *others = splits
    least = max(_FEW, _SHARE * counts[train].total() / len(counts[train]))
    for name, count in counts[train].items():
        lacking = [split for split in others if not counts[split][name]]
        if count < least or lacking:
            text = f"'{name}' has {', '.join(f'{counts[split][name]:,} images in {split}' for split in splits)}"
            yield Finding("few", _examples(splits, name), text, -count)


def _spelling(splits: Mapping[str, Source], counts: Mapping[str, Counter[str]]) -> Iterator[Finding]:
    """Classes whose names differ in case, spaces and hyphens alone, or from a far more frequent one in a letter."""
    total = sum(counts.values(), Counter[str]())
    whole: dict[str, str] = {}  # a name without case and spaces -> the class that is called so
    cut: dict[str, str] = {}  # without one of its letters, too
    for name in sorted(total, key=lambda each: (-total[each], each)):
        text = unicodedata.normalize("NFKC", name).casefold().replace("-", " ").replace("_", " ")
        key = "".join(text.split())
        letters = [at for word in re.finditer(r"[^\W\d]{3,}", text) for at in range(*word.span())]
        shorter = {"".join((text[:at] + text[at + 1 :]).split()) for at in letters if len(key) >= _INSERTED}
        similar = [cut.get(key), *map(whole.get, shorter), *map(cut.get, shorter if len(key) >= _REPLACED else ())]
        likely = [each for each in similar if each and total[each] >= _RARER * total[name]]
        if len(key) > 1 and key in whole:  # `A` and `a` may be two
            likely = [whole[key]]
        if likely:
            text = f"'{name}' ({total[name]:,} images) may be '{likely[0]}' ({total[likely[0]]:,} images)"
            yield Finding("spelling", _examples(splits, name), text, total[name])
        whole.setdefault(key, name)
        for each in shorter:
            cut.setdefault(each, name)


def _shares(
    splits: Mapping[str, Source], counts: Mapping[str, Counter[str]], one: str, other: str
) -> Iterator[Finding]:
    """Classes whose shares of two splits differ by more than chance and more than a little: a chi-square test of each
    with Yates's correction, at a level of 1 % of all classes together (Bonferroni), and a factor of 1.5.
    """
    sizes = len(splits[one]), len(splits[other])
    for name in counts[one]:
        having = counts[one][name], counts[other][name]
        shares = having[0] / sizes[0], having[1] / sizes[1]
        expected = sum(having) / sum(sizes)
        off = max(0.0, abs(having[0] - expected * sizes[0]) - 0.5)
        spread = expected * (1 - expected) * sizes[0] * sizes[1] / sum(sizes)
        chance = math.erfc(off / math.sqrt(2 * spread)) if spread else 1.0
        if chance < _LEVEL / len(counts[one]) and max(shares) > _FACTOR * min(shares):
            text = f"'{name}' is {shares[0]:.1%} of {one} and {shares[1]:.1%} of {other}"
            yield Finding("shares", _examples(splits, name), text, abs(shares[0] - shares[1]))


def _examples(splits: Mapping[str, Source], name: str) -> tuple[Place, ...]:
    """A few images of a class."""
    found = []
    for split, source in splits.items():
        if name in source.classes:
            of, label = source.targets, source.classes.index(name)
            rows = np.flatnonzero(of[:, label] if source.kind is Kind.flags else of == label)[:_SHOWN]
            found += [Place(split, row) for row in rows.tolist()]
    return tuple(found[:_SHOWN])

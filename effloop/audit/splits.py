"""What is wrong with splits and classes as a whole, by the index alone."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations

import numpy as np

from effloop.audit.findings import Finding, Place
from effloop.data.source.base import Kind, Source, class_counts, printable
from effloop.data.source.vocabulary import is_group

_FEW, _SHARE = 10, 0.1  # images of a class, and of the average class's
_LEVEL, _FACTOR = 0.01, 1.5  # of a test of all classes, and between shares
_RARER = 20  # times as many images has a class than one that is mistyped
_ADDED, _REPLACED = 4, 6  # letters of a name with one too many, and with a wrong one
_SHOWN = 6  # examples


def find(splits: Mapping[str, Source]) -> list[Finding]:
    """Find groups that are in several splits, of which the first is trained on; and, where targets are classes or
    flags, what is wrong with the classes.
    """
    pairs = [*combinations(splits, 2)]
    found = [finding for pair in pairs for finding in _groups(splits, *pair)]
    if all(source.kind in (Kind.classes, Kind.flags) and source.classes for source in splits.values()):
        counts = {
            split: Counter(dict(zip(source.classes, class_counts(source).tolist(), strict=True)))
            for split, source in splits.items()
        }
        found += [*_few(splits, counts), *_spelling(splits, counts)]
        found += [finding for pair in pairs for finding in _shares(splits, counts, *pair)]
    return found


_Counts = Mapping[str, Counter[str]]  # split -> class -> images


def _groups(splits: Mapping[str, Source], one: str, other: str) -> Iterator[Finding]:
    """Columns that look like groups, such as patients, and have the same values in two splits."""
    for column in [name for name in splits[one].columns if is_group(name) and name in splits[other].columns]:
        sides = {split: np.array(splits[split].column(column, 0, len(splits[split]))) for split in (one, other)}
        both = np.setdiff1d(np.intersect1d(sides[one], sides[other]), [b""])
        if len(both):
            images = [f"{np.isin(side, both).sum():,} of {len(side):,} {split}" for split, side in sides.items()]
            named = ", ".join(map(printable, both[:_SHOWN].tolist())) + ", …" * (len(both) > _SHOWN)
            values = f"{len(both):,} value{'s' * (len(both) > 1)} of '{column}' in both splits"
            text = f"{values}, with {' and '.join(images)} images: {named}"
            places = [Place(split, int(np.argmax(side == both[0]))) for split, side in sides.items()]
            yield Finding("group", tuple(places), text, float(len(both)))


def _few(splits: Mapping[str, Source], counts: _Counts) -> Iterator[Finding]:
    """Classes with less than 10 images to train on, or less than a tenth of the average class's, which is cleanlab's
    threshold (`ClassImbalanceIssueManager` of 2.x); and those that another split lacks.
    """
    train = counts[next(iter(splits))]
    least = max(_FEW, _SHARE * train.total() / len(train))
    for name in train:
        if train[name] < least or not all(counts[split][name] for split in splits):
            text = f"images of '{name}': {', '.join(f'{counts[split][name]:,} in {split}' for split in splits)}"
            yield Finding("few", _examples(splits, name), text, -float(train[name]))


def _spelling(splits: Mapping[str, Source], counts: _Counts) -> Iterator[Finding]:
    """Classes whose names differ in case, spaces and hyphens alone, or from a far more frequent one in a letter."""
    total = sum(counts.values(), Counter[str]())
    whole: dict[str, str] = {}  # a name without case and spaces -> the class that is called so
    cut: dict[str, str] = {}  # without one of its letters, too
    for name in sorted(total, key=lambda each: (-total[each], each)):
        text = re.sub(r"[\s_-]+", " ", unicodedata.normalize("NFKC", name).casefold()).strip()
        key = text.replace(" ", "")
        letters = [at for word in re.finditer(r"[^\W\d]{3,}", text) for at in range(*word.span())]  # not of `type b`
        shorter = {(text[:at] + text[at + 1 :]).replace(" ", "") for at in letters if len(key) >= _ADDED}
        similar = [cut.get(key), *map(whole.get, shorter), *map(cut.get, shorter if len(key) >= _REPLACED else ())]
        likely = [each for each in similar if each and total[each] >= _RARER * total[name]]
        if len(key) > 1 and key in whole:  # `A` and `a` may be two
            likely = [whole[key]]
        if likely:
            text = f"'{name}' may be '{likely[0]}': {total[name]:,} and {total[likely[0]]:,} images"
            yield Finding("spelling", _examples(splits, name), text, float(total[name]))
        for each, of in [(key, whole), *((each, cut) for each in shorter)]:
            of.setdefault(each, name)


def _shares(splits: Mapping[str, Source], counts: _Counts, one: str, other: str) -> Iterator[Finding]:
    """Classes whose shares of two splits differ by a factor of 1.5, and by more than chance: a chi-square test of each
    with Yates's correction, at a level of 1 % of all classes together (Bonferroni).
    """
    sizes = len(splits[one]), len(splits[other])
    for name in counts[one]:
        having = counts[one][name], counts[other][name]
        shares, expected = (having[0] / sizes[0], having[1] / sizes[1]), sum(having) / sum(sizes)
        off = max(0.0, abs(having[0] - expected * sizes[0]) - 0.5)
        spread = expected * (1 - expected) * sizes[0] * sizes[1] / sum(sizes)
        chance = math.erfc(off / math.sqrt(2 * spread)) if spread else 1.0
        if chance < _LEVEL / len(counts[one]) and max(shares) > _FACTOR * min(shares):
            text = f"'{name}' is {shares[0]:.1%} of {one} and {shares[1]:.1%} of {other}"
            yield Finding("shares", _examples(splits, name), text, abs(shares[0] - shares[1]))


def _examples(splits: Mapping[str, Source], name: str) -> tuple[Place, ...]:
    """A few images of a class."""
    found: list[Place] = []
    for split, source in splits.items():
        if name in source.classes:
            label = source.classes.index(name)
            having = source.targets[:, label] if source.kind is Kind.flags else source.targets == label
            found += [Place(split, row) for row in np.flatnonzero(having)[:_SHOWN].tolist()]
    return tuple(found[:_SHOWN])

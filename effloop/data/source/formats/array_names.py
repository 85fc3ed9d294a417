"""Which of several named arrays are the images and the labels of a split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from effloop.data.source.base import USUAL, WHOLE, NoSplitError
from effloop.data.source.storage.imported import ImportedConfig
from effloop.errors import DataError

_IMAGES = frozenset({"image", "images", "img", "imgs", "x", "data", "pixels", "pictures", "photos", "jpeg", "jpegs"})
_LABELS = frozenset({"label", "labels", "lbl", "lbls", "y", "target", "targets", "class", "classes"})
_OTHER = frozenset(
    {"name", "names", "list", "id", "ids", "path", "paths", "mask", "masks", "mean", "std", "shape", "size", "sizes"}
)
"""Words of arrays that say something about images or labels."""
_NAMES = frozenset({"class", "classes", "label", "labels", "category", "categories", "name", "names", "list"})
"""Words of an array with the names of the classes, which has one of the following, too."""
_SEVERAL = frozenset({"classes", "categories", "names", "list"})
_SPLITS = frozenset({"train", "val", "test", *(name for names in USUAL.values() for name in names)})
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z](?![a-z])|\d+")
_LISTED = 16


@dataclass
class ArraysConfig(ImportedConfig):
    """Fields of every source of named arrays.

    Attributes:
        image: name of the arrays of images, such as images; null: images, x, data and the like.
        label: name of the arrays of labels, such as labels; null: labels, y, targets and the like.
        classes: names of the classes, in the order of their labels; null: numbers, or the labels themselves.
    """

    image: str | None = None
    label: str | None = None
    classes: list[str] | None = None


class ArrayNames:
    """The names of all arrays in a dataset; `train/images`, `x_train` or `train.h5/images` say what they are.

    Args:
        names: of the arrays; what is in front of the last `/` names no role.
        where: the dataset, for messages.
        config: may name the arrays.
    """

    def __init__(self, names: Sequence[str], where: str, config: ArraysConfig) -> None:
        self.names, self.where, self.config = names, where, config

    def pair(self, split: str) -> tuple[str, str]:
        """The arrays of images and of labels of a split.

        Raises:
            NoSplitError: there is no such split.
            DataError: it isn't known which arrays these are.
        """
        found = [name for name in self.names if _is_of(name, split)]
        images = _chosen(found, self.config.image, _IMAGES)
        if not images and (splits := self.splits()):
            there = ", ".join(each for each in splits if each != WHOLE) or "none"
            raise NoSplitError(
                f"{self.where} has no split '{split}'; it has {there}: set data.train_split or data.val_split"
            )
        labels = self._labels(found)
        return self._one(images, "images", "image"), self._one(labels, "labels", "label")

    def splits(self) -> list[str]:
        """The splits that there are images of; `.` is one without a name."""
        images = _chosen(self.names, self.config.image, _IMAGES)
        return [*dict.fromkeys("_".join(dict.fromkeys(_split_words(name))) or WHOLE for name in images)]

    def labels(self) -> list[str]:
        """The arrays of labels of all splits."""
        return self._labels(self.names)

    def class_names(self) -> list[str]:
        """Arrays that may hold the names of the classes."""
        own = {name: {*_words(name.rpartition("/")[2])} for name in self.names}
        found = [name for name, words in own.items() if words <= _NAMES and words & _SEVERAL]
        return [name for name in found if name not in self.labels()]

    def _labels(self, names: Sequence[str]) -> list[str]:
        """Those of these arrays that have labels: what is called `classes` only where nothing else is."""
        found = _chosen(names, self.config.label, _LABELS)
        return [name for name in found if {*_words(name.rpartition("/")[2])} != {"classes"}] or found

    def _one(self, found: Sequence[str], what: str, key: str) -> str:
        if len(found) == 1:
            return found[0]
        named = getattr(self.config, key)
        wanted = f"no array '{named}'" if named else f"no array that looks like {what}"
        got = (
            f"several arrays that may be {what}, {_listed(found)}"
            if found
            else f"{wanted}; it has {_listed(self.names)}"
        )
        raise DataError(f"{self.where} has {got}: set data.{key}=NAME")


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name.replace("t10k", "test"))]


def _split_words(name: str) -> list[str]:
    """The words of splits in the last part of a name that has some: `train_val` is neither `train` nor `val`."""
    parts = ([word for word in _words(part) if word in _SPLITS] for part in reversed(name.split("/")))
    return next(filter(None, parts), [])


def _is_of(name: str, split: str) -> bool:
    found, wanted = {*_split_words(name)}, {*_words(split)}
    if split == WHOLE:
        return not found
    usual = wanted & _SPLITS
    return bool(wanted) and wanted <= {*_words(name)} and (not usual or found == usual)


def _chosen(names: Sequence[str], wanted: str | None, role: frozenset[str]) -> list[str]:
    """The arrays with a given name, or else of a role."""
    own = {name: {*_words(name.rpartition("/")[2])} for name in names}
    if wanted is None:
        of_role = [name for name, words in own.items() if words & role and not words & _OTHER]
        return of_role or [name for name in names if {*_words(name)} & role and own[name] <= _SPLITS]
    words = {*_words(wanted)} - _SPLITS
    whole = {name: {*_words(name)} for name in names}
    tiers = (
        [name for name in names if name == wanted],
        [name for name in names if own[name] - _SPLITS == words],
        [name for name in names if words and words <= whole[name]],
    )
    return next(filter(None, tiers), [])


def _listed(names: Sequence[str]) -> str:
    return (", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED:,} more" * (len(names) > _LISTED))) or "none"


def has_split(name: str) -> bool:
    """Whether a file or folder has the name of a usual split in its own."""
    return bool({*_words(name)} & _SPLITS)


def named_after_splits(root: Path, files: Sequence[Path]) -> bool:
    """Whether files in a folder are its dataset: one has the name of a usual split in its own, and no folder has."""
    named = any(has_split(file.stem) for file in files)
    return named and not any((root / split).is_dir() for split in _SPLITS)

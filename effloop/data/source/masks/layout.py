"""Which mask is of which image, and what the values of masks are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from effloop.data.image.mask import MOST_CLASSES, Colour, MaskFormat, check_values
from effloop.data.source.base import NoSplitError, printable
from effloop.data.source.config import DataConfig
from effloop.data.source.folder import ENDINGS, entries, folders
from effloop.data.source.mask_layout import Layout, find_layout, splits_of
from effloop.data.source.storage.columns import is_verified
from effloop.errors import ConfigError, DataError

_NAMED = 3  # of files that have no partner
_LISTS = ("classes.txt", "labels.txt")

USUAL_NAMES = "usual names"
"""What says the names where the folders do."""


@dataclass
class MasksConfig(DataConfig):
    """Fields of `data=masks`.

    Attributes:
        classes: their names, in the order of the values 0, 1, 2, ...; null takes those of `colors`, or of classes.txt
            or labels.txt beside the data, a line each, or else numbers up to the largest value in the masks.
        reduce_zero: 0 isn't counted, and all other values are one less, as ADE20K has it.
        colors: a file with a line `R G B name` for each class of masks in RGB, `R G B -` for what isn't counted.
        index_dir: where the index is kept; null is $XDG_CACHE_HOME/effloop or ~/.cache/effloop.
    """

    classes: list[str] | None = None
    reduce_zero: bool = False
    colors: str | None = None
    index_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes is not None and not 0 < len(self.classes) <= MOST_CLASSES:
            raise ConfigError(f"data.classes: {len(self.classes)} names are not allowed; set 1 to {MOST_CLASSES}")
        if self.classes and (twice := {name for name in self.classes if self.classes.count(name) > 1}):
            raise ConfigError(f"data.classes: '{min(twice)}' comes twice; name each once")


def needed_layout(root: Path, split: str, config: MasksConfig) -> Layout:
    """`find_layout`.

    Raises:
        NoSplitError: the split isn't there.
    """
    if found := find_layout(root, split):
        return found
    have = ", ".join(printable(os.fsencode(name)) for name in splits_of(root)[:8])
    if not have:
        raise NoSplitError(
            f"data.root: '{config.root}' has no images with masks of '{split}' (looked for {split}/images and "
            f"{split}/masks, images/{split} and annotations/{split}, VOC's and Cityscapes' folders); set data.root=PATH"
        )
    fix = "set split to one of them"
    if split in (config.train_split, config.val_split):
        fix = f"set data.{'val_split' if split == config.val_split else 'train_split'}=NAME"
    raise NoSplitError(f"data.root: '{config.root}' has no split '{split}'; it has {have}: {fix}")


def pairs(layout: Layout, visit: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Paths of the images and of their masks, in the images' order.

    Args:
        layout: where they are.
        visit: gets the folders that were read.

    Raises:
        DataError: there are none, an image has no mask or several, a mask no image, or a line names neither.
        OSError: a folder can't be read.
    """
    images = _files(layout.images, layout.image_end, visit)
    masks = _files(layout.masks, layout.mask_end, visit)
    if not masks:
        folder = printable(os.fsencode(layout.masks))
        raise DataError(f"{folder} has no masks; put a PNG of each image's name there, or set data.root=PATH")
    if not images:
        raise DataError(f"{printable(os.fsencode(layout.images))} has no images; set data.root=PATH")
    if layout.listed:
        stems = _listed(layout.listed)
        _refuse((stem for stem in stems if stem not in images), len(stems), layout.listed, layout.images, "image")
        images = {stem: images[stem] for stem in stems}
    _refuse((path for stem, path in images.items() if stem not in masks), len(images), layout.images, layout.masks)
    if not layout.listed:
        lone = (path for stem, path in masks.items() if stem not in images)
        _refuse(lone, len(masks), layout.masks, layout.images, "image")
    return [(path, masks[stem]) for stem, path in images.items()]


def _refuse(names: Iterable[bytes], count: int, of: Path, there: Path, what: str = "mask") -> None:
    """Refuse files without a partner."""
    lone = [*names]
    if lone:
        first = ", ".join(map(printable, lone[:_NAMED])) + (", …" if len(lone) > _NAMED else "")
        raise DataError(
            f"{printable(os.fsencode(of))}: {len(lone):,} of {count:,} have no {what} in "
            f"{printable(os.fsencode(there))}: {first}; add what is missing, or remove what has no {what}"
        )


def _listed(path: Path) -> list[bytes]:
    try:
        stems = [line.strip() for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from None
    if not stems:
        raise DataError(f"{path} names no images; write a name without its extension in each line")
    if len({*stems}) < len(stems):
        twice = next(stem for number, stem in enumerate(stems) if stem in stems[:number])
        raise DataError(f"{path} names {printable(twice)} twice; name each image once")
    return stems


def _files(root: Path, end: str, visit: list[bytes]) -> dict[bytes, bytes]:
    """{what a path has in common with its partner: the path}, in the order of torchvision's ImageFolder."""
    base, ending = os.fsencode(root), os.fsencode(end)
    found: dict[bytes, bytes] = {}
    if not root.is_dir():
        raise DataError(f"{printable(base)} is no folder that is there; set data.root=PATH")
    for folder in sorted(folders(base), key=os.fsdecode):
        visit.append(folder)
        for entry in sorted(entries(folder), key=lambda entry: os.fsdecode(entry.name)):
            dot = entry.name.rfind(b".")
            if entry.name[dot:].lower() not in ENDINGS or entry.is_dir():
                continue
            path = entry.path[len(base) + 1 :]
            stem = path[: path.rfind(b".")]
            if not stem.endswith(ending):
                continue
            stem = stem[: len(stem) - len(ending)]
            if stem in found:
                raise DataError(
                    f"{printable(base)}: {printable(found[stem])} and {printable(path)} differ in their extensions "
                    "only; remove one of the two"
                )
            found[stem] = path
    return found


_COLOUR = re.compile(r"(\d{1,3})[\s,]+(\d{1,3})[\s,]+(\d{1,3})[\s,]+(\S.*)")


def read_colors(path: Path) -> tuple[tuple[Colour, ...], tuple[Colour, ...], tuple[str, ...]]:
    """The colours of the classes, those that aren't counted, and the classes' names, from lines `R G B name`.

    Raises:
        ConfigError: it can't be read.
        DataError: a line is of another form, or a colour or a name comes twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"data.colors: {path} can't be read: {reason}; set data.colors=FILE") from None
    named: dict[Colour, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _COLOUR.fullmatch(line.strip())
        if found is None or max(map(int, found.groups()[:3])) > 255:
            raise DataError(f"{path}, line {number}: '{line[:80]}' is not like `128 64 0 name`; correct it")
        colour = (int(found[1]), int(found[2]), int(found[3]))
        name = found[4].strip()
        if colour in named or (name != "-" and name in named.values()):
            raise DataError(f"{path}, line {number}: '{line[:80]}' has a colour or a name of a line above; correct it")
        named[colour] = name
    classes = {colour: name for colour, name in named.items() if name != "-"}
    if not 0 < len(classes) < MOST_CLASSES:
        raise DataError(f"{path} names {len(classes)} classes; allowed are 1 to {MOST_CLASSES - 1}")
    return tuple(classes), tuple(colour for colour in named if colour not in classes), tuple(classes.values())


class ReadsMasks(Protocol):
    """Options of a source that say how masks are read."""

    classes: list[str] | None
    reduce_zero: bool
    colors: str | None


def format_of(config: ReadsMasks, table: tuple[int, ...] | None = None) -> tuple[MaskFormat, tuple[str, ...]]:
    """How values become classes, and the names that the file of colours gives these, if there is one.

    Args:
        config: of the source.
        table: of `MaskFormat`.

    Raises:
        ConfigError, DataError: that file can't be read.
    """
    if config.colors is None:
        return MaskFormat(config.reduce_zero, table=table), ()
    colours, ignored, names = read_colors(Path(os.path.expanduser(config.colors)))
    return MaskFormat(config.reduce_zero, colours, ignored, table), names[config.reduce_zero :]


def names_of(
    config: ReadsMasks, root: Path, usual: tuple[str, ...], colour_names: tuple[str, ...]
) -> tuple[tuple[str, ...], str]:
    """Names of the classes, and what says so; none where nothing does.

    Args:
        config: of the source.
        root: the folder of the data.
        usual: names that data in such folders usually has.
        colour_names: of the file of colours.

    Raises:
        DataError: a list isn't UTF-8, has an empty line, or has too many.
    """
    if config.classes is not None:
        return tuple(config.classes), "data.classes"
    if colour_names:
        return colour_names, "data.colors"
    for name in _LISTS:
        if (path := root / name).is_file():
            return _names_in(path), name
    return usual, USUAL_NAMES if usual else ""


def numbered(names: tuple[str, ...], told_by: str, largest: int) -> tuple[tuple[str, ...], str]:
    """Names of the classes, and what says so: where nothing does, numbers up to the largest value in the masks."""
    if names:
        return names, told_by
    return tuple(map(str, range(max(1, largest + 1)))), f"the largest value is {largest}"


def refuse_larger(largest: int, names: Sequence[str], told_by: str, path: bytes) -> None:
    """Refuse a mask whose largest value is none of the classes, unless all such masks are to be listed.

    Raises:
        DataError: with its path.
    """
    if is_verified():
        return
    try:
        check_values(largest, len(names))
    except DataError as error:
        wrong = str(error).removeprefix("has a mask with ")
        fix = "name more classes, or correct the mask"
        raise DataError(f"{printable(path)} has {wrong} ({len(names)} classes by {told_by}): {fix}") from None


def _names_in(path: Path) -> tuple[str, ...]:
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"{path} can't be read: {reason}; write a class's name in each line") from None
    while names and not names[-1]:
        names.pop()
    if not names or not all(names) or len({*names}) < len(names) or len(names) > MOST_CLASSES:
        raise DataError(f"{path} has {len(names)} lines, should be 1 to {MOST_CLASSES} with a class's name each, once")
    return tuple(names)

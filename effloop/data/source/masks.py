"""Images and masks in files of their own."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from effloop.data.image import mask as coded
from effloop.data.source.base import USUAL, WHOLE, Kind, NoSplitError, printable, sources
from effloop.data.source.config import DataConfig
from effloop.data.source.root import root_folder
from effloop.data.source.storage import loose
from effloop.data.source.storage.columns import ColumnFile, is_verified
from effloop.data.source.storage.kept import file_state, folder_times
from effloop.data.source.storage.targets import MASKS
from effloop.data.source.tables import shown
from effloop.errors import ConfigError, DataError
from effloop.system.hardware import available_cores, in_threads

_LISTS = ("classes.txt", "labels.txt")
_NAMED = 3  # of files that have no partner
USUAL_NAMES = "usual names"  # what says the names where the folders do

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class MasksConfig(DataConfig):
    """Fields of `data=masks`.

    Attributes:
        classes: their names, in the order of the values 0, 1, 2, ...; null takes those of `colors`, or of classes.txt
            or labels.txt beside the data, a line each, or else numbers up to the largest value in the masks.
        reduce_zero: 0 isn't counted, and all other values are one less, as ADE20K has it.
        colors: a file with a line `R G B name` for each class of masks in RGB, `R G B -` for what isn't counted.
    """

    classes: list[str] | None = None
    reduce_zero: bool = False
    colors: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes is not None and not 0 < len(self.classes) <= coded.MOST_CLASSES:
            raise ConfigError(f"data.classes: {len(self.classes)} names are not allowed; set 1 to {coded.MOST_CLASSES}")
        if self.classes and (twice := {name for name in self.classes if self.classes.count(name) > 1}):
            raise ConfigError(f"data.classes: '{min(twice)}' comes twice; name each once")


# The folders in which images and masks are kept: pairs of them, ADE20K's, VOC's and Cityscapes'.

_MOST_SPLITS = 32
_VOC = Path("ImageSets", "Segmentation")

_CITYSCAPES = (
    *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation"),
    *("terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
_CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
"""Of the 19 classes that are evaluated: github.com/mcordts/cityscapesScripts, helpers/labels.py."""

_VOC_CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


@dataclass(frozen=True)
class Layout:
    """Where the images and masks of a split are."""

    images: Path  # folders; paths in them are alike but for their endings
    masks: Path
    image_end: str = ""  # what follows the common part of a path, without a file's extension
    mask_end: str = ""
    listed: Path | None = None  # a file with the common parts, a line each; None takes all files
    table: tuple[int, ...] | None = None  # of `MaskFormat`
    classes: tuple[str, ...] = ()  # names that are usual for this data


def find_layout(root: Path, split: str) -> Layout | None:
    """Where a split's images and masks are; None if it isn't there."""
    beside = [(f"images/{split}", f"{name}/{split}") for name in ("annotations", "masks")]
    for folder, other in [(f"{split}/images", f"{split}/masks"), *beside]:
        if (root / folder).is_dir() and (root / other).is_dir():
            return Layout(root / folder, root / other)
    if (listed := root / _VOC / f"{split}.txt").is_file():
        return Layout(root / "JPEGImages", root / "SegmentationClass", listed=listed, classes=_VOC_CLASSES)
    images, masks = root / "leftImg8bit" / split, root / "gtFine" / split
    if not (images.is_dir() and masks.is_dir()):
        return None
    if any(masks.glob("*/*_gtFine_labelTrainIds.png")):
        end, table = "_gtFine_labelTrainIds", None
    else:
        labels = {number: label for label, number in enumerate(_CITYSCAPES_IDS)}
        end, table = "_gtFine_labelIds", tuple(labels.get(value, coded.IGNORED) for value in range(256))
    return Layout(images, masks, "_leftImg8bit", end, None, table, _CITYSCAPES)


def splits_of(root: Path) -> list[str]:
    """Names of splits, by the folders and lists that there are."""
    names = {entry.name for entry in os.scandir(root) if entry.is_dir()}
    if len(names) > _MOST_SPLITS:  # they are classes
        names = {"train", "val", "test", *chain(*USUAL.values())} & names
    names |= {path.name for place in ("images", "leftImg8bit") for path in (root / place).glob("[!.]*/")}
    names |= {path.stem for path in (root / _VOC).glob("*.txt")}
    return sorted(name for name in names if name[0] != "." and find_layout(root, name))


def _lacking(root: Path, split: str, config: MasksConfig) -> NoSplitError:
    if have := ", ".join(map(shown, splits_of(root)[:8])):
        return NoSplitError(
            f"data.root: '{config.root}' has no split '{split}'; it has {have}: {config.fix_split(split)}"
        )
    return NoSplitError(
        f"data.root: '{config.root}' has no images with masks of '{split}' (looked for {split}/images and "
        f"{split}/masks, images/{split} and annotations/{split}, VOC's and Cityscapes' folders); set data.root=PATH"
    )


# Which mask is of which image.


def pairs(layout: Layout, visit: list[bytes], kinds: Counter[bytes]) -> list[tuple[bytes, bytes]]:
    """Paths of images and their masks, in the images' order; `visit` gets the folders read, `kinds` counts files."""
    images = _files(layout.images, layout.image_end, visit, kinds)
    masks = _files(layout.masks, layout.mask_end, visit, kinds)
    if not masks or not images:
        folder, what = (layout.images, "images") if masks else (layout.masks, "masks")
        raise DataError(f"{shown(folder)} has no {what}; put some there, or set data.root=PATH")
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
            f"{shown(of)}: {len(lone):,} of {count:,} have no {what} in "
            f"{shown(there)}: {first}; add what is missing, or remove what has no {what}"
        )


def _listed(path: Path) -> list[bytes]:
    stems = [line.strip().encode() for line in _lines(path) if line.strip()]
    if not stems or len({*stems}) < len(stems):
        raise DataError(f"{path} names no images, or one twice; write each name once, without its extension, in a line")
    return stems


def _files(root: Path, end: str, visit: list[bytes], kinds: Counter[bytes]) -> dict[bytes, bytes]:
    """{what a path has in common with its partner: the path}, in the order of torchvision's ImageFolder."""
    base, ending = os.fsencode(root), os.fsencode(end)
    found: dict[bytes, bytes] = {}
    if not root.is_dir():
        raise DataError(f"{printable(base)} is no folder that is there; set data.root=PATH")
    for folder in sorted(loose.folders(base), key=os.fsdecode):
        visit.append(folder)
        for entry in loose.images_in(folder, kinds):
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


# What the values of masks are.

_COLOUR = re.compile(r"(\d{1,3})[\s,]+(\d{1,3})[\s,]+(\d{1,3})[\s,]+(\S.*)")


def read_colors(path: Path) -> tuple[tuple[coded.Colour, ...], tuple[coded.Colour, ...], tuple[str, ...]]:
    """The colours of the classes, those that aren't counted, and the classes' names, from lines `R G B name`."""
    try:
        lines = _lines(path)
    except DataError as error:
        raise ConfigError(f"data.colors: {error}; set data.colors=FILE") from None
    named: dict[coded.Colour, str] = {}
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
    if not 0 < len(classes) < coded.MOST_CLASSES:
        raise DataError(f"{path} names {len(classes)} classes; allowed are 1 to {coded.MOST_CLASSES - 1}")
    return tuple(classes), tuple(colour for colour in named if colour not in classes), tuple(classes.values())


def format_of(config: Any, table: tuple[int, ...] | None = None) -> tuple[coded.MaskFormat, tuple[str, ...]]:
    """How values become classes, and the names that the file of colours gives these, if there is one; by the keys
    `reduce_zero` and `colors` of a config.
    """
    if config.colors is None:
        return coded.MaskFormat(config.reduce_zero, table=table), ()
    colours, ignored, names = read_colors(Path(os.path.expanduser(config.colors)))
    return coded.MaskFormat(config.reduce_zero, colours, ignored, table), names[config.reduce_zero :]


def names_of(
    config: Any, root: Path, usual: tuple[str, ...], colour_names: tuple[str, ...]
) -> tuple[tuple[str, ...], str]:
    """Names of the classes, and what says so; none where nothing does."""
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
    """Refuse a mask whose largest value is none of the classes, unless all such masks are to be listed."""
    if is_verified():
        return
    try:
        coded.check_values(largest, len(names))
    except DataError as error:
        wrong = str(error).removeprefix("has a mask with ")
        fix = "name more classes, or correct the mask"
        raise DataError(f"{printable(path)} has {wrong} ({len(names)} classes by {told_by}): {fix}") from None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"{path} can't be read: {reason}") from None


def _names_in(path: Path) -> tuple[str, ...]:
    names = [line.strip() for line in _lines(path)]
    while names and not names[-1]:
        names.pop()
    if not names or not all(names) or len({*names}) < len(names) or len(names) > coded.MOST_CLASSES:
        most = coded.MOST_CLASSES
        raise DataError(f"{path} has {len(names)} lines, should be 1 to {most} with a class's name each, once")
    return tuple(names)


# What is in each mask.


def look_at_file(path: bytes, form: coded.MaskFormat) -> loose.Looked:
    """What is in a mask: decoded once, whole."""
    try:
        data = loose.read_file(path)
    except DataError as error:
        return loose.Looked(wrong=str(error))
    try:
        mask = coded.decode_mask(data, form)
    except DataError:  # the check before the first step says what is wrong with it
        return loose.Looked()
    return loose.Looked(coded.mask_digest(mask), coded.largest_value(mask))


def in_parallel(items: Iterable[T], look_at: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Each item and what `look_at` made of it, by all cores, in order and in bounded memory."""
    return in_threads(lambda item: (item, look_at(item)), items, available_cores())


@sources.register("masks", MasksConfig)
class MasksSource(loose.LooseSource):
    """Images with a mask each: SPLIT/{images,masks}, or the folders of ADE20K, VOC and Cityscapes."""

    kind = Kind.masks

    def __init__(self, config: MasksConfig, split: str) -> None:
        root = root_folder(config).absolute()
        layout = find_layout(root, split)
        if layout is None:
            raise _lacking(root, split, config)
        form, colour_names = format_of(config, layout.table)
        index = _index(config, root, split, layout, form)
        names, told_by = names_of(config, root, layout.classes, colour_names)
        if told_by in ("", USUAL_NAMES) and not layout.image_end:
            largest = index.meta["largest"]
            for other in {config.train_split, config.val_split or split} - {split}:
                if (there := find_layout(root, other)) is not None:
                    seen = _index(config, root, other, there, format_of(config, there.table)[0])
                    largest = max(largest, seen.meta["largest"])
            names, told_by = numbered(names if len(names) == largest + 1 else (), told_by, largest)
        images, masks = os.fsencode(layout.images), os.fsencode(layout.masks)
        where = f"{printable(images)}:{split}" if layout.listed else printable(images)
        identity = {"root": os.fsencode(layout.images.resolve()).hex()}
        self._open(index, None, loose.Facts(images, where, identity, Kind.masks, names, (), told_by, masks, form))
        refuse_larger(index.meta["largest"], names, told_by, self.mask_path(index.meta["largest_at"]))

    @classmethod
    def claims(cls, root: Path) -> bool:
        return root.is_dir() and any(find_layout(root, split) for split in (*splits_of(root), WHOLE))


def _index(config: MasksConfig, root: Path, split: str, layout: Layout, form: coded.MaskFormat) -> ColumnFile:
    """The index of a split: kept from an earlier look at its masks if none has changed, or from a new one."""
    states = [file_state(layout.listed)] if layout.listed else []
    identity = f"{root.resolve()}\0{split}\0{replace(layout, classes=())}\0{form}"

    def read(folder: Path) -> loose.Listing:
        visited, kinds = list[bytes](), Counter[bytes]()
        images, masks = os.fsencode(layout.images), os.fsencode(layout.masks)
        files, found = loose.Listed(folder=folder, targets=MASKS), pairs(layout, visited, kinds)
        for (image, mask), seen in in_parallel(found, lambda pair: look_at_file(os.path.join(masks, pair[1]), form)):
            files.add(image, 0, loose.size_of(os.path.join(images, image)), target=seen.digest)
            files.add_mask_file(mask, os.path.join(masks, mask), seen)
        times = {each: folder_times(each) for each in visited}
        return files.meta() | {"kinds": loose.kinds_of(kinds)}, {"": files}, times

    of_masks = {"": os.fsencode(layout.masks)}
    return loose.open_listing(config, identity, {"files": states}, "kinds", read, lambda _: of_masks)

"""The folders in which images and masks are kept: pairs of them, ADE20K's, VOC's and Cityscapes'."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from effloop.data.image.mask import IGNORED
from effloop.data.source.base import USUAL, WHOLE

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
    """Where the images and masks of a split are.

    Attributes:
        images, masks: folders; paths in them are alike but for their endings.
        image_end, mask_end: what follows the common part of a path, without a file's extension.
        listed: a file with the common parts, a line each; None takes all files.
        table: of `MaskFormat`.
        classes: names that are usual for this data.
    """

    images: Path
    masks: Path
    image_end: str = ""
    mask_end: str = ""
    listed: Path | None = None
    table: tuple[int, ...] | None = None
    classes: tuple[str, ...] = field(default=())


def find_layout(root: Path, split: str) -> Layout | None:
    """Where a split's images and masks are; None if it isn't there."""
    if (root / split / "images").is_dir() and (root / split / "masks").is_dir():
        return Layout(root / split / "images", root / split / "masks")
    for name in ("annotations", "masks"):
        if (root / "images" / split).is_dir() and (root / name / split).is_dir():
            return Layout(root / "images" / split, root / name / split)
    if (listed := root / _VOC / f"{split}.txt").is_file():
        return Layout(root / "JPEGImages", root / "SegmentationClass", listed=listed, classes=_VOC_CLASSES)
    if (root / "leftImg8bit" / split).is_dir() and (root / "gtFine" / split).is_dir():
        images, masks = root / "leftImg8bit" / split, root / "gtFine" / split
        trained = any(masks.glob("*/*_gtFine_labelTrainIds.png"))
        table = [IGNORED] * 256
        for label, number in enumerate(_CITYSCAPES_IDS):
            table[number] = label
        end = "_gtFine_labelTrainIds" if trained else "_gtFine_labelIds"
        return Layout(images, masks, "_leftImg8bit", end, None, None if trained else tuple(table), _CITYSCAPES)
    return None


def is_masks(root: Path) -> bool:
    """Whether a folder has images and masks in one of the layouts, of any split."""
    if not root.is_dir():
        return False
    return any(find_layout(root, split) for split in (*splits_of(root), WHOLE))


def splits_of(root: Path) -> list[str]:
    """Names of splits, by the folders and lists that there are."""
    names = {path.name for path in _folders(root)}
    if len(names) > _MOST_SPLITS:  # they are classes
        names = {"train", "val", "test", *chain(*USUAL.values())} & names
    places = (root / "images", root / "leftImg8bit")
    names |= {path.name for place in places if place.is_dir() for path in _folders(place)}
    names |= {path.stem for path in (root / _VOC).glob("*.txt")}
    return sorted(name for name in names if find_layout(root, name))


def _folders(place: Path) -> Iterator[Path]:
    with os.scandir(place) as found:
        yield from (Path(entry.path) for entry in found if entry.is_dir() and not entry.name.startswith("."))

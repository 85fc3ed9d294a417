"""Names by which columns, keys and arrays of other people's datasets are recognised, and splits in their names."""

from __future__ import annotations

import re

from effloop.data.source.base import USUAL, WHOLE

IMAGE_PATH = ("file_name", "path", "image", "filename", "id")
"""Columns of paths of images, in any case; of several, the first of these."""

LABEL = ("label", "labels", "class", "target")  # columns of labels; of several, the first of these
MASK_PATH = ("mask", "masks", "mask_path", "segmentation")  # columns of paths of masks
MASK = ("mask", "masks", "annotation", "annotations", "segmentation")  # columns of masks, as images
IMAGE_KEYS = ("image", "img", "data", "image_bytes", "jpg", "jpeg", "png")
LABEL_KEYS = ("label", "labels", "target", "class", "y", "cls")
"""Keys of a sample that is a dict; of several, the first of these."""

IMAGE_WORDS = frozenset(
    {"image", "images", "img", "imgs", "x", "data", "pixels", "pictures", "photos", "jpeg", "jpegs"}
)
LABEL_WORDS = frozenset({"label", "labels", "lbl", "lbls", "y", "target", "targets", "class", "classes"})
OTHER_WORDS = frozenset(
    {"name", "names", "list", "id", "ids", "path", "paths", "mask", "masks", "mean", "std", "shape", "size", "sizes"}
)
"""Words in the name of an array: of images, of labels, and of what describes either."""

GROUP_WORDS = frozenset(
    {"patient", "subject", "person", "participant", "individual", "donor", "animal", "user", "specimen", "case"}
    | {"study", "series", "session", "sequence", "video", "clip", "scene", "burst", "track", "slide", "group"}
)
"""Words of columns that say which samples belong together, besides those of numbers and names."""

_NUMBERS = frozenset({"id", "ids", "uid", "no", "number", "name", "key", "index", "code"})

SPLIT_WORDS = frozenset({"train", "val", "test", *(name for names in USUAL.values() for name in names)})

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z](?![a-z])|\d+")


def words(name: str) -> list[str]:
    """The words of a name, lower-case: `X_trainImages` is x, train, images. MNIST's `t10k` is test."""
    return [word.lower() for word in _WORD.findall(name.replace("t10k", "test"))]


def is_group(name: str) -> bool:
    """Whether a column looks like one that says which samples belong together: `patient_id`, `VideoName`."""
    found = {*words(name)}
    return bool(found & GROUP_WORDS) and found <= GROUP_WORDS | _NUMBERS


def split_of(name: str) -> list[str]:
    """The words of splits in the last part of a name that has some: `a/train_val/x` is neither `train` nor `val`."""
    parts = ([word for word in words(part) if word in SPLIT_WORDS] for part in reversed(name.split("/")))
    return next(filter(None, parts), [])


def is_of_split(name: str, split: str) -> bool:
    """Whether an array, group or file belongs to a split by its name; to `WHOLE` if it has none of any."""
    found, wanted = {*split_of(name)}, {*words(split)}
    if split == WHOLE:
        return not found
    usual = wanted & SPLIT_WORDS
    return bool(wanted) and wanted <= {*words(name)} and (not usual or found == usual)

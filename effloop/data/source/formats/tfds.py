"""What TensorFlow Datasets writes beside its TFRecord files: `features.json`, which describes their features, and
`FEATURE.labels.txt`, the names of the classes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from effloop.errors import DataError

_FEATURES = "features.json"
_KEYS = ("file_name", "filename", "image/filename", "id", "image_id")


class Features(NamedTuple):
    """Names of the features that have the image, the label and, maybe, the key."""

    image: str
    label: str
    key: str


def files_of(folder: Path) -> list[Path]:
    """The files beside the records of a folder that are read."""
    return [file for file in (folder / _FEATURES, *sorted(folder.glob("*.labels.txt"))) if file.is_file()]


def features_of(folder: Path, image: str | None, label: str | None) -> Features | None:
    """The features of a folder that TensorFlow Datasets wrote; None for any other.

    Args:
        folder: it.
        image: the one that is chosen; None looks for the only one of its kind.
        label: the same.

    Raises:
        DataError: it has no single image or label.
    """
    path = folder / _FEATURES
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
        content = found.get("content", found.get("featuresDict"))  # of older releases, as text
        found = (json.loads(content) if isinstance(content, str) else content)["features"]
        kinds = {name: str(feature["pythonClassName"]).rpartition(".")[2] for name, feature in found.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{path} doesn't describe features as TensorFlow Datasets does; remove or correct it") from None
    key = next((name for name in _KEYS if kinds.get(name) == "Text"), "")
    return Features(
        image or _one(kinds, "Image", "image", path), label or _one(kinds, "ClassLabel", "label", path), key
    )


def names_of(folder: Path, label: str) -> list[str] | None:
    """The names of the classes that feature `label` has; None if they aren't there.

    Raises:
        DataError: the file isn't UTF-8.
    """
    path = folder / f"{label}.labels.txt"
    if not path.is_file():
        return None
    try:
        names = (name.strip() for name in path.read_text(encoding="utf-8").split("\n"))
        return [name for name in names if name]  # as TensorFlow Datasets reads them
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,}; write it again") from None


def _one(kinds: dict[str, Any], kind: str, usual: str, path: Path) -> str:
    names = [name for name, found in kinds.items() if found == kind]
    if usual in names:
        return usual
    if len(names) != 1:
        what = ", ".join(names) if names else "none"
        raise DataError(f"{path} has {what} of the kind {kind}; set data=tfrecord data.{usual}=NAME of one feature")
    return names[0]

"""The source whose format `data.root` is in."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from effloop.data.image.header import EXTENSIONS
from effloop.data.source.base import WHOLE, Kind, NoSplitError, ScanError, Source, sources
from effloop.data.source.config import DataConfig
from effloop.data.source.root import expand_root
from effloop.data.source.splits import find_split
from effloop.data.source.storage.kept import opening_once
from effloop.data.source.vocabulary import SPLIT_WORDS
from effloop.errors import ConfigError, DataError

_HUB = re.compile(r"hf://datasets/([^/]+(?:/[^/@]+)?)(?:@([^/]+))?/?")
_KEYS = {"classes", "mask", "reduce_zero", "colors", "images", "image", "label"}  # keys that only some formats have


@dataclass
class AutoConfig(DataConfig):
    """Fields of `data=auto`; an unset `root` means the embedded photographs.

    Attributes:
        targets: what the targets of a table are, as of `data=csv`.
        classes: names of the classes, as of the format that is found.
        mask: column of the masks, as of `data=csv` and `data=parquet`.
        reduce_zero, colors: how masks are read, as of `data=masks`.
        images: the folder that paths of a table are relative to, as of `data=csv`.
        image, label: which columns, arrays, features or extensions are images and targets, as of the format that is
            found; null is its default.
    """

    url_keys = ("root", "images")

    root: str | None = None
    targets: str | None = None
    classes: list[str] | None = None
    mask: str | None = None
    reduce_zero: bool = False
    colors: str | None = None
    images: str | None = None
    image: str | None = None
    label: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if found := _HUB.fullmatch(self.root or ""):
            revision = f" data.revision={found[2]}" if found[2] else ""
            raise ConfigError(
                f"data.root: '{self.root}' is a dataset of Hugging Face's hub; set data=hf data.root={found[1]}"
                f"{revision}"
            )

    def found(self) -> DataConfig:
        name = "embedded" if self.root is None else _format_of(self)
        of = sources[name].config
        known = {field.name for field in fields(of)}
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {key: value for key, value in own.items() if key not in _KEYS or value not in (None, False)}
        for key in sorted(_KEYS & given.keys() - known):
            have = ", ".join(each for each in _formats() if hasattr(sources[each].config, key))
            raise ConfigError(
                f"data.{key}: {given[key]} is for {have}, but the data is data={name}; leave it out, or set "
                f"data.{key}={'false' if key == 'reduce_zero' else 'null'} where a run has it"
            )
        if "label" in given and name != "csv":  # of which alone several columns may be named
            if isinstance(self.label, list):
                raise ConfigError(f"data.label: {self.label} is for tables, but the data is data={name}; set one name")
            given["label"] = str(self.label)
        found = of(**{**{key: value for key, value in given.items() if key in known}, "name": name})
        assert isinstance(found, DataConfig)
        return found


@sources.register("auto", AutoConfig)
def open_source(config: AutoConfig, split: str) -> Source:
    """Whatever format `data.root` has; the embedded photographs if it is unset."""
    return sources.build(config.found(), split)


@opening_once()
def kind_of(config: DataConfig) -> Kind:
    """What the targets of a dataset are; it is opened only if its format leaves that open."""
    config = config.found()
    source = sources[config.name].factory
    if not isinstance(source, type) or not issubclass(source, Source):
        return Kind.classes
    if not source.any_kind:
        return source.kind
    lenient = replace(config, allow_missing_classes=True)  # building will say which classes are missing
    try:
        return find_split(config, "train").kind
    except ScanError:
        raise
    except NoSplitError:
        return sources.build(lenient, WHOLE).kind
    except DataError:
        return find_split(lenient, "train").kind


def _format_of(config: AutoConfig) -> str:
    root = expand_root(config)
    if any(root.glob("*.arrow")) or (root / "dataset_dict.json").is_file():
        raise ConfigError(
            f"data.root: '{config.root}' is what save_to_disk of Hugging Face's datasets wrote, which isn't read; "
            "write each split as parquet, to_parquet('FOLDER/train.parquet'), and set data.root=FOLDER"
        )
    if name := format_of(root):
        return name
    have = ", ".join(_formats())
    raise ConfigError(f"data.root: '{config.root}' is in no format that EffLoop knows; have {have}: set data=FORMAT")


def _formats() -> list[str]:
    return [name for name in sources.names() if name not in ("auto", "embedded", "hf")]


def format_of(root: Path) -> str | None:
    """The name of the source that a path looks like a dataset of; any folder that no other claims is a `folder`."""
    first = _likely(root)
    for name in sorted(sources.names(), key=lambda name: (name != first, name == "folder")):  # which claims any folder
        try:
            if _claims(name, root):
                _check_alone(name, root)
                return name
        except OSError as error:
            raise DataError(f"{error.filename or root} can't be read: {error.strerror}") from None
    return None


_SUFFIXES = {
    ".tar": "tar",
    ".mdb": "lmdb",
    ".lmdb": "lmdb",
    ".parquet": "parquet",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
    ".rec": "recordio",
    ".beton": "beton",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".npz": "npz",
    ".npy": "npz",
    ".pt": "pth",
    ".pth": "pth",
}
_BESIDE = {".index", ".json", ".txt", ".idx", ".lst"}  # of files that may lie beside a format's own
_NOTES = {"", ".md", ".txt"}  # of files that may lie beside folders of classes: a licence, a README


def _likely(root: Path) -> str | None:
    """The format that names of files suggest, which is tried first: those that aren't tried needn't be imported."""
    if root.is_file():
        return _SUFFIXES.get(root.suffix)
    try:
        files, folders = _entries(root)
        if all(file.suffix.lower() in _NOTES for file in files):
            splits = folders and all(path.name in SPLIT_WORDS for path in folders)
            if all(map(_has_classes, folders)) if splits else _has_classes(root):
                return "folder"
        files += [file for folder in islice(folders, 8) for file in _entries(folder, 1000)[0]]
    except OSError:  # which the formats report
        return None
    names = {_SUFFIXES.get(file.suffix) for file in files if file.suffix not in _BESIDE}
    return names.pop() if len(names) == 1 else None


def _has_classes(split: Path) -> bool:
    """Whether a folder has nothing but folders of images, and notes, and they aren't images with masks."""
    files, folders = _entries(split)
    if not folders or any(path.name in ("images", "masks", "annotations") for path in folders):
        return False
    for folder in folders[:8]:
        images, inner = _entries(folder, 1000)
        if inner or not images or not {file.suffix.lower() for file in images} <= EXTENSIONS.keys():
            return False
    return {file.suffix.lower() for file in files} <= _NOTES


def _entries(folder: Path, most: int | None = None) -> tuple[list[Path], list[Path]]:
    """Files and folders in a folder."""
    with os.scandir(folder) as entries:
        found = [(Path(entry.path), entry.is_dir()) for entry in islice(entries, most)]
    return [path for path, is_folder in found if not is_folder], [path for path, is_folder in found if is_folder]


def _claims(name: str, root: Path) -> bool:
    factory = sources[name].factory
    return isinstance(factory, type) and issubclass(factory, Source) and factory.claims(root)


def _check_alone(name: str, root: Path) -> None:
    """Refuse a folder in which torchvision has put CIFAR and MNIST side by side."""
    others = [other for other in ("idx", "pth") if name == "cifar" and _claims(other, root)]
    if others:
        raise ConfigError(
            f"data.root: '{root}' has several datasets, of data={name} and data={others[0]}; set data.root=FOLDER to "
            "one of them, or data=FORMAT"
        )

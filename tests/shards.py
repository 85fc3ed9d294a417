"""Shards of images as others write them, without an index beside them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import yaml
from parquets import SNAPPY, class_label, write_images
from plans import Listed, open_source

from effloop.data.source.storage.writing import Dataset, Record, writers

NAMES = ["a", "b", "c"]


def write_shards(layout: str, photos: Path, folder: Path, count: int = 10) -> Path:
    """The training split in so many files, and the validation split in one."""
    for split, files in (("train", count), ("val", 1)):
        source = open_source("folder", photos, split)
        found = [
            Record(source.raw_key(row).split(b"/")[-1], int(source.labels[row]), bytes(source.read(row)))
            for row in range(len(source))
        ]
        for number in range(files):
            _WRITERS[layout](folder, split, (number, files), found[number::files])
    return folder


def _tar(folder: Path, split: str, place: tuple[int, int], records: list[Record]) -> None:
    """As WebDataset's users have it, with members that nobody asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"pets-{split}-{place[0]:03}.tar", "w") as file:
        for record in records:
            key = record.key.decode().removesuffix(".jpg")
            members = {"cls": b"%d" % record.label, "json": b'{"seen": true}', "jpg": record.data}
            for ending, data in members.items():
                about = tarfile.TarInfo(f"{split}{key}.{ending}")
                about.size = len(data)
                file.addfile(about, io.BytesIO(data))


def _written(name: str, folder: Path, split: str, records: list[Record]) -> Path:
    """The only file of some records in a format that `convert` writes."""
    made = folder.parent / f"{name}-of-{folder.name}"
    writers[name](made, Dataset(NAMES, {split: Listed(records)}, {"payload": "original"}))
    (file,) = [path for path in made.iterdir() if path.name.startswith(split) and path.suffix in (".rec", ".tfrecord")]
    for path in [*made.iterdir()]:
        if path != file:
            path.unlink()
    moved = folder / f"moved-{split}"
    folder.mkdir(parents=True, exist_ok=True)
    file.rename(moved)
    made.rmdir()
    return moved


def _tfrecord(folder: Path, split: str, place: tuple[int, int], records: list[Record]) -> None:
    """Named as by TensorFlow Datasets."""
    number, files = place
    _written("tfrecord", folder, split, records).rename(folder / f"pets-{split}.tfrecord-{number:05}-of-{files:05}")


def _recordio(folder: Path, split: str, place: tuple[int, int], records: list[Record]) -> None:
    name = "training" if split == "train" else split  # as some call it
    _written("recordio", folder, split, records).rename(folder / f"{name}_{place[0]}.rec")


def _parquet(folder: Path, split: str, place: tuple[int, int], records: list[Record]) -> None:
    """As `push_to_hub` of `datasets` has it; names of the files and README.md say what is of which split."""
    number, files = place
    card = {"configs": [{"config_name": "default", "data_files": _splits("train", "validation")}]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    name = f"{'train' if split == 'train' else 'validation'}-{number:05}-of-{files:05}.parquet"
    labels = [record.label for record in records]
    _images(folder / "data" / name, records, labels, feature=class_label(*NAMES))


def _splits(*names: str) -> list[dict[str, str]]:
    return [{"split": name, "path": f"data/{name}-*"} for name in names]


def _texts(folder: Path, split: str, place: tuple[int, int], records: list[Record]) -> None:
    """Parquet with classes as text, which are known when all splits are."""
    _images(folder / split / f"part-{place[0]}.parquet", records, [NAMES[record.label] for record in records])


def _snappy(folder: Path, split: str, place: tuple[int, int], records: list[Record]) -> None:
    labels = [record.label for record in records]
    _images(folder / f"{split}-{place[0]:03}.parquet", records, labels, feature=class_label(*NAMES), **SNAPPY)


def _images(path: Path, records: list[Record], labels: list[object], **options: object) -> None:
    names = [record.key.decode() for record in records]
    write_images(path, [bytes(record.data) for record in records], labels, names=names, **options)


_WRITERS = {
    "tar": _tar,
    "tfrecord": _tfrecord,
    "recordio": _recordio,
    "parquet": _parquet,
    "texts": _texts,
    "snappy": _snappy,
}

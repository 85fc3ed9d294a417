"""Sources and plans for tests of the data path, from the real parts."""

import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from effloop.batch import ImageSize
from effloop.data.augment.base import RecipeConfig
from effloop.data.augment.native.augment import NativeAugment
from effloop.data.decode import Decoder, decoders
from effloop.data.engine import Engine, engines
from effloop.data.order import Order
from effloop.data.plan import Plan
from effloop.data.source import Source, Tail, sources
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, Record, writers

TABLES = ("csv", "tsv", "jsonl", "parquet")  # formats of a table that `data=csv` reads

READ_BY = {"zarr2": "zarr", "n5": "zarr", **{f"table.{ending}": "csv" for ending in TABLES}}
"""Where what `convert to=A` writes, or a table, is read by `data=B`."""


def open_source(name: str, root: Path | None = None, split: str = "train", **options: Any) -> Source:
    """The source that `data=NAME data.root=ROOT` gives."""
    root_option = {} if root is None else {"root": str(root)}
    return sources.build(sources[name].config(name=name, **root_option, **options), split)


class Copied:
    """The samples of an opened split, for a writer."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.num_bytes: int = source.fingerprint()["bytes"]

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Record]:
        for index, label in enumerate(self.source.labels.tolist()):
            yield Record(self.source.raw_key(index), label, self.source.read(index))


class Listed(list[Record]):
    """Records made up by a test, for a writer."""

    @property
    def num_bytes(self) -> int:
        return sum(len(record.data) for record in self)


def write_records(name: str, path: Path, classes: Sequence[str], **splits: Sequence[tuple[Any, ...]]) -> Path:
    """Made-up (key, label, data), and what else a `Record` has, in the format that `convert to=NAME` writes."""
    records = {split: Listed(Record(*record) for record in listed) for split, listed in splits.items()}
    writers[name](path, Dataset(classes, records, {"payload": "original"}))
    return path


def write_as(name: str, root: Path, path: Path, shard_bytes: int = SHARD_BYTES) -> Path:
    """A folder dataset in the format that `convert to=NAME` writes, byte for byte."""
    splits = {split: open_source("folder", root, split) for split in ("train", "val")}
    records = {split: Copied(source) for split, source in splits.items()}
    writers[name](path, Dataset(splits["train"].classes, records, {"payload": "original"}, shard_bytes=shard_bytes))
    return path


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A table in the format that the path's ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif path.suffix == ".parquet":
        arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
        parquet.write_table(arrow.Table.from_pylist([*rows]), path)
    else:
        with open(path, "w", newline="") as file:
            table = csv.DictWriter(file, [*rows[0]], delimiter="\t" if path.suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    return path


def write_table(ending: str, root: Path, folder: Path) -> Path:
    """A table of a folder dataset, in its order: paths, classes, splits."""
    rows = []
    for split in ("train", "val"):
        source = open_source("folder", root, split)
        for index, label in enumerate(source.labels):
            rows.append({"path": source.name(index), "label": source.classes[label], "split": split})
    return write_rows(folder / f"photos.{ending}", rows)


def make_decoder(name: str = "auto", *, region: bool = False, exif: bool = False) -> Decoder:
    """The decoder that `decode=NAME decode.region=REGION decode.exif=EXIF` gives."""
    return decoders.build(decoders[name].config(name=name, region=region, exif=exif))


def make_plan(
    source: Source, decoder: Decoder | None = None, *, train: bool = True, batch: int = 8, size: int = 24, seed: int = 3
) -> Plan:
    """What `build_loader` would put together for a single rank; `decode=auto` unless it gets a decoder."""
    order = Order(len(source), batch, seed if train else None, Tail.drop if train else Tail.pad)
    augment = NativeAugment(native_config(), size=ImageSize.of(size), train=train)
    return Plan(source, decoder or make_decoder(), augment, order, seed)


def native_config(**options: Any) -> RecipeConfig:
    """Random-resized-crop and flip, by EffLoop's own operations."""
    ops = {"crop": {"op": "RandomResizedCrop"}, "flip": {"op": "RandomHorizontalFlip"}}
    return RecipeConfig(name="native", **{"ops": ops, **options})


def make_engine(name: str, plan: Plan, num_workers: int = 0, *, device: str = "cpu", **options: Any) -> Engine:
    """The engine that `engine=NAME num_workers=N` gives; skips the test where its package isn't installed."""
    if name == "dali":
        pytest.importorskip("nvidia.dali")
    config = engines[name].config(name=name, **options)
    return engines.build(config, plan, num_workers=num_workers, device=torch.device(device))


def read_bytes(source: Source, index: int) -> bytes:
    """What a sample's file holds; here, so that a spawned process can import it."""
    return bytes(source.read(index))


def line(text: str) -> str:
    """A pattern for `pytest.raises` that takes this one line and nothing else."""
    return f"^{re.escape(text)}$"


def pairwise(*sides: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few combinations of one value from each side in which any two values of two sides meet: always the same."""

    def pairs(values: Sequence[Any]) -> set[Any]:
        return set(itertools.combinations(enumerate(values), 2))

    combinations = list(itertools.product(*sides))
    missing, chosen = set().union(*map(pairs, combinations)), []
    while missing:
        chosen.append(max(combinations, key=lambda values: len(pairs(values) & missing)))
        missing -= pairs(chosen[-1])
    return chosen

"""Sources and plans for tests of the data path, from the real parts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from effloop.data.augment.native import NativeAugment, NativeConfig
from effloop.data.decode import decoders
from effloop.data.engine import Engine, engines
from effloop.data.plan import Order, Plan
from effloop.data.source import Source, Tail, sources
from effloop.data.source.memmap import write_memmap


def open_source(name: str, root: Path | None = None, split: str = "train", **options: Any) -> Source:
    """The source that `data=NAME data.root=ROOT` gives."""
    root_option = {} if root is None else {"root": str(root)}
    return sources.build(sources[name].config(name=name, **root_option, **options), split)


def to_memmap(root: Path, path: Path) -> Path:
    """A folder dataset as one file of `data=memmap`, byte for byte."""
    splits = {split: open_source("folder", root, split) for split in ("train", "val")}
    records = {
        split: [(os.fsencode(source.key(i)), int(source.labels[i]), bytes(source.read(i))) for i in range(len(source))]
        for split, source in splits.items()
    }
    write_memmap(path, splits["train"].classes, records)
    return path


def make_plan(source: Source, *, train: bool = True, batch: int = 8, size: int = 24, seed: int = 3) -> Plan:
    """What `build_loader` would put together for a single rank."""
    order = Order(len(source), batch, seed if train else None, Tail.drop if train else Tail.pad)
    decoder = decoders.build(decoders["auto"].config(name="auto"))
    return Plan(source, decoder, NativeAugment(NativeConfig(name="native"), size=size, train=train), order, seed)


def make_engine(name: str, plan: Plan, num_workers: int = 0, *, pin_memory: bool = False, **options: Any) -> Engine:
    """The engine that `engine=NAME num_workers=N` gives."""
    return engines.build(
        engines[name].config(name=name, **options), plan, num_workers=num_workers, pin_memory=pin_memory
    )


def read_bytes(source: Source, index: int) -> bytes:
    """What a sample's file holds; here, so that a spawned process can import it."""
    return bytes(source.read(index))


def line(text: str) -> str:
    """A pattern for `pytest.raises` that takes this one line and nothing else."""
    return f"^{re.escape(text)}$"

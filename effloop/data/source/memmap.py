"""EffLoop's own format: every split of a dataset in one file that is opened by mapping it."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from effloop.data.header import Encoded
from effloop.data.source.base import DataConfig, Fingerprint, Source, expand_root, printable, sources
from effloop.data.source.columns import MAGIC, Blobs, ColumnFile, ColumnWriter, smallest_uint
from effloop.errors import ConfigError, DataError

Record = tuple[bytes, int, bytes]
"""(key, label, encoded image)."""


@dataclass
class MemmapConfig(DataConfig):
    """`data=memmap`: nothing beyond what every source has."""


@sources.register("memmap", MemmapConfig)
class MemmapSource(Source):
    """EffLoop's own single file, memory-mapped: all splits, their index and their bytes."""

    def __init__(self, config: MemmapConfig, split: str) -> None:
        self.path = expand_root(config)
        if self.path.is_dir():
            raise ConfigError(f"data.root: '{config.root}' is a folder; data=memmap reads one file: set data.root=FILE")
        self.split = split
        self._open()

    def _open(self) -> None:
        file = ColumnFile(self.path)
        splits = file.meta.get("splits", {})
        if self.split not in splits:
            raise DataError(
                f"{self.path} has no split '{self.split}'; it has {', '.join(splits) or 'none'}: "
                "set data.train_split or data.val_split"
            )
        self.classes = tuple(file.meta["classes"])
        self.labels = file[f"{self.split}/label"]
        self._checksums = file[f"{self.split}/crc32"]
        self._keys = Blobs(file, f"{self.split}/key")
        self._payload = Blobs(file, f"{self.split}/payload")
        self._fingerprint: dict[str, Any] = splits[self.split]
        if not len(self):
            raise DataError(f"{self.where} has no samples; set data.train_split or data.val_split to a split that has")

    @classmethod
    def claims(cls, root: Path) -> bool:
        if not root.is_file():
            return False
        with root.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC

    def read(self, index: int) -> Encoded:
        return self._payload[index]

    def verify(self, index: int) -> None:
        if zlib.crc32(self._payload[index]) != self._checksums[index]:
            raise DataError("is damaged: its bytes don't match their checksum")

    def key(self, index: int) -> str:
        return printable(bytes(self._keys[index]))

    @property
    def where(self) -> str:
        return f"{self.path}:{self.split}"

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "split": self.split, "fingerprint": self._fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.split = state["path"], state["split"]
        self._open()
        self.check_unchanged(state["fingerprint"])


def write_memmap(path: Path, classes: Sequence[str], splits: Mapping[str, Iterable[Record]]) -> None:
    """Write a dataset that `data=memmap` reads, atomically: absent or complete.

    Args:
        path: the file to write.
        classes: class names, in the order of their labels.
        splits: split name -> its records, in the order of their ids. The payload is streamed.

    Raises:
        DataError: a label that no class has; the message names the record.
    """
    fingerprints: dict[str, dict[str, Any]] = {}
    with ColumnWriter(path, {"classes": list(classes), "splits": fingerprints}) as writer:
        for split, records in splits.items():
            keys, labels, checksums, fingerprint = [], array("I"), array("I"), Fingerprint()
            with writer.blobs(f"{split}/payload") as append:
                for key, label, data in records:
                    if not 0 <= label < len(classes):
                        raise DataError(
                            f"{split}/{printable(key)} has the label {label}; allowed are 0 to {len(classes) - 1}"
                        )
                    append(data)
                    keys.append(key)
                    labels.append(label)
                    checksums.append(zlib.crc32(data))
                    fingerprint.add(key, label, len(data))
            with writer.blobs(f"{split}/key") as append:
                for key in keys:
                    append(key)
            writer.add(f"{split}/label", np.frombuffer(labels, np.uint32).astype(smallest_uint(len(classes) - 1)))
            writer.add(f"{split}/crc32", np.frombuffer(checksums, np.uint32))
            fingerprints[split] = fingerprint.result()

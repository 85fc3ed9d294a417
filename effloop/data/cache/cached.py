"""Samples kept in memory, one copy per machine: their encoded bytes, or their decoded pixels."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray
from rich.filesize import decimal

from effloop.data.cache.shared_memory import FOLDER, Region, table_bytes
from effloop.data.decode import DecodeConfig, Decoder
from effloop.data.image.header import Encoded, pnm_header
from effloop.data.source import Cache, Source
from effloop.errors import ConfigError, DataError
from effloop.system.hardware import available_memory


class CachedSource(Source):
    """A source that reads each sample once per machine, as far as the memory goes.

    Args:
        source: what is kept.
        kind: the encoded bytes, or the decoded pixels as a raw image (`header.pnm_header`), which every
            decoder takes as a view.
        decoder: who makes pixels of bytes.
        room: bytes for samples; asked only if no process of this machine keeps them yet.
        folder: of a file system in memory.
    """

    def __init__(
        self, source: Source, kind: Cache, decoder: Decoder, room: Callable[[], int], folder: Path = FOLDER
    ) -> None:
        self.source, self.kind, self.decoder, self.folder = source, kind, decoder, folder
        self._name = _name(source, kind, decoder)
        self._open(room)

    def _open(self, room: Callable[[], int]) -> None:
        self.classes, self.labels = self.source.classes, self.source.labels
        self.region = Region(self._name, len(self.source), room, self.folder)

    @property
    def targets(self) -> NDArray[Any]:
        return self.source.targets

    def read(self, index: int) -> Encoded:
        kept = self.region.get(index)
        if kept is not None:
            return kept
        data = self.source.read(index)
        if self.kind is Cache.bytes:
            self.region.put(index, [data])
            return data
        pixels = np.ascontiguousarray(self.decoder.decode(data))
        height, width, channels = pixels.shape
        header, body = pnm_header(height, width, channels), pixels.reshape(-1).data
        self.region.put(index, [header, body])
        return self.region.get(index) or b"".join((header, body))

    def describe(self) -> str:
        """One line for people: how much memory for how much data."""
        return f"{self.kind.value}, room for {decimal(self.region.num_bytes)} in {self.folder}"

    def raw_key(self, index: int) -> bytes:
        return self.source.raw_key(index)

    def size(self, index: int) -> int:
        return self.source.size(index)

    def will_need(self, indices: Sequence[int]) -> None:
        self.source.will_need([index for index in indices if self.region.get(index) is None])

    @property
    def where(self) -> str:
        return self.source.where

    def fingerprint(self) -> dict[str, Any]:
        return self.source.fingerprint()

    def identity(self) -> dict[str, Any]:
        return self.source.identity()

    @property
    def has_checksums(self) -> bool:
        return self.source.has_checksums

    def verify(self, index: int) -> None:
        self.source.verify(index)

    def verify_index(self) -> None:
        self.source.verify_index()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("source", "kind", "decoder", "folder", "_name")}
        return {**state, "num_bytes": self.region.num_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        num_bytes: int = state.pop("num_bytes")
        self.__dict__.update(state)
        self._open(lambda: num_bytes)


_LAYOUT = 1  # of what a region holds; another EffLoop's may differ


def _name(source: Source, kind: Cache, decoder: Decoder) -> str:
    """What is kept, in 16 hex digits: which data, as it is now, and what became of it."""
    identity: dict[str, Any] = {"data": source.identity(), "kind": kind.value, "layout": _LAYOUT}
    if kind is Cache.pixels:
        identity["decoder"] = _identity_of(decoder)
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _identity_of(decoder: Decoder) -> dict[str, Any]:
    """What its pixels hang on: its class, its options, the packages behind it in their versions."""
    identity: dict[str, Any] = {"class": type(decoder).__qualname__, "PIL": PIL.__version__}  # Pillow judges for all
    for name, part in vars(decoder).items():
        if isinstance(part, Decoder):
            identity[name] = _identity_of(part)
        elif isinstance(part, ModuleType):
            identity[name] = [part.__name__, getattr(part, "__version__", None)]
        elif isinstance(part, DecodeConfig):
            identity[name] = repr(part)
    return identity


_LOOKED_AT = 2000
_SLACK = 1.05  # what an estimate from 2,000 sizes may be below the truth


def cached(
    source: Source, kind: Cache, decoder: Decoder, limit: float | None, *, share: float = 1.0, folder: Path = FOLDER
) -> Source:
    """`source`, or one that keeps it in memory; where another process keeps it already, that memory.

    Args:
        source: whose samples are read.
        kind: what is kept.
        decoder: who makes pixels of bytes.
        limit: bytes for all splits together; None is half of the memory that is free.
        share: this split's part of it.
        folder: of a file system in memory.

    Raises:
        ConfigError: too little memory, or no folder for it.
    """
    if kind is Cache.none:
        return source

    def room() -> int:
        total = source.fingerprint()["bytes"] if kind is Cache.bytes else _bytes_of_pixels(source, decoder)
        return int(min(total, _allowed(len(source), limit, share, folder)))

    return CachedSource(source, kind, decoder, room, folder)


def _allowed(samples: int, limit: float | None, share: float, folder: Path) -> float:
    """Bytes that samples may take."""
    status = os.statvfs(folder)
    free = min(available_memory(), status.f_bavail * status.f_frsize)
    there, needed = min(free * 0.5 if limit is None else limit, free * 0.9) * share, table_bytes(samples)
    if there <= needed:
        raise ConfigError(
            f"data.cache_gb: {decimal(int(there))} is too little for {samples:,} samples: their index alone takes "
            f"{decimal(needed)}; {decimal(free)} of memory are free; set data.cache=none or data.cache_gb higher"
        )
    return there - needed


def _bytes_of_pixels(source: Source, decoder: Decoder) -> int:
    """What all samples take when decoded: exact up to 2,000 of them, else a little more than it.

    What can't be read takes nothing; whoever needs it will say so, with its name.
    """
    count = len(source)
    ids = np.unique(np.linspace(0, count - 1, min(_LOOKED_AT, count)).astype(np.int64)).tolist()
    sizes = []
    for sample in ids:
        with suppress(DataError):
            height, width = decoder.size(source.read(sample))
            sizes.append(3 * height * width + len(pnm_header(height, width, 3)))
    if len(ids) == count or not sizes:
        return sum(sizes)
    return int(sum(sizes) / len(sizes) * count * _SLACK)

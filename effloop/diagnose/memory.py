"""What a run takes of the machine's memory, part by part, and what is there for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from rich.filesize import decimal
from rich.table import Table

from effloop.config import Config
from effloop.data.cache.shared_memory import FOLDER

Place = Literal["host", "gpu"]

_SHORT: dict[Place, tuple[str, str]] = {
    "host": ("memory", "the machine may swap or end the run"),
    "gpu": ("the GPU's memory", "the run may fail"),
}

_FULL = 0.9
"""Share of what is free that a run may take without a warning: that much the estimate may be wrong by."""


@dataclass(frozen=True)
class Tensors:
    """A part of a batch.

    Attributes:
        name: images, targets, ids or valid.
        dtype: as torch and NumPy call it, e.g. uint8.
        shape: its sizes.
        bytes: of all its numbers.
    """

    name: str
    dtype: str
    shape: list[int]
    bytes: int

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: str) -> Tensors:
        """Those of a shape; `dtype` as torch calls it."""
        size: torch.dtype = getattr(torch, dtype)
        return cls(name, dtype, [*shape], math.prod(shape) * size.itemsize)


@dataclass(frozen=True)
class Part:
    """A part of what a run takes, in each rank.

    Attributes:
        name: of the part.
        place: where it is.
        bytes: its size.
        detail: how the size comes about.
        there: whether it is allocated already.
        shared: whether all ranks of the machine share it.
        in_shm: whether it is in /dev/shm.
        by_batch: whether it grows with `batch_size`.
        wanted: bytes that it would take if there were room for more; 0 is as many as it has.
    """

    name: str
    place: Place
    bytes: int
    detail: str = ""
    there: bool = False
    shared: bool = False
    in_shm: bool = False
    by_batch: bool = False
    wanted: int = 0


@dataclass(frozen=True)
class Memory:
    """What a run takes, and what is free.

    Attributes:
        parts: all of it.
        batch: of the training split, on the `host` and on the `device`.
        free: bytes that are free now: of the `host`, of `shm` (/dev/shm, a part of the host's), and of the `gpu` if
            there is one.
        page_cache: bytes of the dataset's files, which the kernel keeps as long as nothing else needs the memory.
        ranks: of the run on this machine.
        measured: whether steps were measured; otherwise it is estimated from one image.
    """

    parts: Sequence[Part]
    batch: Mapping[str, Sequence[Tensors]]
    free: Mapping[str, int]
    page_cache: int
    ranks: int = 1
    measured: bool = False

    def total(self, place: Place) -> int:
        """Bytes of all ranks of this machine, for each GPU those of one."""
        return self._sum(place, self.parts)

    def capacity(self, place: Place) -> int:
        """Bytes that there are for the run: what is free, and what it has already."""
        return self.free.get(place, 0) + self._sum(place, [part for part in self.parts if part.there])

    def _sum(self, place: Place, parts: Sequence[Part]) -> int:
        ranks = self.ranks if place == "host" else 1
        return sum(part.bytes * (1 if part.shared else ranks) for part in parts if part.place == place)

    def line(self) -> str:
        """For the log: what the run will take of what is free."""
        found = []
        for place in self.places:
            where = " on the GPU" * (place == "gpu")
            largest = sorted(self._of(place), key=lambda part: -part.bytes)[:3]
            parts = ", ".join(f"{part.name} {decimal(part.bytes)}" for part in largest if part.bytes)
            found.append(f"about {decimal(self.total(place))} of {decimal(self.capacity(place))}{where} ({parts})")
        return f"memory {'; '.join(found)}"

    @property
    def places(self) -> list[Place]:
        """`host`, and `gpu` if the run is on one."""
        return ["host", "gpu"] if "gpu" in self.free else ["host"]

    def _of(self, place: Place) -> list[Part]:
        return [part for part in self.parts if part.place == place]

    def warnings(self, config: Config) -> Iterator[str]:
        """A line for each place that hasn't enough."""
        for part in self.parts:
            if config.data.cache_gb is None and part.bytes < _MOST_OF_IT * part.wanted:
                yield (
                    f"data.cache: {decimal(part.bytes)} are left for the {part.name}, half of what is free in memory "
                    f"and {FOLDER}, and all images need about {decimal(part.wanted)}; the rest is loaded again in "
                    f"each epoch; free some memory, or set data.cache_gb={1.1 * part.wanted / 1e9:.2g} if that is free"
                )
        for place in self.places:
            total, there = self.total(place), self.capacity(place)
            if total > _FULL * there:
                where, end = _SHORT[place]
                each = f" for {self.ranks} ranks" * (self.ranks > 1 and place == "host")
                yield (
                    f"batch_size: {config.batch_size} needs about {decimal(total)} of {where}{each}, where "
                    f"{decimal(there)} are free, and {end}; {self._fix(config, place)}"
                )

    def _fix(self, config: Config, place: Place) -> str:
        """What to set so that it fits."""
        ranks = self.ranks if place == "host" else 1
        by_batch = ranks * sum(part.bytes for part in self._of(place) if part.by_batch)
        left = _FULL * self.capacity(place) - (self.total(place) - by_batch)
        smaller = int(config.batch_size * left / by_batch) if by_batch else 0
        if smaller >= 1:
            images = config.batch_size * config.accumulate
            size = next(each for each in range(smaller, 0, -1) if images % each == 0)
            return f"set batch_size={size}, and accumulate={images // size} for updates of as many images"
        largest = max(self._of(place), key=lambda part: part.bytes)
        return f"most of it is its {largest.name}, whatever the batch; " + (
            "set data.cache=none" if any(part.in_shm for part in self._of(place)) else "choose a smaller model"
        )

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for JSON and for `memory_table`."""
        return {
            "parts": [asdict(part) for part in self.parts],
            "batch": {where: [asdict(each) for each in found] for where, found in self.batch.items()},
            "total": {place: self.total(place) for place in self.places},
            "capacity": {place: self.capacity(place) for place in self.places},
            "free": dict(self.free),
            "page_cache": self.page_cache,
            "ranks": self.ranks,
            "measured": self.measured,
        }


_MOST_OF_IT = 0.7
"""Share of the dataset in a cache from which nothing is said: the size of all images is estimated from a few."""


def memory_table(memory: Mapping[str, Any]) -> Table:
    """The table of a `Memory` as plain values: a row for each part, and what is free."""
    table = Table(title="memory" if memory["measured"] else "memory, estimated")
    for heading in ("where", "what"):
        table.add_column(heading, no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("of which")
    for place, name in (("host", "host"), ("gpu", "GPU")):
        parts = [part for part in memory["parts"] if part["place"] == place]
        for part in parts:
            where = str(FOLDER) if part["in_shm"] else name
            table.add_row(where, part["name"], decimal(part["bytes"]), part["detail"])
        if parts:
            each = f"{memory['ranks']} ranks; " * (memory["ranks"] > 1 and place == "host")
            there = decimal(memory["capacity"][place])
            table.add_row(
                name, "all", decimal(memory["total"][place]), f"{each}of {there}", style="bold", end_section=True
            )
    for where, tensors in memory["batch"].items():
        for each in tensors:
            form = f"{each['dtype']}, {' x '.join(map(str, each['shape']))}"
            table.add_row(f"batch, {where}", each["name"], decimal(each["bytes"]), form)
    table.add_section()
    table.add_row("page cache", "dataset", decimal(memory["page_cache"]), "the kernel's, while there is room")
    table.add_row(str(FOLDER), "free", decimal(memory["free"]["shm"]), "a part of the host's memory")
    return table

"""What each card can do at most, by its data sheet: its memory, and how fast it computes and reads."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from effloop.errors import ConfigError

_UNSAID = {"nvidia", "geforce", "tesla", "rtx", "gb", "gpu"}  # words that tell no card from another


@dataclass(frozen=True)
class Card:
    """A GPU. Tensor cores are without sparsity, and add in float32, as torch has them do."""

    name: str  # short, such as "rtx3090"
    title: str  # the maker's, with what a short name leaves open
    memory: int  # bytes, as torch has its `total_memory`
    bandwidth: float  # bytes/s of its memory
    fp32: float  # FLOP/s without tensor cores
    tf32: float  # FLOP/s of tensor cores for float32; 0 is none
    fp16: float  # FLOP/s of tensor cores
    bf16: float  # FLOP/s of tensor cores; 0 is none
    link: float  # bytes/s to another card in each direction, by NVLink of SXM boards, else by PCIe
    capability: tuple[int, int]  # CUDA's compute capability
    year: int
    source: str  # URL


def _read(row: Mapping[str, str]) -> Card:
    """A row of the table, which has MiB, GB/s and TFLOP/s."""
    major, minor = row["capability"].split(".")
    return Card(
        name=row["name"],
        title=row["title"],
        memory=int(row["memory"]) * 2**20,
        capability=(int(major), int(minor)),
        year=int(row["year"]),
        source=row["source"],
        **{key: float(row[key]) * 1e9 for key in ("bandwidth", "link")},
        **{key: float(row[key]) * 1e12 for key in ("fp32", "tf32", "fp16", "bf16")},
    )


with (files("effloop.plan") / "cards.csv").open(encoding="utf-8") as _table:
    cards: Mapping[str, Card] = {row["name"]: _read(row) for row in csv.DictReader(_table)}


def _words(text: str) -> set[str]:
    return {*re.findall(r"[a-z]+|\d+", text.lower().replace("rtx", " "))} - _UNSAID


def of_device(title: str) -> Card | None:
    """The card that torch or its maker calls so: all words of its short name, and no others than those of its title."""
    words = _words(title)
    return next((card for card in cards.values() if _words(card.name) <= words <= _words(card.title)), None)


def find(name: str) -> Card:
    """The card that somebody calls so, as in "H100", "rtx 3090" or "NVIDIA A100-SXM4-40GB".

    Raises:
        ConfigError: there is none in the table.
    """
    if card := of_device(name):
        return card
    near = difflib.get_close_matches(name.lower().replace(" ", ""), cards, n=4, cutoff=0)
    raise ConfigError(f"gpu: '{name}' is not in the table of {len(cards)} cards; the nearest names: {', '.join(near)}")

"""A run on GPUs that aren't here: what fits, how fast it trains, what binds, what it costs, and what would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Data:
    """What a run trains on."""

    images: int  # that an epoch trains on
    val_images: int  # of an evaluation; 0 where that isn't known
    outputs: int  # of the model
    where: str = ""  # what is read; empty of data that isn't on this machine


@dataclass(frozen=True)
class Loading:
    """What loading takes on this machine, as measured."""

    images_per_s: float  # by all its cores
    core_s: float  # seconds that a core computes for an image
    cores: int  # of this machine


@dataclass(frozen=True)
class CardPlan:
    """A run on one kind of GPU. Images/s are of all its GPUs together, memory and batches of one.

    Where `batch` doesn't fit, speed, hours and cost are those of `largest_batch`; where not even one image fits, that
    is 0, and so are they.
    """

    card: str  # its short name, such as h100
    title: str  # NVIDIA's name
    capacity: int  # bytes of its memory
    precision: str  # that it computes in: float32, tf32, bfloat16 or float16
    batch: int  # images of a GPU's batch, as configured
    accumulate: int  # batches of an update
    fits: bool  # whether that batch does
    memory: Mapping[str, int]  # part -> its bytes at that batch
    peak_bytes: int  # their sum
    peak_range: tuple[int, int]  # bytes
    largest_batch: int  # images that fit
    largest_range: tuple[int, int]  # images
    saturating_batch: int  # the smallest of `curve` whose images/s are within 5 % of the largest one's
    curve: Sequence[tuple[int, float]]  # images of a GPU's batch, images/s of the step
    images_per_s: float  # of the step
    images_per_s_range: tuple[float, float]
    step_s: Mapping[str, float]  # kind of operation -> its seconds in the step of a batch
    cores: float  # that have to load to feed these GPUs; 0 where loading wasn't measured
    binds: Literal["step", "loader"]  # what the run's speed is, with the cores of this machine
    hours: float  # of the run, with evaluations, by what binds
    hours_range: tuple[float, float]
    evaluation_hours: float  # of these
    cost: float  # of all GPUs for these hours, in the currency of the price; 0 without one


@dataclass(frozen=True)
class Advice:
    """An override that would help, and what it brings on the first card."""

    override: str  # words for the command line, or a command
    why: str  # a few words
    brings: str  # in words, such as `1.9 x images/s`
    images_per_s: float  # of what binds then, of all GPUs; 0 where that isn't predicted
    largest_batch: int  # then; 0 where that isn't predicted


@dataclass(frozen=True)
class Plan:
    """A run on GPUs that aren't here."""

    facts: Mapping[str, Any]  # of the config, what the figures depend on
    gpus: int  # that it is trained on
    data: Data
    loading: Loading | None  # None where the data isn't here
    cards: Sequence[CardPlan]  # in the order in which they were asked for
    advice: Sequence[Advice]  # the best first
    notes: Sequence[str]  # lines for users

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

"""Targets: what a task asks of a data source, and what one of a sample is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class TargetSpec:
    """What a sample's target is.

    Attributes:
        shape: of one sample's target: () for a class or a number, (K,) for several flags or numbers, (H, W) for a mask.
        dtype: on the device; a class is int64 there, as torch's losses want it, and a mask uint8.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64


class Labelled(Protocol):
    """What a task asks of a data source.

    Attributes:
        kind: an Enum: its value is classes, flags, numbers or masks.
        classes: names of the classes, in the order of their labels or flags; empty where targets are numbers.
        target_names: names of the K outputs: the classes, or of each of the numbers.
        targets: (N, ...) one target for each sample: (N,) classes, (N, K) uint8 flags, (N, K) float32 numbers; of
            masks, which are read with the images, (N, 0).
    """

    @property
    def kind(self) -> Any: ...

    @property
    def classes(self) -> Sequence[str]: ...

    @property
    def target_names(self) -> Sequence[str]: ...

    @property
    def targets(self) -> NDArray[Any]: ...

    @property
    def where(self) -> str: ...

"""Interface of export formats, and the metadata that they keep."""

from __future__ import annotations

import json
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from effloop.errors import CheckpointError, ConfigError, EffLoopError

VERSION = 1
"""Version of the metadata."""


def write(metadata: Mapping[str, Any]) -> str:
    """Metadata as text."""
    return json.dumps(metadata, ensure_ascii=False)


def read(text: str | None, path: Path) -> dict[str, Any]:
    """Metadata of a file.

    Raises:
        CheckpointError: it has none, or some of another version.
    """
    try:
        found = json.loads(text or "null")
        version = found["version"]
        complete = {"config", "classes", "num_outputs", "provenance", "input"} <= set(found)
    except (ValueError, TypeError, LookupError):
        raise CheckpointError(f"{path} has no metadata of EffLoop's; name a file by effloop export") from None
    if version != VERSION or not complete:
        raise CheckpointError(
            f"{path} has metadata of version {version}, this EffLoop reads {VERSION}; export it again"
        )
    return dict(found)


KEY = "effloop"
"""Under which a file keeps its metadata."""

INPUT, OUTPUT = "images", "outputs"
"""Names of a model's input and output, where a format has names."""

F = TypeVar("F", bound="type[Format]")


@dataclass(frozen=True)
class Format(ABC):
    """Writes a model to a file, and runs it from there.

    A model takes (N, 3, H, W) float32 images, normalised, and gives (N, K) float32 outputs, whatever it computes in.

    Attributes:
        dynamic: whether the file takes batches of any size; else of the example's.
        half: whether weights are stored, and in some formats computed, in float16.
        suffix: of the file's name.
        runtime: what runs the file.
        fuses: whether the model is re-parameterised and its BatchNorm fused before.
        int8: whether it can be quantized.
    """

    dynamic: bool = True
    half: bool = False

    suffix: ClassVar[str]
    runtime: ClassVar[str]
    fuses: ClassVar[bool] = True
    int8: ClassVar[bool] = False

    @abstractmethod
    def convert(self, model: nn.Module, example: Tensor) -> Any:
        """The model as what `save` writes; `model` is on the CPU, and may be changed."""

    def quantize(self, program: Any, batches: Iterable[Tensor]) -> Any:
        """A converted model with int8 weights and activations, calibrated on some batches."""
        raise NotImplementedError

    @abstractmethod
    def save(self, program: Any, path: Path, metadata: str) -> None:
        """Write what `convert` or `quantize` gave."""

    @abstractmethod
    def read_metadata(self, path: Path) -> str | None:
        """The metadata of a file; None if it has none."""

    @abstractmethod
    def open(self, path: Path, device: torch.device, network: Callable[[], nn.Module]) -> nn.Module:
        """The model in a file: (N, 3, H, W) float32 on any device -> (N, K) float32 there.

        Args:
            path: what `save` has written.
            device: where to compute, if the runtime can.
            network: builds the model as it was before training, for a format that has only weights.
        """

    @classmethod
    def files(cls, path: Path) -> tuple[Path, ...]:
        """All files that `save` writes for a path, that path first."""
        return (path,)


formats: dict[str, type[Format]] = {}
"""Formats by the names that `export to=` takes."""


def register_format(name: str) -> Callable[[F], F]:
    """Decorator: the class below is the format of `export to=NAME`."""

    def add(kind: F) -> F:
        if name in formats:
            raise ValueError(f"a format '{name}' is registered already")
        formats[name] = kind
        return kind

    return add


def format_of(path: Path) -> type[Format] | None:
    """The format that a file's name ends like."""
    return {kind.suffix: kind for kind in formats.values()}.get(path.suffix)


@contextmanager
def one_line_errors(doing: str) -> Iterator[None]:
    """Silences exporters and runtimes, and makes their errors one line.

    Raises:
        ConfigError: with the reason that the package gives.
    """
    disabled = logging.root.manager.disable
    try:
        with open(os.devnull, "w") as void, redirect_stdout(void), redirect_stderr(void), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.ERROR)
            yield
    except (EffLoopError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # of several packages, of any kind
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # OpenVINO's first lines are places in its sources.
        line = "no reason given" if not lines else lines[-1 if lines[0].startswith("Exception from ") else 0]
        raise ConfigError(f"{doing}: {type(error).__name__}: {line}") from error
    finally:
        logging.disable(disabled)

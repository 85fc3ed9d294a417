"""Options of what is done with trained models, without torch, for the command line's help."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from effloop.errors import ConfigError

Average = Literal["probabilities", "logits"]  # what several models have the mean of
Id = Literal["path", "name", "stem"]  # what a table calls an image: its path, file name, or that without the extension
FORMATS = ("pt2", "onnx", "openvino", "state_dict")  # of exported files


@dataclass(frozen=True)
class ExportOptions:
    """Options of `export`.

    Attributes:
        to: the format.
        out: the file; without it model.SUFFIX in the run folder, or model_int8.SUFFIX or model_half.SUFFIX.
        int8: quantize weights and activations to 8 bits, statically, by the ranges that training images give.
        half: store weights, and in some formats compute, in float16; input and output stay float32.
        batch: how many images the file takes at once; dynamic is any number.
        calibrate: how many training images int8 is calibrated by.
        parity: how many images of the validation split, spread evenly over it, the file is checked on; all is all.
    """

    to: Annotated[str, FORMATS]
    out: Path | None = None
    int8: bool = False
    half: bool = False
    batch: Literal["dynamic"] | Annotated[int, range(1, 65_537)] = "dynamic"
    calibrate: Annotated[int, range(1, 1_000_001)] = 256
    parity: Literal["all"] | Annotated[int, range(1, 1_000_000_001)] = "all"

    def __post_init__(self) -> None:
        from effloop.inference.formats import formats  # torch takes seconds to import, and help needs none of it

        kind = formats[self.to]
        if self.int8 and self.half:
            raise ConfigError("half: contradicts int8, whose weights have 8 bits; drop one of them")
        if self.int8 and not kind.int8:
            able = " or ".join(name for name, each in formats.items() if each.int8)
            raise ConfigError(f"int8: to={self.to} has no static quantization; set to={able}")
        if self.batch != "dynamic" and not kind.fuses:
            raise ConfigError(f"batch: to={self.to} has weights only, for batches of any size; leave batch out")
        if self.out is not None and self.out.suffix != kind.suffix:
            raise ConfigError(f"out: {self.out} would not be found to be {self.to}; set out=FILE{kind.suffix}")
        if self.out is not None:
            folder = self.out.absolute().parent
            if not (folder.is_dir() and os.access(folder, os.W_OK)):
                raise ConfigError(f"out: {self.out} can't be written, {folder} is no folder to write to; set out=FILE")
            if taken := next((file for file in kind.files(self.out) if file.is_dir()), None):
                raise ConfigError(f"out: {taken} is a folder; set out=FILE{kind.suffix} to another name")

    @property
    def fixed(self) -> int | None:
        """Batch size of the file; None is any number."""
        return self.batch if isinstance(self.batch, int) else None

"""`effloop export`: a trained model as a file for other programs, kept only if it gives what the model gives."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from effloop.data.source import Source
from effloop.errors import ConfigError, ParityError
from effloop.inference import metadata
from effloop.inference.fixed import FixedBatch
from effloop.inference.formats import Format, formats, one_line_errors
from effloop.inference.formats.metadata import write
from effloop.inference.fuse import simplify
from effloop.inference.parity import Parity, compare
from effloop.inference.trained import Trained
from effloop.system.hardware import has_vnni

_SAME = 1e-4
"""Difference of a file's outputs from its own in another reading, as a share of the largest."""


@dataclass(frozen=True)
class ExportOptions:
    """How a model is exported.

    Attributes:
        to: the format.
        out: the file; without it model.SUFFIX in the run folder, or model_int8.SUFFIX or model_half.SUFFIX.
        int8: quantize weights and activations to 8 bits, statically, by the ranges that training images give.
        half: store weights, and in some formats compute, in float16; input and output stay float32.
        batch: how many images the file takes at once; dynamic is any number.
        calibrate: how many training images int8 is calibrated by.
        parity: how many images of the validation split, spread evenly over it, the file is checked on; all is all.

    Raises:
        ConfigError: options contradict each other or the format, or `out` can't be written.
    """

    to: Annotated[str, formats]
    out: Path | None = None
    int8: bool = False
    half: bool = False
    batch: Literal["dynamic"] | Annotated[int, range(1, 65_537)] = "dynamic"
    calibrate: Annotated[int, range(1, 1_000_001)] = 256
    parity: Literal["all"] | Annotated[int, range(1, 1_000_000_001)] = "all"

    def __post_init__(self) -> None:
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
        folder = (self.out or Path()).absolute().parent
        if self.out is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ConfigError(f"out: {self.out} can't be written, {folder} is no folder to write to; set out=FILE")
        for file in kind.files(self.out) if self.out is not None else ():
            if file.is_dir():
                raise ConfigError(f"out: {file} is a folder; set out=FILE{kind.suffix} to another name")

    @property
    def fixed(self) -> int | None:
        """How many images the file takes at once; None is any number."""
        return self.batch if isinstance(self.batch, int) else None

    def path(self, run: Path) -> Path:
        """Where the file goes."""
        kind = "_int8" * self.int8 + "_half" * self.half
        return self.out or run / f"model{kind}{formats[self.to].suffix}"


@dataclass(frozen=True)
class Exported:
    """A file that was written.

    Attributes:
        path: of the file.
        size: bytes of it and what belongs to it.
        parity: beside the trained model.
        notes: what was done to the model, in words.
    """

    path: Path
    size: int
    parity: Parity
    notes: tuple[str, ...]


def export(trained: Trained, options: ExportOptions) -> Exported:
    """Write a trained model to a file and check that file on the validation split.

    What is checked is the file, opened by its own runtime; only then it gets its name.

    Args:
        trained: from a checkpoint.
        options: how.

    Raises:
        ConfigError: the model can't be exported so.
        ParityError: the file doesn't give the model's predictions; there is no file then.
    """
    if trained.config.data.mean is None:
        raise ConfigError("data.mean: null, so the model takes uint8 images; export needs data.mean and data.std")
    form = formats[options.to](dynamic=options.fixed is None, half=options.half)
    path = options.path(metadata.run_folder(trained.path))
    program, notes = _program(trained, form, options)
    calibrated = _calibrated(trained, options.calibrate) if options.int8 else None
    facts = metadata.describe(trained, to=options.to, batch=options.fixed, int8=calibrated, half=options.half)
    with _in_place(form, path) as temporary, closing(trained.loader("val")) as loader:
        _save(form, program, temporary, write(facts))
        model = _open(form, temporary, trained, options.fixed)
        images = None if options.parity == "all" else options.parity
        parity = compare(trained.model, model, loader, trained.task, images)
        parity.check(trained.task.meters[0], int8=options.int8)
        some = loader.samples(range(min(len(loader.plan.source), loader.global_batch))).images
        outputs = _outputs(model, some)
        del model
        # Again, now that the scores are known; what is on the disk is read once more.
        _save(form, program, temporary, write(metadata.with_scores(facts, parity)))
        again = _outputs(_open(form, temporary, trained, options.fixed), some)
        if not (again - outputs).abs().max() <= _SAME * outputs.abs().max():
            raise ParityError("the file gives other outputs when it is read again; no file was written; check the disk")
        size = sum(each.stat().st_size for each in form.files(temporary))
    return Exported(path, size, parity, notes)


def _program(trained: Trained, form: Format, options: ExportOptions) -> tuple[Any, tuple[str, ...]]:
    """The model as the format has it, and what was done to it."""
    model = copy.deepcopy(trained.task.bare(trained.model)).requires_grad_(False)
    model.to(device="cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    shape = options.fixed or 2, trained.config.data.channels, *trained.config.size
    example = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    notes = []
    if trained.precision.dtype is not None:
        used = str(trained.precision.dtype).removeprefix("torch.")
        notes.append(f"scores before are of float32; eval of the run computes in {used}, as it was trained")
    if form.fuses:
        height, width = trained.task.bare_size(trained.config.size)
        simple = simplify(model, example[:, :, :height, :width], dynamic=form.dynamic)
        model = simple.model
        if simple.reparameterized:
            notes.append(f"re-parameterised: {simple.reparameterized:,} parameters fewer")
        notes += [f"BatchNorms fused: {simple.fused}"] * bool(simple.fused) + [simple.note] * bool(simple.note)
    model = trained.task.to(torch.device("cpu")).finished(model)
    with one_line_errors(f"to={options.to} can't take this model"):
        program = form.convert(model, example)
    if options.int8:
        images = calibration_images(trained, options.calibrate, options.fixed)
        with one_line_errors(f"int8: to={options.to} can't quantize this model"):
            program = form.quantize(program, images)
    return program, tuple(notes)


def _calibrated(trained: Trained, count: int) -> dict[str, int]:
    """How int8 was made, for the metadata."""
    return {"images": len(_chosen(trained.source("train"), trained, count)), "weights_bits": 8 if has_vnni() else 7}


def _chosen(source: Source, trained: Trained, count: int) -> NDArray[np.int64]:
    """Which samples int8 is calibrated by: of those that are on this machine."""
    here, random = source.present(), np.random.default_rng(trained.config.seed)
    places = random.permutation(len(source) if here is None else len(here))[:count]
    return places if here is None else here[places]


def calibration_images(trained: Trained, count: int, batch: int | None = None) -> list[Tensor]:
    """Training images, chosen at random by the run's seed, without augmentation: (N, 3, H, W) batches on the device.

    Args:
        trained: whose data is loaded.
        count: how many, or all there are on this machine.
        batch: how many each batch has to have; None is any number.
    """
    with closing(trained.loader("train")) as loader:
        chosen = _chosen(loader.plan.source, trained, count)
        step = batch or loader.global_batch
        if batch:
            chosen = np.resize(chosen, -(-len(chosen) // batch) * batch)  # the first once more
        parts = [chosen[start : start + step].tolist() for start in range(0, len(chosen), step)]
        return [loader.samples(part).images for part in parts]


def _save(form: Format, program: Any, path: Path, text: str) -> None:
    with one_line_errors(f"{path.name} can't be written"):
        form.save(program, path, text)


def _open(form: Format, path: Path, trained: Trained, batch: int | None) -> nn.Module:
    with one_line_errors("the exported file can't be opened"):
        model = form.open(path, trained.device, trained.network).eval()
    return FixedBatch(model, batch) if batch else model


def _outputs(model: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        outputs: Tensor = model(images)
        return outputs


@contextmanager
def _in_place(form: Format, path: Path) -> Iterator[Path]:
    """A name in a new folder beside `path`, from which the files are moved to `path` and beside it at the end.

    Raises:
        ConfigError: they can't be.
    """
    try:
        with TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent, ignore_cleanup_errors=True) as folder:
            temporary = Path(folder) / path.name
            yield temporary
            _move(form.files(temporary), form.files(path), Path(folder))
    except OSError as error:
        raise ConfigError(f"out: {path} can't be written: {error.strerror or error}; set out=FILE") from error


def _move(sources: Sequence[Path], targets: Sequence[Path], folder: Path) -> None:
    """Rename files, the first of them last; if one can't be, the others are as they were before."""
    moved: list[tuple[Path, Path]] = []
    try:
        for source, target in zip(sources[1:], targets[1:], strict=True):
            kept = folder / f"before-{target.name}"
            if target.exists():
                os.replace(target, kept)
            moved.append((kept, target))
            os.replace(source, target)
        os.replace(sources[0], targets[0])
    except OSError:
        for kept, target in moved:
            if kept.exists():
                os.replace(kept, target)
            else:
                target.unlink(missing_ok=True)
        raise

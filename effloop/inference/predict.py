"""Prediction: of a data source, tolerating bad images; of masks at their images' sizes; from Python."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps
from torch import Tensor, nn

from effloop.assemble.loader import loader_of
from effloop.batch import ImageSize
from effloop.config import Config
from effloop.data.augment.base import Evaluation, RecipeConfig
from effloop.data.bad import OnBad
from effloop.data.check import is_turned, turned_line
from effloop.data.decode.common import to_pixels
from effloop.data.image.header import Encoded, pnm_header
from effloop.data.image.mask import IGNORED
from effloop.data.masks import MaskDecoder
from effloop.data.plan import Plan, Read
from effloop.data.source import Source
from effloop.data.source.files import Images, Unlabelled
from effloop.errors import ConfigError, DataError
from effloop.inference.together import together
from effloop.inference.trained import Trained
from effloop.registry import either
from effloop.report.values import cell_of, in_cell
from effloop.system.files import replacing
from effloop.task.segmentation import pixel_scores
from effloop.train.evaluation import View, outputs_of_views

# {name: a number or a text for each row}; NaN is no number. The names and kinds are the same every time.
Columns = Mapping[str, NDArray[np.float32] | Sequence[str]]
Write = Callable[[Columns], None]  # appends rows to a table
TABLES = (".csv", ".jsonl")  # extensions of the files


def rows_of(columns: Columns, digits: int | None = 6) -> Iterator[dict[str, Any]]:
    """A dict for each row: texts, and numbers of so many significant digits (None: all of float32's), None for NaN."""
    rows = zip(*(_values(column, digits) for column in columns.values()), strict=True)
    return (dict(zip(columns, row, strict=True)) for row in rows)


def _values(column: NDArray[np.float32] | Sequence[str], digits: int | None) -> Sequence[Any]:
    if not isinstance(column, np.ndarray):
        return column
    if digits is None:  # the fewest that identify a float32
        return [None if np.isnan(value) else float(str(value)) for value in column.astype(np.float32)]
    return [None if math.isnan(value) else float(f"{value:.{digits}g}") for value in column.tolist()]


@dataclass(frozen=True)
class SizedPlan(Plan):
    """A plan for threads that leaves out samples which can't be loaded, and notes sizes and which images EXIF turns."""

    on_bad: OnBad = OnBad.leave_out
    sizes: dict[int, ImageSize] = field(default_factory=dict)
    turned: set[int] = field(default_factory=set)

    def read(self, ids: NDArray[np.int64]) -> Read:
        encoded, infos = super().read(ids)
        looked_at = zip(ids.tolist(), encoded, infos, strict=True)
        self.turned.update(sample for sample, data, info in looked_at if is_turned(data, info, self.decoder))
        self.sizes.update(zip(ids.tolist(), (ImageSize(*size) for size in infos.sizes.tolist()), strict=True))
        return encoded, infos


class Predictions:
    """Predictions for the samples of a source, in order, batch by batch; masks of tasks of pixels."""

    def __init__(self, trained: Trained, source: Source, views: Collection[View] = ()) -> None:
        config = showing_all(trained.config) if trained.task.spatial else trained.config
        self.trained, self.views = trained, views
        ways = trained.ways if len(trained.ways) > 1 else [config]
        self.loader = together([loader_of(way, source, SizedPlan) for way in ways])
        assert isinstance(self.loader.plan, SizedPlan)
        self._plan = self.loader.plan
        self.problems: dict[int, str] = {}  # sample -> why it can't be used; complete after the last batch
        self._how = config.augment.eval if isinstance(config.augment, RecipeConfig) else Evaluation.crop

    def __len__(self) -> int:
        return len(self._plan.source)

    def note(self) -> str:
        """A line about images that EXIF turns, complete after the last batch; empty if there are none."""
        return turned_line(len(self._plan.turned), f"{len(self):,} images", self._plan.decoder)

    def columns(self, top: int = 1, *, every: bool = False) -> Iterator[tuple[NDArray[np.int64], Columns]]:
        """A batch's ids and the columns of `Task.predictions`; samples with a problem have empty texts and NaN."""
        task, names = self.trained.task, self.trained.target_names
        for ids, outputs, _ in self._outputs():
            found = task.predictions(outputs, names, top, every=every)
            bad = [row for row, sample in enumerate(ids.tolist()) if sample in self.problems]
            yield ids, {name: _without(values, bad) for name, values in found.items()}

    def masks(self) -> Iterator[tuple[NDArray[np.int64], list[Mask | None]]]:
        """The ids of some samples, in order, and their masks; None for an image that can't be used."""
        for ids, outputs, sizes in self._outputs():
            masks: list[Mask | None] = []
            for output, size in zip(outputs, sizes, strict=True):
                frame = size and Frame.of(self._how, size, ImageSize(*output.shape[1:]))
                masks.append(mask_of(output, frame, size).cpu().numpy() if size and frame else None)
            yield ids, masks

    @torch.inference_mode()
    def _outputs(self) -> Iterator[tuple[NDArray[np.int64], Tensor, list[ImageSize | None]]]:
        """Ids, (n, K) outputs without the padding, images' sizes (None: a problem); a batch late, as reading waits."""
        before: list[tuple[NDArray[np.int64], Tensor, list[ImageSize | None]]] = []
        with closing(self.loader):
            for batch in self.loader.epoch(0):
                found = outputs_of_views(self.trained.forward, batch.images, self.views)
                outputs = self.trained.task.ensemble(found) if self.views else found[0]
                ids = batch.ids[: min(len(batch), len(self) - int(batch.ids[0]))].numpy()
                yield from before
                bad = {each.id: each.reason for each in batch.skipped}
                self.problems |= bad
                sizes = {sample: self._plan.sizes.pop(sample, None) for sample in ids.tolist()}
                before = [(ids, outputs[: len(ids)], [None if each in bad else size for each, size in sizes.items()])]
            yield from before


def full_size_scores(trained: Trained, source: Source, views: Collection[View] = ()) -> tuple[int, dict[str, float]]:
    """Of a source with masks how many images can be used, and `pixel_scores` of what `predict` writes for them: masks
    of their own sizes. A ConfigError as of `showing_all`.
    """
    predictions, classes, count = Predictions(trained, Unlabelled(source), views), trained.num_outputs, 0
    confusion, decoder = np.zeros(classes**2, np.int64), MaskDecoder()
    for ids, masks in predictions.masks():
        for sample, mask in zip(ids.tolist(), masks, strict=True):
            if mask is None:
                continue
            try:
                target = decoder.decode(source.read_mask(sample), ImageSize(*mask.shape), source)
            except DataError:  # with on_error=fail the evaluation before has raised it
                continue
            count += 1
            step = max(1, _AT_ONCE // mask.shape[1])
            for rows in (slice(start, start + step) for start in range(0, len(mask), step)):
                counted = target[rows] != IGNORED
                cells = target[rows][counted] * np.int64(classes) + mask[rows][counted]
                confusion += np.bincount(cells, minlength=classes**2)
    return count, pixel_scores(confusion.reshape(classes, classes).astype(np.float64))


def _without(values: NDArray[np.float32] | list[str], rows: list[int]) -> NDArray[np.float32] | list[str]:
    if not rows:
        return values
    if isinstance(values, np.ndarray):
        values = values.copy()
        values[rows] = np.nan
        return values
    return ["" if row in rows else value for row, value in enumerate(values)]


# Masks at their images' own sizes, from outputs at the model's size.

Mask = NDArray[np.uint8]  # (height, width) classes of an image's pixels
_AT_ONCE = 1 << 22  # enlarged outputs at a time: all of them are 7 GB for 150 classes of 12 megapixels


def showing_all(config: Config) -> Config:
    """A config by which the model sees all of each image: instead of a centre crop letterboxed, which keeps ratios."""
    if not isinstance(config.augment, RecipeConfig):
        raise ConfigError(
            f"augment: {config.augment.name} is of a plugin, whose crop can't be undone, and masks have their images' "
            "sizes; choose augment=native"
        )
    if config.augment.eval is not Evaluation.crop:
        return config
    return replace(config, augment=replace(config.augment, eval=Evaluation.letterbox, eval_ratio=1.0))


class Frame(NamedTuple):
    """Position of an image's first pixel in the model's input, and the size that it was resized to, in pixels."""

    top: int
    left: int
    height: int
    width: int

    @classmethod
    def of(cls, how: Evaluation, image: ImageSize, size: ImageSize) -> Frame:
        """The frame of an image in an input of another size, by `letterbox` or `squash`."""
        if how is Evaluation.squash:
            return cls(0, 0, *size)
        scale = min(size.height / image.height, size.width / image.width)
        height, width = max(1, round(image.height * scale)), max(1, round(image.width * scale))
        return cls((size.height - height) // 2, (size.width - width) // 2, height, width)


def mask_of(outputs: Tensor, frame: Frame, image: ImageSize) -> Tensor:
    """(K, H, W) logits at the model's size -> (height, width) uint8, the best class of each pixel of an image, whose
    part of the logits is `frame`. They are resized bilinearly before, so that borders are smooth; some rows at a time.
    """
    part = outputs[:, frame.top : frame.top + frame.height, frame.left : frame.left + frame.width].float()
    if tuple(part.shape[1:]) == tuple(image):
        return part.max(dim=0).indices.to(torch.uint8)
    mask = torch.empty(image, dtype=torch.uint8, device=outputs.device)
    rows = max(1, _AT_ONCE // (len(part) * max(image.width, frame.width)))
    for start in range(0, image.height, rows):
        stop = min(start + rows, image.height)
        wide = F.interpolate(_rows(part, start, stop, image.height)[None], (stop - start, image.width), mode="bilinear")
        mask[start:stop] = wide[0].max(dim=0).indices  # as argmax, which takes 5.0 s for 12 megapixels, this 0.7
    return mask


def _rows(part: Tensor, start: int, stop: int, height: int) -> Tensor:
    """(K, h, w) -> (K, stop - start, w): some of the rows that resizing to `height` gives."""
    places = torch.arange(start, stop, device=part.device, dtype=torch.float64)
    places = ((places + 0.5) * (part.shape[1] / height) - 0.5).clamp_(0, part.shape[1] - 1)
    above = places.floor().long()
    below = (above + 1).clamp_(max=part.shape[1] - 1)
    return part[:, above].lerp(part[:, below], (places - above).float()[None, :, None])


def share_columns(masks: Sequence[Mask | None], names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """A column `share_NAME` for each class, its share of each image's pixels; NaN where there is no mask."""
    found = np.full((len(masks), len(names)), np.nan, np.float32)
    for row, mask in zip(found, masks, strict=True):
        if mask is not None:
            row[:] = np.bincount(mask.ravel(), minlength=len(names))[: len(names)] / mask.size
    return {f"share_{name}": column for name, column in zip(names, found.T, strict=True)}


# A trained model for other programs: a module with its classes and its preprocessing.

# The path of a file, an open binary file, an encoded image, Pillow's image, or pixels: uint8, an array (H, W) or
# (H, W, C), or a tensor (C, H, W), of 1 (grey), 3 (RGB) or 4 channels (RGBA), or a uint16 array (H, W).
ImageLike = str | os.PathLike[str] | BinaryIO | bytes | bytearray | memoryview | Image.Image | NDArray[Any] | Tensor


class Predictor(nn.Module):
    """A trained model with the preprocessing that it was evaluated with.

        model = effloop.load("outputs/pets")
        model.predict(["cat.jpg"])  # [{"class": "cat", "score": 0.98}]

    Attributes:
        model: the network, in eval mode: (N, C, H, W) float32, normalised -> (N, K) outputs.
        classes: names of the classes, in the order of the outputs; empty where targets are no classes.
        image_size: S, or (H, W) of images that aren't square, in pixels.
    """

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.model = trained.model
        self.classes = trained.classes
        size = trained.config.size
        self.image_size = size.height if size.height == size.width else size
        self._trained = trained

    @property
    def device(self) -> torch.device:
        """Where the network is; `.to(device)` moves it."""
        return next((each.device for each in self.model.parameters()), self._trained.device)

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) float32, normalised as by `preprocess` -> (N, K) outputs, in float32 unless loaded with amp."""
        return self._trained.forward(images)

    def preprocess(self, images: Iterable[ImageLike] | ImageLike) -> Tensor:
        """Images of any size -> (N, C, H, W) float32 on the model's device, by the run's decoder, crop and resize; a
        DataError names an image that can't be read or decoded.
        """
        source, config = self._given(images)
        with closing(loader_of(config, source)) as loader:
            return torch.cat([batch.images.clone() for batch in loader.epoch(0)])[: len(source)]

    def predict(
        self, images: Iterable[ImageLike] | ImageLike, top: int = 1, *, every: bool = False
    ) -> list[dict[str, Any]]:
        """Predict each image.

        Args:
            images: paths, binary files that are open, encoded images, Pillow's images, arrays (H, W) or (H, W, C) or
                tensors (C, H, W) of uint8, C being 1, 3 or 4 (RGBA), in any mixture; or one of these.
            top: how many classes of each, the most probable first.
            every: add `p_NAME`, the probability of each class.

        Returns:
            A dict for each image: `class`, `score`, then `class_2`, `score_2` and so on; of other tasks their own keys.
            Of segmentation `mask`, (height, width) uint8 classes at the image's own size, and `share_NAME`, each
            class's share of it; images are whole, see `showing_all`.

        Raises:
            DataError, ConfigError: as `preprocess` does.
        """
        source, config = self._given(images)
        found, task = Predictions(replace(self._trained, config=config), source), self._trained.task
        rows: list[dict[str, Any]] = []
        for _, masks in found.masks() if task.spatial else ():
            columns = rows_of(share_columns(masks, self._trained.target_names))
            rows += [{"mask": mask, **row} for mask, row in zip(masks, columns, strict=True)]
        for _, table in found.columns(top, every=every) if not task.spatial else ():
            rows += rows_of(table, task.digits)
        for sample, problem in sorted(found.problems.items()):
            raise DataError(f"{source.name(sample)} {problem}")
        return rows

    def _given(self, images: Iterable[ImageLike] | ImageLike) -> tuple[Images, Config]:
        given: Any = images
        alone = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image)
        pixels = isinstance(given, np.ndarray | Tensor) and given.ndim in (2, 3)
        single = isinstance(given, alone) or pixels or hasattr(given, "read")
        each: list[Any] = [given] if single or not hasattr(given, "__iter__") else list(given)
        if not each:
            raise ConfigError("images: there are none; give a list of paths, encoded images, or arrays")
        config = self._trained.config
        names = [os.fspath(it) if isinstance(it, str | os.PathLike) else f"image {n}" for n, it in enumerate(each)]
        encoded = [_encoded(image, name, config) for image, name in zip(each, names, strict=True)]
        source = Images([*map(os.fsencode, names)], "images in memory", encoded)
        config = replace(config, device=str(self.device))
        if len(each) == 1:
            config.num_workers = 0  # threads take longer to start than an image to load
        return source, config


_PIXELS = (("uint8",), ("uint8", 3), ("uint8", 4), ("uint16",))  # dtype and channels, none of (H, W)


def _encoded(image: ImageLike, name: str, config: Config) -> Encoded:
    """An encoded image, of a file or as raw pixels; Pillow's image stays as it is."""
    if isinstance(image, str | os.PathLike):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise DataError(f"{name} can't be read: {error.strerror}") from None
    if hasattr(image, "read"):
        image = image.read()
    if isinstance(image, bytes | bytearray | memoryview):
        return image
    opened: Any = image
    if isinstance(image, ImageFile.ImageFile) and image.tile and image.fp and not image.tell():  # as it is in its file
        image.fp.seek(0)
        return image.fp.read()
    if isinstance(image, Tensor) and image.ndim == 3:
        opened = image.permute(1, 2, 0).numpy(force=True)
    if isinstance(opened, np.ndarray) and opened.ndim == 3 and opened.shape[2] == 1:
        opened = opened[:, :, 0]
    if isinstance(opened, np.ndarray) and opened.ndim > 1 and (opened.dtype.name, *opened.shape[2:]) in _PIXELS:
        opened = Image.fromarray(opened)
    if not isinstance(opened, Image.Image):
        of = f"{image.dtype} {tuple(image.shape)}" if isinstance(image, np.ndarray | Tensor) else type(image).__name__
        raise ConfigError(
            f"images: {name} is {of}; give a path, an open binary file, encoded bytes, Pillow's image or uint8 pixels: "
            "an array (H, W) or (H, W, C), or a tensor (C, H, W), of 1, 3 or 4 channels"
        )
    try:
        turned = ImageOps.exif_transpose(opened) if config.decode.exif else opened.copy()
        pixels = to_pixels(turned, config.data.channels, config.decode.window)
    except MemoryError:
        raise  # about the machine, not about the image
    except Exception as error:  # a damaged file can make Pillow raise nearly anything
        raise DataError(f"{name} can't be decoded: {' '.join(str(error).split())}") from error
    return pnm_header(*pixels.shape) + pixels.tobytes()


def load(run: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Predictor:
    """A run's model, with the weights that it was scored by, its classes and its preprocessing.

    Args:
        run: a run folder, for its best checkpoint; a .ckpt file, or one by `effloop export`.
        overrides: change the run's config, e.g. `["device=cpu", "amp=true"]`; else it computes in float32.

    Raises:
        CheckpointError, ConfigError: there is no such run, or it can't be loaded.
    """
    return Predictor(Trained.open(Path(run).expanduser(), overrides, whole_process=False))


# Tables and masks as files.


def check_writable(out: Path) -> None:
    """Raise a ConfigError for a file that a table can't be written to, before there is one."""
    if out.suffix.lower() not in TABLES:
        raise ConfigError(f"out: '{out}' is no table's file; set out=NAME with {either(TABLES)}")
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir():
        raise ConfigError(
            f"out: '{out}' {'is a folder' if out.is_dir() else 'is in no folder that exists'}; set out=FILE"
        )
    with _explained("out", out, "FILE"), TemporaryFile(dir=folder):
        pass


@contextmanager
def writing(out: Path, digits: int | None = 6, *, as_is: bool = False) -> Iterator[Write]:
    """What appends rows to a file, which is there when it is complete, and untouched if not; numbers as of `rows_of`.

    CSV is RFC 4180's, in UTF-8, with a header. Texts are as `cell_of` gives them, or `as_is`.
    """
    with _explained("out", out, "FILE"), replacing(out) as file:
        text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
        cells = csv.writer(text, lineterminator="\n")

        def write(columns: Columns) -> None:
            rows = rows_of(columns, digits)
            if out.suffix.lower() == ".jsonl":
                text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                return
            if not file.tell():
                cells.writerow(columns if as_is else map(in_cell, columns))
            cells.writerows(row.values() if as_is else [cell_of(*each) for each in row.items()] for row in rows)

        yield write
        text.detach()  # else it would close the file


@contextmanager
def _explained(key: str, path: Path, fix: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key}: '{path}' can't be written: {error.strerror}; set {key}={fix}") from error


class MaskFiles:
    """A folder with a PNG for each image of a source: FOLDER/NAME.png, with the folders below the one that all are in.

    Of two images whose names differ by their extensions the second one keeps its own, too. A ConfigError if the folder
    can't be written to, or a file would take the place of one of the source.
    """

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder = folder
        self.names = file_names([os.fsdecode(each) for each in source.raw_keys(np.arange(len(source))).items()], ".png")
        real = cache(os.path.realpath)  # of the folders, of which there are few: that of each file takes 20 µs

        def place(path: str) -> str:
            return os.path.join(real(os.path.dirname(path)), os.path.basename(path))

        given = {place(os.fsdecode(each)) for each in source.file_paths()}
        for path in (os.path.join(folder, name) for name in self.names):
            if place(path) in given:
                raise ConfigError(
                    f"masks: '{path}' would take the place of a file of the data; set masks to another folder"
                )
        with _explained("masks", folder, "FOLDER"):
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass

    def write(self, sample: int, content: bytes) -> None:
        path = self.folder / self.names[sample]
        with _explained("masks", path, "FOLDER"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(content)


def file_names(keys: Sequence[str], suffix: str) -> list[str]:
    """Names of files by keys of samples (paths, or what a packed format calls them), all different and below the folder
    that they are put into, whatever the keys.
    """
    pieces = [[part for part in key.replace("\0", "_").split("/") if part not in ("", ".", "..")] for key in keys]
    common = os.path.commonpath({"/".join(each[:-1]) for each in pieces})
    shared = len(common.split("/")) if common else 0
    names: dict[str, None] = {}
    for each in pieces:
        path = "/".join(each[shared:]) or "_"
        name = os.path.splitext(path)[0] + suffix
        while name in names:
            path = name = path + suffix
        names[name] = None
    return [*names]

"""A trained model for other programs: a module with its classes and its preprocessing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn

from effloop.assemble.loader import loader_of
from effloop.config import Config
from effloop.data.decode.common import to_pixels
from effloop.data.image.header import Encoded, pnm_header
from effloop.data.source.files import ImagesInMemory
from effloop.errors import ConfigError, DataError
from effloop.inference.masks import PredictedMasks, share_columns
from effloop.inference.trained import Trained
from effloop.inference.writers import rows_of

ImageLike = str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | NDArray[np.uint8]
"""The path of a file, an encoded image, Pillow's image, or (H, W, 3) RGB or (H, W, 1) grey uint8."""


_SINGLE = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image)


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
        """(N, C, H, W) float32, normalised as by `preprocess` -> (N, K) outputs, in the run's precision."""
        dtype = self._trained.precision.dtype
        with torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            outputs: Tensor = self.model(images)
        return outputs

    def preprocess(self, images: Iterable[ImageLike] | ImageLike) -> Tensor:
        """Images of any size -> (N, C, H, W) float32 on the model's device, by the run's decoder, crop and resize.

        Raises:
            DataError: an image can't be read or decoded; the message names it.
            ConfigError: there are none, or one is nothing of `ImageLike`.
        """
        return torch.cat([batch.clone() for batch in self._batches(images)])

    @torch.inference_mode()
    def predict(
        self, images: Iterable[ImageLike] | ImageLike, top: int = 1, *, every: bool = False
    ) -> list[dict[str, Any]]:
        """What the model says of each image.

        Args:
            images: paths, encoded images, Pillow's images or (H, W, C) uint8 arrays, in any mixture; or one of these.
            top: how many classes of each, the most probable first.
            every: add `p_NAME`, the probability of each class.

        Returns:
            A dict for each image: `class`, `score`, then `class_2`, `score_2` and so on; of other tasks their own keys.
            Of segmentation `mask`, (height, width) uint8 classes at the image's own size, and `share_NAME`, each
            class's share of it.

        Raises:
            DataError, ConfigError: as `preprocess` does.
        """
        task = self._trained.task
        if task.spatial:
            return self._masks(images)
        found: list[dict[str, Any]] = []
        for batch in self._batches(images):
            columns = task.predictions(self(batch), self._trained.target_names, top, every=every)
            found += rows_of(columns, task.digits)
        return found

    def _masks(self, images: Iterable[ImageLike] | ImageLike) -> list[dict[str, Any]]:
        """`predict` where each pixel has a class; images are whole, see `showing_all`."""
        source, config = self._given(images)
        found = PredictedMasks.of(replace(self._trained, config=config), source)
        rows: list[dict[str, Any]] = []
        for _, masks in found.batches():
            columns = rows_of(share_columns(masks, self._trained.target_names))
            rows += [{"mask": mask, **row} for mask, row in zip(masks, columns, strict=True)]
        for sample, problem in found.predictions.problems.items():
            raise DataError(f"{source.name(sample)} {problem}")
        return rows

    def _batches(self, images: Iterable[ImageLike] | ImageLike) -> Iterator[Tensor]:
        """(n, 3, H, W) float32 on the device, batch by batch, loaded ahead by threads."""
        source, config = self._given(images)
        with closing(loader_of(config, source)) as loader:
            left = len(source)
            for batch in loader.epoch(0):
                yield batch.images[:left]
                left -= len(batch)

    def _given(self, images: Iterable[ImageLike] | ImageLike) -> tuple[ImagesInMemory, Config]:
        """What images are loaded from, and by which config."""
        given: Any = images
        single = isinstance(given, _SINGLE) or (isinstance(given, np.ndarray) and given.ndim == 3)
        each: list[Any] = [given] if single else list(given)
        if not each:
            raise ConfigError("images: there are none; give a list of paths, encoded images, or arrays")
        config, names = self._trained.config, _names(each)
        source = ImagesInMemory([_encoded(image, name, config) for image, name in zip(each, names, strict=True)], names)
        config = replace(config, device=str(self.device))
        if len(each) == 1:
            config.num_workers = 0  # threads take longer to start than an image to load
        return source, config


def _names(images: Sequence[ImageLike]) -> list[str]:
    return [
        os.fspath(image) if isinstance(image, str | os.PathLike) else f"image {number}"
        for number, image in enumerate(images)
    ]


def _encoded(image: ImageLike, name: str, config: Config) -> Encoded:
    """An encoded image, of a file or as raw pixels.

    Raises:
        DataError: the file can't be read, or Pillow's image can't be decoded.
        ConfigError: it is no image.
    """
    if isinstance(image, str | os.PathLike):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise DataError(f"{name} can't be read: {error.strerror}") from None
    if isinstance(image, bytes | bytearray | memoryview):
        return image
    pixels = _pixels(image, name, config) if isinstance(image, Image.Image) else image
    if isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] in (1, 3):
        return pnm_header(*pixels.shape) + pixels.tobytes()
    of = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(image).__name__
    raise ConfigError(
        f"images: {name} is {of}; give a path, encoded bytes, Pillow's image or (H, W, 3) or (H, W, 1) uint8"
    )


def _pixels(image: Image.Image, name: str, config: Config) -> NDArray[np.uint8]:
    """(H, W, C) uint8 of Pillow's image, which stays as it is.

    Raises:
        DataError: it can't be decoded.
    """
    try:
        turned = ImageOps.exif_transpose(image) if config.decode.exif else image.copy()
        return to_pixels(turned, config.data.channels, config.decode.window)
    except MemoryError:
        raise  # about the machine, not about the image
    except Exception as error:  # a damaged file can make Pillow raise nearly anything
        raise DataError(f"{name} can't be decoded: {' '.join(str(error).split())}") from error


def load(run: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Predictor:
    """A run's model, with the weights that it was scored by, its classes and its preprocessing.

    Args:
        run: a run folder, for its best checkpoint; a .ckpt file, or one by `effloop export`.
        overrides: change the run's config, e.g. `["device=cpu", "num_workers=4"]`.

    Raises:
        CheckpointError, ConfigError: there is no such run, or it can't be loaded.
    """
    return Predictor(Trained.open(Path(run).expanduser(), overrides, whole_process=False))

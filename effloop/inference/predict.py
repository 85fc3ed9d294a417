"""A model applied to images that may be anything: what can't be read is noted, and the rest goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from effloop.assemble.loader import loader_of
from effloop.data.decode.base import ImageInfo
from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded, pnm_header
from effloop.data.loader import Loader
from effloop.data.plan import Plan
from effloop.data.prepared import Prepared, Read
from effloop.data.source import Source
from effloop.errors import DataError
from effloop.inference.trained import Trained
from effloop.inference.writers import Columns
from effloop.train.views import ONE_VIEW, Views


@dataclass(frozen=True)
class TolerantPlan(Plan):
    """A plan for threads that notes samples which can't be read or decoded; their images are black.

    Attributes:
        problems: {sample: what is wrong with it}, filled while batches are loaded.
    """

    problems: dict[int, str] = field(default_factory=dict)

    def read(self, ids: NDArray[np.int64]) -> Read:
        samples = ids.tolist()
        encoded: list[Encoded] = []
        infos: list[ImageInfo] = []
        self.source.will_need(samples)
        for sample in samples:
            try:
                data = self.source.read(sample)
                info = self.decoder.read_info(data)
            except DataError as error:
                self.problems[sample] = str(error)
                data = self._black
                info = self.decoder.read_info(data)
            except Exception as error:
                self._reraise(sample, error)
            encoded.append(data)
            infos.append(info)
        return EncodedImages.of(encoded), infos

    def decode(self, prepared: Prepared, images: Tensor, start: int, stop: int, *, at: int = 0) -> None:
        for number in range(start, stop):
            try:
                super().decode(prepared, images, number, number + 1, at=at)
            except DataError as error:
                self.problems[int(prepared.ids[number])] = str(error.__cause__)
                self.leave_out(images, at + number, at + number + 1)

    @property
    def _black(self) -> bytes:
        """A black image, as raw pixels."""
        size = self.augment.size
        return pnm_header(*size, 3) + bytes(3 * size.pixels)


@dataclass(frozen=True)
class Predictions:
    """What a model says of the samples of a source, batch by batch.

    Attributes:
        trained: the model.
        loader: of the samples, in order.
        problems: {sample: what is wrong with it}; complete when the batches are through.
        views: of each image.
    """

    trained: Trained
    loader: Loader
    problems: dict[int, str]
    views: Views = ONE_VIEW

    @classmethod
    def of(
        cls, trained: Trained, source: Source, views: Views = ONE_VIEW, plan: type[TolerantPlan] = TolerantPlan
    ) -> Predictions:
        """Of all samples of a source; `plan` is the class of the loader's.

        Raises:
            ConfigError: the task or the images don't allow the views.
        """
        views.check(trained.task, trained.config.task.name)
        loader = loader_of(trained.config, source, plan, views)
        assert isinstance(loader.plan, TolerantPlan)
        return cls(trained, loader, loader.plan.problems, views)

    def __len__(self) -> int:
        return len(self.loader.plan.source)

    def columns(self, top: int = 1, *, every: bool = False) -> Iterator[tuple[NDArray[np.int64], Columns]]:
        """The ids of a batch's samples, and the columns that the task makes of their outputs; see `Task.predictions`.

        Samples with a problem have empty texts and NaN.
        """
        task, names = self.trained.task, self.trained.target_names
        for ids, outputs in self.outputs():
            found = task.predictions(outputs, names, top, every=every)
            bad = [row for row, sample in enumerate(ids.tolist()) if sample in self.problems]
            yield ids, {name: _without(values, bad) for name, values in found.items()}

    @torch.inference_mode()
    def outputs(self) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Ids and (n, K) outputs without the padding, one batch late: reading them waits for the device."""
        before: list[tuple[NDArray[np.int64], Tensor]] = []
        with closing(self.loader):
            for batch, found in self.views.outputs(self._forward, self.loader.epoch(0)):
                outputs = self.trained.task.ensemble(found) if len(self.views) > 1 else found[0]
                filled = min(len(batch), len(self) - int(batch.ids[0]))
                yield from before
                before = [(batch.ids[:filled].numpy(), outputs[:filled])]
            yield from before

    def _forward(self, images: Tensor) -> Tensor:
        with self.trained.precision.autocast():
            outputs: Tensor = self.trained.model(images)
        return outputs


def _without(values: NDArray[np.float32] | list[str], rows: list[int]) -> NDArray[np.float32] | list[str]:
    """A column with nothing in some rows."""
    if not rows:
        return values
    if isinstance(values, np.ndarray):
        values = values.copy()
        values[rows] = np.nan
        return values
    return ["" if row in rows else value for row, value in enumerate(values)]

"""Several loaders, one after the other over the epochs: small images first, for instance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from effloop.batch import Batch, ImageSize, Preview
from effloop.data.loader import Loader


class Stages:
    """A stream of batches from one loader after the other.

    Training at a growing size is what Howard and others call progressive resizing ("Training Imagenet in 3 hours
    for 25 minutes", fast.ai 2018): the steps of small images are quicker. Evaluation at a size above the last one
    of training may score higher (Touvron et al. 2019, "Fixing the train-test resolution discrepancy").

    All loaders are built at the start, so errors show before the first step; only the current one has workers and
    batches in memory.

    Args:
        sizes: height and width of the images, in pixels, one for each stage of the training. A size given
            three times in a row has a stage of three times the length.
        loaders: of the same samples in the same order, one for each stage. Of those of one size the first is used.
        epochs: of the whole run, divided evenly; stages may differ by one.
    """

    def __init__(self, sizes: Sequence[ImageSize], loaders: Sequence[Loader], epochs: int) -> None:
        firsts: dict[ImageSize, Loader] = {}
        for size, loader in zip(sizes, loaders, strict=True):
            firsts.setdefault(size, loader)
        self.sizes = list(sizes)
        self.loaders = firsts
        self.epochs = epochs
        self._current = firsts[self.sizes[0]]

    def size_at(self, epoch: int) -> ImageSize:
        """Height and width of an epoch's images, in pixels; after the end of the run, those of the last epoch."""
        return self.sizes[min(epoch, self.epochs - 1) * len(self.sizes) // self.epochs]

    @property
    def global_batch(self) -> int:
        """Samples in a batch of all ranks together."""
        return self._current.global_batch

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._current)

    def describe(self) -> str:
        """One line: the data, and the sizes by epoch."""
        each = [self.size_at(epoch) for epoch in range(self.epochs)]
        starts = [epoch for epoch in range(self.epochs) if epoch == 0 or each[epoch] != each[epoch - 1]]
        sizes = (f"{each[epoch]} from epoch {epoch}" for epoch in starts)
        return f"{self._current.describe()}; pixels: {', '.join(sizes)}"

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        """As `Loader.epoch`; ends the workers of the stage before, and frees its memory."""
        loader = self.loaders[self.size_at(epoch)]
        if loader is not self._current:
            self._current.close()
            self._current = loader
        return loader.epoch(epoch, samples_seen)

    def preview(self, num_samples: int, num_epochs: int, most: Callable[[ImageSize], int] | None = None) -> Preview:
        """As `Loader.preview`, at the last size; crops and colours are the same at any."""
        return self.loaders[self.sizes[-1]].preview(num_samples, num_epochs, most)

    def close(self) -> None:
        """End all workers."""
        for loader in self.loaders.values():
            loader.close()

"""Several loaders that take turns over the epochs: small images first, for instance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from effloop.batch import Batch, Preview
from effloop.data.loader import Loader


class Stages:
    """A stream of batches that comes from one loader after the other.

    Training at a growing size is what Howard and others call progressive resizing ("Training Imagenet in 3 hours
    for 25 minutes", fast.ai 2018): the steps of small images are quicker. Evaluation at a size above the last one
    of training may score higher (Touvron et al. 2019, "Fixing the train-test resolution discrepancy").

    All loaders are there from the start, so what one of them can't do is known before the first step. Workers and
    batches only the one at work has.

    Args:
        sizes: height and width of the images, in pixels, one for each stretch of the training. A size that stands
            there three times in a row has a stretch of three times the length.
        loaders: of the same samples in the same order, one for each stretch. Of those of one size the first serves.
        epochs: of the whole run, shared out evenly; a stretch has one more or less where they can't be.
    """

    def __init__(self, sizes: Sequence[int], loaders: Sequence[Loader], epochs: int) -> None:
        firsts: dict[int, Loader] = {}
        for size, loader in zip(sizes, loaders, strict=True):
            firsts.setdefault(size, loader)
        self.sizes = list(sizes)
        self.loaders = firsts
        self.epochs = epochs
        self._current = firsts[self.sizes[0]]

    def size_at(self, epoch: int) -> int:
        """Height and width of an epoch's images, in pixels; from the end of the run on, those of the last."""
        return self.sizes[min(epoch, self.epochs - 1) * len(self.sizes) // self.epochs]

    @property
    def global_batch(self) -> int:
        """Samples in a batch of all ranks together."""
        return self._current.global_batch

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._current)

    def describe(self) -> str:
        """One line for people: which data, which sizes when."""
        each = [self.size_at(epoch) for epoch in range(self.epochs)]
        starts = [epoch for epoch in range(self.epochs) if epoch == 0 or each[epoch] != each[epoch - 1]]
        sizes = (f"{each[epoch]} from epoch {epoch}" for epoch in starts)
        return f"{self._current.describe()}; pixels: {', '.join(sizes)}"

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        """As a loader's `epoch`; workers of another stage end, and its memory of batches is let go."""
        loader = self.loaders[self.size_at(epoch)]
        if loader is not self._current:
            self._current.close()
            self._current = loader
        return loader.epoch(epoch, samples_seen)

    def preview(self, num_samples: int, num_epochs: int, most: Callable[[int], int] | None = None) -> Preview:
        """As a loader's, at the last size: the same crops and colours as at any, and images of one size."""
        return self.loaders[self.sizes[-1]].preview(num_samples, num_epochs, most)

    def close(self) -> None:
        """End all workers."""
        for loader in self.loaders.values():
            loader.close()

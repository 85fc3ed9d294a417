"""Several loaders that take turns over the epochs: small images first, for instance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from effloop.batch import Batch, Preview
from effloop.data.loader import Loader


class Stages:
    """A stream of batches that comes from one loader after the other.

    Training at a growing size is what Howard and others call progressive resizing ("Training Imagenet in 3 hours
    for 25 minutes", fast.ai 2018): the steps of small images are quicker.

    Args:
        sizes: height and width of the images, in pixels, one for each stage.
        loaders: of the same samples in the same order, one for each stage.
        epochs: of the whole run; each stage has as many of them, or one more or less.
    """

    def __init__(self, sizes: Sequence[int], loaders: Sequence[Loader], epochs: int) -> None:
        self.sizes = sizes
        self.loaders = loaders
        self.epochs = epochs
        self._current = loaders[0]

    def at(self, epoch: int) -> Loader:
        """Whose turn it is; the last one's, from the end of the run on."""
        return self.loaders[min(epoch, self.epochs - 1) * len(self.loaders) // self.epochs]

    @property
    def global_batch(self) -> int:
        """Samples in a batch of all ranks together."""
        return self._current.global_batch

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._current)

    def describe(self) -> str:
        """One line for people: which data, which sizes when."""
        starts = [next(e for e in range(self.epochs) if self.at(e) is loader) for loader in self.loaders]
        sizes = (f"{size} from epoch {start}" for size, start in zip(self.sizes, starts, strict=True))
        return f"{self._current.describe()}; pixels: {', '.join(sizes)}"

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        """As a loader's `epoch`; workers of the stage before end."""
        loader = self.at(epoch)
        if loader is not self._current:
            self._current.close()
            self._current = loader
        return loader.epoch(epoch, samples_seen)

    def preview(self, num_samples: int, num_epochs: int, most: Callable[[int], int] | None = None) -> Preview:
        """As the last loader's: the others' images are of other sizes."""
        return self.loaders[-1].preview(num_samples, num_epochs, most)

    def close(self) -> None:
        """End all workers."""
        for loader in self.loaders:
            loader.close()

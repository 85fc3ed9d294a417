"""Host -> device, and what happens to a batch there: casting and normalising."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from effloop.batch import Batch


class Transfer:
    """Moves batches to a device and normalises them there; uint8 travels, a quarter of float32's bytes.

    Args:
        device: where the batches go.
        mean, std: three numbers each, in units of 0-1; both None leave the images uint8.
        channels_last: memory layout of the images that come out.
    """

    def __init__(
        self, device: torch.device, mean: Sequence[float] | None, std: Sequence[float] | None, *, channels_last: bool
    ) -> None:
        self.device = device
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self._scale: Tensor | None = None
        if mean is not None and std is not None:
            # (x / 255 - mean) / std as one multiplication and one addition.
            scale = 1.0 / (255.0 * torch.tensor(std, dtype=torch.float64))
            offset = -torch.tensor(mean, dtype=torch.float64) / torch.tensor(std, dtype=torch.float64)
            self._scale = scale.float().reshape(1, 3, 1, 1).to(device)
            self._offset = offset.float().reshape(1, 3, 1, 1).to(device)

    def stream(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Host batches -> batches on the device, as `Batch` describes them."""
        copying: deque[tuple[torch.cuda.Event, Batch]] = deque()
        for batch in batches:
            moved = self._moved(batch)
            if self.device.type == "cuda":  # a copy that is under way needs its source
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                copying.append((event, batch))
                while copying and copying[0][0].query():  # type: ignore[no-untyped-call]
                    copying.popleft()
            del batch  # its memory is free for the next one
            yield moved
            del moved

    def _moved(self, batch: Batch) -> Batch:
        return Batch(
            images=self.normalize(batch.images.to(self.device, non_blocking=True)),
            targets=batch.targets.to(self.device, torch.int64, non_blocking=True),
            ids=batch.ids,
            valid=batch.valid.to(self.device, non_blocking=True),
        )

    def normalize(self, images: Tensor) -> Tensor:
        """(N, 3, S, S) uint8 -> the same as float32, or as it is without mean and std."""
        if self._scale is None:
            return images.contiguous(memory_format=self.memory_format)
        images = images.to(torch.float32, memory_format=self.memory_format)
        return torch.addcmul(self._offset, images, self._scale)

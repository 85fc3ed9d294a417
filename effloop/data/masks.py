"""Loading images with masks: a mask rides with its image from the source into the batch's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.batch import Batch, ImageSize
from effloop.data.image.header import Encoded, Header
from effloop.data.image.mask import IGNORED, Mask, check_size, check_values, decode_mask, largest_value
from effloop.data.in_progress import in_progress
from effloop.data.order import BatchRequest, without_repeats
from effloop.data.plan import Plan, Prepared, Read
from effloop.data.source import Source
from effloop.lazy import Tensor, torch


class MaskDecoder:
    """Decodes masks, and compares them with their images."""

    def decode(self, data: Encoded, image: Header | ImageSize, source: Source) -> Mask:
        """(H, W) uint8, an image's mask as class indices and `IGNORED`.

        Raises:
            DataError: it can't be decoded, isn't of the image's size, or has a value that is no class.
        """
        mask = decode_mask(data, source.mask_format)
        check_size(mask.shape, image.height, image.width)
        count = len(source.classes)
        if int((mask + np.uint8(1)).max()) > count:  # one more, as IGNORED becomes 0: 10 times as fast as counting
            check_values(largest_value(mask), count)
        return mask


@dataclass(frozen=True)
class MaskPlan(Plan):
    """A plan of images with masks. Targets of its batches are the masks, (B, H, W) uint8, `IGNORED` in padding.

    They lie behind the images, in the same memory: in as many more images' places as they need. So an engine has one
    slot for both, which workers share and a GPU's copies are started from.
    """

    masks: MaskDecoder = field(default_factory=MaskDecoder)

    def shape(self, count: int) -> tuple[int, int, int, int]:
        places, height, width, depth = super().shape(count)
        return places + -(-places // depth), height, width, depth

    def images(self, memory: Tensor) -> Tensor:
        places, depth = memory.shape[0], memory.shape[3]
        return super().images(memory[: places * depth // (depth + 1)])

    def new_targets(self, request: BatchRequest, images: Tensor) -> Tensor:
        return masks_of(images)

    def replace_target(self, batch: Batch, row: int, sample: int) -> None:
        """Nothing: `decode` has written it with the image."""

    def leave_out(self, images: Tensor, start: int, stop: int) -> None:
        super().leave_out(images, start, stop)
        masks_of(images).numpy()[start:stop] = IGNORED

    def read(self, ids: NDArray[np.int64]) -> Read:
        encoded, infos = super().read(ids)
        for sample in without_repeats(ids).tolist():
            in_progress.begin(sample)
            infos.masks.append(self.source.read_mask(sample))
        return encoded, infos

    def _decode_rows(self, prepared: Prepared, images: Tensor, at: int) -> None:
        rows, masks = self.output.pixels(images), masks_of(images).numpy()
        for number, sample in enumerate(prepared.ids.tolist()):
            in_progress.begin(sample)
            self._load_one(prepared, number, rows[at + number], masks[at + number])

    def _load_one(self, prepared: Prepared, number: int, out: NDArray[np.uint8], out_mask: Mask) -> None:
        info, draws, data = prepared.infos[number], prepared.draws, prepared.encoded[number]
        prepared.encoded.drop(number, number + 1)
        mask = self.masks.decode(prepared.infos.masks[number], info, self.source)
        prepared.infos.masks[number] = b""
        self.augment.choose(draws, number, mask)
        box: Any = tuple(draws.boxes[number].tolist())
        region = self.decoder.decode_with_info(data, info, box, self.augment.at_least)
        self.augment.apply(region, draws, number, out, (mask, out_mask))


def masks_of(images: Tensor) -> Tensor:
    """(B, H, W) uint8: the masks behind (B, C, H, W) images, in the same memory, as `MaskPlan.images` makes them."""
    count, _, height, width = images.shape
    begin = images.storage_offset() * images.element_size() + images.nbytes
    empty = torch.empty(0, dtype=torch.uint8)
    size = (count, height, width)
    return empty.set_(images.untyped_storage(), begin, size)  # type: ignore[call-overload, no-any-return]

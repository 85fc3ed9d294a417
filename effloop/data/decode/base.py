"""Interface of decoders: encoded bytes and a box in, RGB pixels out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages, Headers
from effloop.data.image.header import Encoded, Header
from effloop.errors import check_value
from effloop.registry import PartConfig, Registry

Pixels = NDArray[np.uint8]  # (height, width, channels), 0-255
Box = tuple[int, int, int, int]  # (top, left, height, width) in pixels of the image


@dataclass
class DecodeConfig(PartConfig):
    """Fields that every decoder has.

    Attributes:
        dct_scaling: decode a JPEG at 1/2, 1/4 or 1/8 of its size where the crop stays at least as large as the
            output; as `region`, the others ignore it. Crops of [0.08, 1] to 224 pixels take, with the resize,
            2.4 ms instead of 4.8 at 1600x1200, and 8.8 instead of 28 at 4000x3000. Off by default, because the
            pixels differ from those of full decoding by 1.3 levels (mean), 3.3 in the worst crop.
        max_pixels: an image of more pixels (height x width) is refused before it is decoded.
        region: decode only what a crop needs of a baseline JPEG, with EffLoop's own decoder: the MCUs around it by its
            entropy index, or the intervals between its restart markers, or, where it has neither, the rows down to the
            crop's lower edge. By `auto` and `turbojpeg`, where Pillow is from its wheel; false decodes whole images
            with the libjpeg-turbo in that wheel. The pixels are the same to the bit. Damage outside of the crop is not
            noticed. Crops of [0.08, 1] of 500x375 (90 KB) take 0.19 ms of a core with their resize by an index, 0.19
            by markers (69 KB), 0.31 without either, and 0.75 where images are decoded whole.
        exif: turn images as their EXIF orientation says, before anything else sees them, as viewers do; false takes
            pixels as they are stored, as torchvision's ImageFolder does.
        window: of grey images with more than 8 bits: [low, high] become 0 and 255, what is between them follows
            linearly, the rest is clipped, as a window of DICOM; [0,4095] for 12 bits in 16. `auto` takes each image's
            own least and greatest value. null takes the high byte: [0,65535], rounded down.
    """

    region: bool = True
    exif: bool = True
    dct_scaling: bool = False
    max_pixels: int = 178_956_970  # Pillow's own limit for an error, twice its limit for a warning
    window: Any = None

    def __post_init__(self) -> None:
        check_value("decode.max_pixels", self.max_pixels, self.max_pixels > 0, "a number above 0")
        ends = self.window if isinstance(self.window, list) else []
        numbers = len(ends) == 2 and all(type(each) in (int, float) for each in ends)
        good = self.window in (None, "auto") or (numbers and -math.inf < ends[0] < ends[1] < math.inf)
        check_value("decode.window", self.window, good, "[low,high], as [0,4095], auto or null")


@dataclass(frozen=True, slots=True)
class Resizes:
    """Target size and flip of N regions."""

    boxes: NDArray[np.int64]  # (N, 4) int64: top, left, height, width, inside of the images
    flips: NDArray[np.bool_]  # (N,) bool, whether a region is flipped from left to right
    # (height, width) down to which a region may be scaled while it is decoded; None: not at all
    at_least: tuple[int, int] | None
    # (N, H, W, C) uint8, each image contiguous, that the regions are resized into by `resize_into`; written
    out: Pixels


class Decoder(ABC):
    """Encoded bytes -> pixels. Holds no state between calls, is thread-safe and picklable.

    Every decoder gives the stored orientation, unless `exif` is set, and the same colours: grey is copied to three
    channels, 16 bits are reduced to the high byte or by `DecodeConfig.window`, palettes are resolved, alpha is dropped,
    CMYK is converted as Pillow does, an animation gives its first frame. With one channel all of them give grey: the
    luminance that a JPEG has, to the bit, and Pillow's formula for other colours.

    Attributes:
        channels: of the pixels, C: 3 is RGB, 1 grey.
        exif: whether images are turned as their EXIF orientation says; sizes and boxes are then of upright images.
        uses_indexes: whether entropy indexes (`image.jpeg`) save it time; without it none are looked up or built.
    """

    exif: bool = False
    channels: int = 3
    uses_indexes: bool = False

    @abstractmethod
    def decode(self, data: Encoded, box: Box | None = None, at_least: tuple[int, int] | None = None) -> Pixels:
        """Pixels of one region.

        Args:
            data: one encoded image of any format that Pillow reads, recognised by its content.
            box: the region wanted, inside the image; None is the whole image.
            at_least: (height, width) down to which the region may be scaled while decoding. A decoder may ignore it.

        Returns:
            (height, width, C) uint8, 0-255; maybe a view, maybe read-only.

        Raises:
            DataError: empty, truncated, damaged, too large or not an image. The message does not
                name the sample ("is empty (0 bytes)"); the caller, who knows its name, prepends it.
            ValueError: the box is not inside the image, a bug of the caller.
        """

    @abstractmethod
    def size(self, data: Encoded) -> tuple[int, int]:
        """(height, width) of the stored image, from its header alone, in microseconds.

        Raises:
            DataError: empty, too large, not an image, or damaged or truncated within the header. A file
                truncated after it has a size, and is refused by `decode` only.
        """

    def read_info(self, data: Encoded) -> Header:
        """The header for `decode_with_info`, at least its size; raises as `size`."""
        return Header("", *self.size(data), plain=False, complete=False)

    def read_infos(self, images: EncodedImages) -> Headers:
        """`read_info` of (N,) images at once; raises as `size`, of any of them."""
        return Headers.of([self.read_info(data) for data in images])

    def decode_with_info(
        self, data: Encoded, info: Header, box: Box | None = None, at_least: tuple[int, int] | None = None
    ) -> Pixels:
        """`decode`, given what `read_info` returned for the same bytes."""
        return self.decode(data, box, at_least)

    def decode_resized(self, images: EncodedImages, infos: Headers, wanted: Resizes) -> NDArray[np.bool_]:
        """Decode regions of several images at once, and resize them, with the pixels that one by one would give.

        Args:
            images: (N,) encoded.
            infos: what `read_infos` returned for them.
            wanted: boxes and outputs.

        Returns:
            (N,) bool, for which that is done. The others are for `decode_with_info`, which raises their errors.
        """
        return np.zeros(len(wanted.out), np.bool_)


decoders: Registry[Decoder] = Registry(
    "decode",
    {
        "auto": "effloop.data.decode.turbojpeg",
        "opencv": "effloop.data.decode.opencv",
        "pillow": "effloop.data.decode.common",
        "turbojpeg": "effloop.data.decode.turbojpeg",
    },
)

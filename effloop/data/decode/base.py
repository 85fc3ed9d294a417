"""What every decoder is: encoded bytes and a box in, RGB pixels out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.errors import ConfigError
from effloop.registry import PartConfig, Registry

Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels of the stored image."""


@dataclass
class DecodeConfig(PartConfig):
    """Fields that every decoder has.

    Attributes:
        dct_scaling: decode a JPEG at 1/2, 1/4 or 1/8 of its size where the crop stays at least as large as the
            image that is wanted; by libjpeg-turbo only, others ignore it. At crops of [0.08, 1] to 224 pixels, of
            1600x1200 in 2.4 ms instead of 4.8, of 4000x3000 in 8.8 instead of 28, with the resize. Off, because
            the pixels differ: by 1.3 levels (mean) of what the whole photograph gives, 3.3 in the worst crop.
        max_pixels: an image of more pixels (height x width) is refused before it is decoded.
        region: decode only what a crop needs of a baseline JPEG: the intervals between its restart markers, as
            `convert` writes them, or, where it has none, down to the crop's lower edge (not by OpenCV). The pixels
            are the same to the bit. What lies outside is not looked at, so damage there is not noticed. At crops
            of [0.08, 1] of 500x375 and 105 KB, 0.66 ms instead of 1.1 with markers, 0.94 instead of 1.0 without.
    """

    region: bool = True
    dct_scaling: bool = False
    max_pixels: int = 178_956_970  # Pillow's own limit for an error, twice its limit for a warning

    def __post_init__(self) -> None:
        if self.max_pixels < 1:
            raise ConfigError(f"decode.max_pixels: {self.max_pixels} is not allowed; set a number above 0")


class Seen(Protocol):
    """What a look at an image's first bytes says: at least its size, maybe more that decoding wants to know again."""

    @property
    def height(self) -> int:
        """Rows of the stored image."""

    @property
    def width(self) -> int:
        """Columns of the stored image."""


class Size(NamedTuple):
    """The least that a look says."""

    height: int
    width: int


class Decoder(ABC):
    """Encoded bytes -> pixels. Holds no state between calls, is thread-safe and picklable.

    Every decoder gives the stored orientation (EXIF rotation is ignored) and the same colours:
    grey is copied to three channels, 16 bits are cut to the high byte, palettes are looked up,
    alpha is dropped, CMYK is converted as Pillow does, an animation gives its first frame.
    """

    @abstractmethod
    def decode(
        self, data: Encoded, box: Box | None = None, at_least: tuple[int, int] | None = None
    ) -> NDArray[np.uint8]:
        """Pixels of one region.

        Args:
            data: one encoded image: JPEG, PNG, WebP or BMP, known by its content.
            box: the region wanted, inside the image; None is the whole image.
            at_least: permission to return the region scaled down while decoding, never below this
                (height, width). A decoder is free to ignore it.

        Returns:
            (height, width, 3) uint8 RGB, 0-255; maybe a view, maybe read-only.

        Raises:
            DataError: empty, truncated, damaged, too large or not an image. The message does not
                name the sample ("is empty (0 bytes)"): whoever knows its key puts that in front.
            ValueError: a box that is not inside the image, which is the caller's bug.
        """

    @abstractmethod
    def size(self, data: Encoded) -> tuple[int, int]:
        """(height, width) of the stored image, from its header alone, in microseconds.

        Raises:
            DataError: empty, too large, not an image, or damaged or cut within the header. A file
                that is cut further behind has a size, and is only refused by `decode`.
        """

    def look(self, data: Encoded) -> Seen:
        """The size, and what `decode_seen` needs of the header, so that it is read once.

        Raises:
            DataError: as `size`.
        """
        return Size(*self.size(data))

    def decode_seen(
        self, data: Encoded, seen: Any, box: Box | None = None, at_least: tuple[int, int] | None = None
    ) -> NDArray[np.uint8]:
        """`decode` of what this decoder's `look` has seen: `seen` is what it said of these very bytes."""
        del seen
        return self.decode(data, box, at_least)


decoders: Registry[Decoder] = Registry("decode")

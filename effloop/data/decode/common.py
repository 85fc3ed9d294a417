"""What all decoders share: the checks around a decode, and Pillow as the judge of the unusual."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import BmpImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, PpmImagePlugin, WebPImagePlugin

from effloop.data.decode.base import Box, DecodeConfig, Decoder
from effloop.data.image.header import Encoded, Header, pnm_pixels, read_header, size_by_header
from effloop.data.image.jpeg import Part, cut, cut_below, layout_of
from effloop.errors import DataError

WORTH_CUTTING = 4096
"""Bytes outside of a box: libjpeg takes 10 µs for a KB of a photograph, cutting 35."""


class PlainDecoder(Decoder):
    """A decoder that is fast on plain, whole images and leaves all others to Pillow.

    So every decoder takes and refuses the same files, and gives the same pixels for whatever is
    unusual: a subclass only says in `fast` how it decodes what is usual.

    Attributes:
        decodes_tops: whether it takes a JPEG whose data goes on behind its last row, in silence.
    """

    decodes_tops = True

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config,)  # built anew: libraries are imported and set up there, too

    def fast(self, data: Encoded, header: Header) -> NDArray[np.uint8] | None:
        """(height, width, 3) uint8 RGB of a plain, complete image; None if Pillow has to judge."""
        return None

    def decode(
        self, data: Encoded, box: Box | None = None, at_least: tuple[int, int] | None = None
    ) -> NDArray[np.uint8]:
        return self.decode_seen(data, self.look(data), box, at_least)

    def decode_seen(
        self, data: Encoded, seen: Header, box: Box | None = None, at_least: tuple[int, int] | None = None
    ) -> NDArray[np.uint8]:
        header = seen
        if box is not None:
            check_box(box, header)
        if header.format == "PNM" and header.plain and header.complete:
            return _raw(data, header, box)
        if box is not None and header.format == "JPEG" and header.plain and header.complete:
            region = self._region(data, header, box, at_least)
            if region is not None:
                return region
        pixels = self.fast(data, header) if header.plain and header.complete else None
        if pixels is None or pixels.shape != (header.height, header.width, 3):
            pixels = judge(data, header)
        return pixels if box is None else _cut_out(pixels, box)

    def fast_top(self, data: Encoded, header: Header) -> NDArray[np.uint8] | None:
        """Like `fast`, for a JPEG whose data goes on behind its last row."""
        return self.fast(data, header)

    def fast_shrunk(self, data: Encoded, header: Header, factor: int, *, top: bool) -> NDArray[np.uint8] | None:
        """Like `fast` or `fast_top`, for a JPEG, at 1 / `factor` (2, 4, 8) of its size, rounded up."""
        return None

    def _region(
        self, data: Encoded, header: Header, box: Box, at_least: tuple[int, int] | None
    ) -> NDArray[np.uint8] | None:
        """Pixels of a box, by decoding a smaller JPEG, or to a smaller size; None if the whole has to be decoded."""
        factor = _shrinking(box, at_least) if at_least is not None and self.config.dct_scaling else 1
        part = _part_of(data, header, box, tops=self.decodes_tops) if self.config.region else None
        if part is None and factor == 1:
            return None
        part = part or Part(data, 0, 0, header.height, header.width)
        shown = Header("JPEG", part.height, part.width, True, True, header.frame_at)
        inside = box[0] - part.top, box[1] - part.left, box[2], box[3]
        if factor > 1:
            pixels = self.fast_shrunk(part.data, shown, factor, top=part.goes_on)
            if pixels is not None and pixels.shape == (-(-part.height // factor), -(-part.width // factor), 3):
                return _cut_out(pixels, _shrunk(inside, factor))
        pixels = (self.fast_top if part.goes_on else self.fast)(part.data, shown)
        return _cut_out(pixels, inside) if pixels is not None and pixels.shape == (part.height, part.width, 3) else None

    def size(self, data: Encoded) -> tuple[int, int]:
        header = self.look(data)
        return header.height, header.width

    def look(self, data: Encoded) -> Header:
        header = read_header(data)
        pixels, limit = header.height * header.width, self.config.max_pixels
        if pixels > limit:
            raise DataError(
                f"is too large: {header.height} x {header.width} (height x width) are {pixels:,} pixels; "
                f"allowed are {limit:,}; if it is meant to be so, set decode.max_pixels={pixels}"
            )
        return header


def _part_of(data: Encoded, header: Header, box: Box, *, tops: bool) -> Part | None:
    """A smaller JPEG that holds a box, where that saves anything and the file allows it."""
    outside = 1 - box[2] * box[3] / (header.height * header.width)
    layout = layout_of(data, header.frame_at) if len(data) * outside > WORTH_CUTTING else None
    if layout is None:
        return None
    if layout.interval:
        return cut(data, layout, box)
    return cut_below(data, layout, box[0] + box[2]) if tops else None


def _shrinking(box: Box, at_least: tuple[int, int]) -> int:
    """The largest of 8, 4, 2, 1 by which a box may be shrunk."""
    most = min(box[2] // at_least[0], box[3] // at_least[1])
    return next((factor for factor in (8, 4, 2) if factor <= most), 1)


def _shrunk(box: Box, factor: int) -> Box:
    """The box in an image of 1 / `factor` of the size, its edges rounded; never less than its size over the factor."""
    top, left, height, width = box
    ends = (top + height + factor // 2) // factor, (left + width + factor // 2) // factor
    top, left = (top + factor // 2) // factor, (left + factor // 2) // factor
    return top, left, ends[0] - top, ends[1] - left


def _cut_out(pixels: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
    top, left, height, width = box
    return pixels[top : top + height, left : left + width]


def _raw(data: Encoded, header: Header, box: Box | None) -> NDArray[np.uint8]:
    """Pixels that are stored as such: the box is a view; only grey is copied, to three channels."""
    pixels = pnm_pixels(data, header)
    region = pixels if box is None else _cut_out(pixels, box)
    return region if region.shape[2] == 3 else np.repeat(region, 3, axis=2)


def check_box(box: Box, header: Header) -> None:
    """Raise ValueError unless the box lies within the image and holds a pixel."""
    top, left, height, width = box
    rows_fit = 0 <= top < top + height <= header.height
    columns_fit = 0 <= left < left + width <= header.width
    if not (rows_fit and columns_fit):
        raise ValueError(
            f"box (top, left, height, width) = {box} is not inside an image of "
            f"{header.height} x {header.width} (height x width)"
        )


def judge(data: Encoded, header: Header) -> NDArray[np.uint8]:
    """(height, width, 3) uint8 RGB of the whole image, by Pillow, as strictly as it can.

    Raises:
        DataError: truncated or damaged.
    """
    try:
        with _PLUGINS[header.format](io.BytesIO(data)) as image:
            pixels = _to_rgb(image)
    except MemoryError:
        raise  # says something about the machine, not about the image
    except Exception as error:  # a damaged file can make Pillow raise nearly anything
        raise DataError(_verdict(data, header, error)) from error
    if pixels.shape[:2] != (header.height, header.width):
        raise DataError(
            f"is a damaged {header.format}: its header says {header.height} x {header.width} "
            f"(height x width), its pixels are {pixels.shape[0]} x {pixels.shape[1]}"
        )
    return pixels


class _Jpeg(JpegImagePlugin.JpegImageFile):
    """Without the look into EXIF for a resolution, which warns where EXIF is damaged."""

    def _read_dpi_from_exif(self) -> None:
        pass


# Pillow's readers themselves, not Image.open: that warns at half of its pixel limit, and turning it
# off means to change the process's warnings or Pillow's limit, which no thread may do for others.
_PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "JPEG": _Jpeg,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "PNM": PpmImagePlugin.PpmImageFile,
}


def _to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    image.load()
    if image.mode == "RGB":
        return np.asarray(image)
    if image.mode.startswith("I"):  # 16-bit grey
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    image.info.pop("transparency", None)  # dropped anyhow, and convert() warns about some kinds of it
    return np.asarray(image.convert("RGB"))


def _verdict(data: Encoded, header: Header, error: Exception) -> str:
    expected = size_by_header(data, header)
    if header.complete or (expected is not None and expected <= len(data)):
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"is a damaged {header.format}: {reason}"
    ends = f"is a truncated {header.format}: ends after {len(data):,}"
    if expected is None:
        return f"{ends} bytes without its end marker"
    return f"{ends} of {'at least ' if header.format == 'PNG' else ''}{expected:,} bytes"

"""Re-encodes a single image, wherever it comes from."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, JpegImagePlugin

from effloop.data.decode import Decoder
from effloop.data.image.header import Encoded, Header, jpeg_sampling, open_other, pnm_header, read_header
from effloop.data.image.jpeg import with_interval_lengths
from effloop.data.image.orientation import read_orientation, with_orientation
from effloop.errors import DataError, optional_package
from effloop.lazy import torch

SHORTEST_INTERVAL = 32
"""Pixels between two restart markers at `restart=auto`: this, or the next that divides a row. At 500x375, 4:2:0 and
quality 90 the parts that crops of [0.08, 1] need decode in 422, 418, 445 and 495 µs with 16, 32, 64 and 128 pixels,
of 706 for a whole image without markers; files grow by 4.1, 2.2, 1.1 and 0.6 % and two bytes an interval."""
WITHOUT_TABLES = 95
"""Quality at `quality=source` of what is no JPEG of one or three components, and so has no tables to keep."""
_LONGEST_SIDE = 65_500  # of libjpeg; a JPEG's header could say 65,535


@dataclass(frozen=True)
class Recipe:
    """How images are re-encoded."""

    payload: str = "jpeg"  # or `raw`: the pixels behind a line of text (PNM)
    quality: int | str = 90  # 1-100, or `source` for the tables and the chroma subsampling of the original JPEG
    # Maximum MCUs between restart markers, or `none`; `auto` is every 32 pixels or slightly more. The interval always
    # divides the MCUs in a row, so that every row begins one and a region can be cut out.
    restart: int | str = "auto"
    max_side: int | None = None  # pixels of the longer side
    color: str | None = None  # `rgb` or `gray`; None leaves grey images grey and makes all others RGB

    def about(self) -> dict[str, Any]:
        """For the header of the dataset."""
        fields = asdict(self)
        if self.payload == "raw":
            del fields["quality"], fields["restart"]
        return fields


class Recode:
    """Encoded image in, encoded image out: a pure function, thread-safe.

    The image is decoded as in training, scaled down if it is too large, and written as a baseline JPEG
    with optimised Huffman tables, restart markers and the lengths between them (`jpeg.with_interval_lengths`), or raw.
    Images that are small enough already are re-encoded too, so that all have restart markers. Metadata is
    dropped, but for a JPEG's EXIF orientation, if the decoder has not turned the pixels by it.

    - `quality=N`: chroma subsampling 4:2:0. Optimised tables take 0.5 ms for 400x533 and save 15 % of the
      bytes. Written by OpenCV, which releases the GIL.
    - `quality=source`: the original's quantisation tables and subsampling (4:2:0 if it is an unusual one).
      Written by Pillow, which holds the GIL.
    """

    def __init__(self, recipe: Recipe, decoder: Decoder) -> None:
        self.recipe, self.decoder = recipe, decoder
        self._cv2: Any = optional_package("cv2", "convert", "opencv-python-headless")
        self._cv2.setNumThreads(0)

    def __call__(self, data: Encoded) -> bytes:
        """The image, re-encoded by the recipe; an error doesn't name it."""
        header = read_header(data)
        pixels = self._pixels(data, header)
        if self.recipe.payload == "raw":
            height, width, channels = pixels.shape
            return pnm_header(height, width, channels) + pixels.tobytes()
        if max(pixels.shape) > _LONGEST_SIDE:
            raise DataError(
                f"is too large for a JPEG: {pixels.shape[0]} x {pixels.shape[1]} (height x width); allowed are "
                f"{_LONGEST_SIDE:,} pixels a side: set max_side or payload=raw"
            )
        if self.recipe.quality == "source":
            jpeg = self._like_source(data, header, pixels)
        else:
            jpeg = self._encoded(pixels, int(self.recipe.quality))
        return _finished(jpeg, 1 if self.decoder.exif else read_orientation(data, header))

    def _pixels(self, data: Encoded, header: Header) -> NDArray[np.uint8]:
        """(height, width, 3 or 1) uint8, RGB or grey, scaled."""
        pixels = shrink(self.decoder.decode(data), self.recipe.max_side)
        if is_grey(data, header):
            return pixels if self.recipe.color == "rgb" else pixels[:, :, :1]
        if self.recipe.color == "gray":
            return np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]
        return pixels

    def _encoded(self, pixels: NDArray[np.uint8], quality: int) -> bytes:
        """A JPEG of (height, width, 3 or 1) uint8 at 4:2:0."""
        grey = pixels.shape[2] == 1
        interval = self._interval(pixels.shape[1], 1 if grey else 2)
        cv2 = self._cv2
        pixels = np.ascontiguousarray(pixels) if grey else cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
        wanted = {
            cv2.IMWRITE_JPEG_QUALITY: quality,
            cv2.IMWRITE_JPEG_OPTIMIZE: 1,
            cv2.IMWRITE_JPEG_RST_INTERVAL: interval,
            cv2.IMWRITE_JPEG_SAMPLING_FACTOR: cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
        }
        encoded: NDArray[np.uint8] = cv2.imencode(".jpg", pixels, [part for pair in wanted.items() for part in pair])[1]
        return encoded.tobytes()

    def _like_source(self, data: Encoded, header: Header, pixels: NDArray[np.uint8]) -> bytes:
        """A JPEG with the tables of the original, if that is a JPEG of one or three components."""
        if header.format != "JPEG" or not header.plain:
            return self._encoded(pixels, WITHOUT_TABLES)
        try:
            with JpegImagePlugin.JpegImageFile(io.BytesIO(data)) as original:
                tables = [table for _, table in sorted(original.quantization.items())]
                subsampling = JpegImagePlugin.get_sampling(original)
        except Exception:  # a file that libjpeg decodes may still be one that Pillow's parser doesn't like
            return self._encoded(pixels, WITHOUT_TABLES)
        subsampling = 2 if subsampling < 0 else subsampling
        grey = pixels.shape[2] == 1
        interval = self._interval(pixels.shape[1], 1 if grey or not subsampling else 2)
        tables = tables[:1] if grey else tables
        return _by_pillow(pixels, qtables=tables, subsampling=subsampling, restart_marker_blocks=interval)

    def _interval(self, width: int, blocks: int) -> int:
        """MCUs between restart markers of an image whose MCUs are `blocks` blocks of 8 pixels wide; 0 is none."""
        if self.recipe.restart == "none":
            return 0
        columns = -(-width // (8 * blocks))
        if self.recipe.restart == "auto":
            return auto_interval(columns, 8 * blocks)
        return max(number for number in _divisors(columns) if number <= int(self.recipe.restart))


def auto_interval(columns: int, mcu_width: int) -> int:
    """MCUs between restart markers, for rows of `columns` MCUs of `mcu_width` pixels; see `SHORTEST_INTERVAL`.

    Where only far longer ones divide a row, as 31 does, MCUs of 16 pixels get a marker each, which costs 7 % more
    and saves a third of the decoding; for those of 8 pixels that would be 34 %.
    """
    shortest = SHORTEST_INTERVAL // mcu_width
    found = min(number for number in _divisors(columns) if number >= min(shortest, columns))
    return 1 if mcu_width > 8 and found > 4 * shortest else found


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def _finished(jpeg: bytes, orientation: int) -> bytes:
    """A JPEG with the lengths of its restart intervals, and an EXIF orientation, in it."""
    return with_orientation(with_interval_lengths(jpeg), orientation)


def is_grey(data: Encoded, header: Header) -> bool:
    """Whether an image is stored with a single colour channel; never a palette, WebP or BMP."""
    if header.format in ("WEBP", "BMP"):
        return False
    if header.format == "JPEG":
        return len(jpeg_sampling(data)) == 1
    if header.format == "PNG":
        return data[25] in (0, 4)  # colour type: grey, grey with alpha
    if header.format == "PNM":
        return data[1:2] == b"5"
    return open_other(data).mode in ("1", "L", "LA", "F", "I", "I;16", "I;16B")


def shrink(pixels: NDArray[np.uint8], max_side: int | None) -> NDArray[np.uint8]:
    """Scale (height, width, 3) uint8 down to a longer side of `max_side` pixels, if it is longer.

    By torch's antialiased bicubic filter: what training sees afterwards, at 160x160, is 48.1 dB from what
    it sees of the original; by Lanczos 49.1 dB in ten times the time (3.3 ms for 400x533 to 192x256), by
    the bilinear filter 44.1 dB. JPEG at quality 90 is about 40 dB away.
    """
    height, width, channels = pixels.shape
    size = shrunk(height, width, max_side)
    if size == (height, width):
        return pixels
    out = np.empty((*size, channels), np.uint8)
    if not pixels.flags.writeable:
        pixels = pixels.copy()  # torch warns about read-only memory that it would never write to
    source, target = (torch.from_numpy(array).permute(2, 0, 1)[None] for array in (pixels, out))
    torch.ops.aten._upsample_bicubic2d_aa.out(source, size, False, None, None, out=target)
    return out


def shrunk(height: int, width: int, max_side: int | None) -> tuple[int, int]:
    """The size of an image whose longer side has `max_side` pixels at most."""
    longest = max(height, width)
    if max_side is None or longest <= max_side:
        return height, width
    return max(1, round(height * max_side / longest)), max(1, round(width * max_side / longest))


def _by_pillow(pixels: NDArray[np.uint8], subsampling: int, **options: Any) -> bytes:
    grey = pixels.shape[2] == 1
    image = Image.fromarray(pixels[:, :, 0] if grey else pixels)
    for optimize in (True, False):
        file = io.BytesIO()
        try:  # Pillow would write factors of 2 x 2 for the single component of a grey JPEG
            image.save(file, "JPEG", optimize=optimize, subsampling=0 if grey else subsampling, **options)
        except OSError:  # Pillow keeps 2 bytes a pixel for an optimised file; noise at the finest tables is more
            if not optimize:
                raise
        else:
            break
    return file.getvalue()

"""What all decoders share: header checks, decoding of regions, and Pillow as the fallback."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import BmpImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, PpmImagePlugin, WebPImagePlugin

from effloop.data.decode.base import Box, DecodeConfig, Decoder, Pixels, Resizes, decoders
from effloop.data.image.encoded import ROW, EncodedImages, Headers, Kind, read_headers
from effloop.data.image.header import Encoded, Header, open_other, png_chunks, pnm_pixels, read_header
from effloop.data.image.orientation import read_orientation, stored_box, upright, upright_size
from effloop.data.image.pixels import to_grey, to_rgb
from effloop.data.in_progress import in_progress
from effloop.errors import DataError, reason
from effloop.native import address, function

# Whole images by Pillow, of any format that it reads: what every decoder falls back on.


def decode_with_pillow(data: Encoded, header: Header, channels: int = 3, window: Any = None) -> Pixels:
    """Decode a whole image to (height, width, channels) uint8, with Pillow at its strictest.

    Raises:
        DataError: truncated or damaged.
    """
    try:
        with _PLUGINS[header.format](io.BytesIO(data)) if header.format in _PLUGINS else open_other(data) as image:
            pixels = to_pixels(image, channels, window)
    except (MemoryError, DataError):
        raise  # about the machine, not about the image; or already one line
    except Exception as error:  # a damaged file can make Pillow raise nearly anything
        raise DataError(describe_damage(data, header, error)) from error
    if pixels.shape[:2] != (header.height, header.width):
        raise DataError(
            f"is a damaged {header.format}: its header says {header.height} x {header.width} "
            f"(height x width), its pixels are {pixels.shape[0]} x {pixels.shape[1]}"
        )
    return pixels


class _Jpeg(JpegImagePlugin.JpegImageFile):
    """Doesn't read the resolution from EXIF, which warns where EXIF is damaged."""

    def _read_dpi_from_exif(self) -> None:
        pass


# Pillow's readers, not Image.open: that warns at half of its pixel limit, and turning it off would change the
# process's warnings or Pillow's limit for all threads.
_PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "JPEG": _Jpeg,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "PNM": PpmImagePlugin.PpmImageFile,
}


def to_pixels(image: Image.Image, channels: int = 3, window: Any = None) -> Pixels:
    """Pillow's image, loaded by this -> (height, width, channels) uint8, colours as `Decoder` says.

    Raises:
        DataError: there is a window, and the image has more than 8 bits that Pillow reduces to 8.
    """
    # Whether PNG, TIFF or PNM has 16 bits shows before it is loaded; of JPEG 2000 Pillow doesn't tell.
    tiles = getattr(image, "tile", ()) if window is not None and not image.mode.startswith(("I", "F")) else ()
    if any(";16" in str(args) or (codec == "ppm" and args[1] > 255) for codec, _, _, args in tiles):
        raise DataError(
            f"is {image.mode} of 16 bits, and decode.window={window} is for grey without alpha; store it as grey, or "
            "set decode.window=null"
        )
    if channels == 1:
        image.draft("L", None)  # the luminance that a JPEG has, as the other decoders give it
    image.load()
    if image.mode == "RGB" and channels == 3:
        return np.asarray(image)
    if image.mode.startswith("I") or (image.mode == "F" and window is not None):  # 16-bit grey; a TIFF may have 32
        return np.repeat(_eight_bits(np.asarray(image), window)[:, :, None], channels, axis=2)
    image.info.pop("transparency", None)  # dropped anyway, and convert() warns about some kinds of it
    pixels = np.asarray(image.convert("RGB" if channels == 3 else "L"))
    return pixels if channels == 3 else pixels[:, :, None]


def _eight_bits(grey: NDArray[Any], window: Any) -> Pixels:
    """Grey of more than 8 bits as uint8, by a window: null, `auto` or [low, high]. NaN, which TIFF may have, is 0."""
    if window is None:
        return (grey >> 8).clip(0, 255).astype(np.uint8)
    if window == "auto":
        found = grey[np.isfinite(grey)] if grey.dtype.kind == "f" else grey
        window = (float(found.min()), float(found.max())) if found.size else (0.0, 1.0)
    low, high = window
    levels: NDArray[np.float64] = (grey.astype(np.float64) - low) * (255 / (high - low or 1))
    levels[np.isnan(levels)] = 0
    return levels.round().clip(0, 255).astype(np.uint8)


def describe_damage(data: Encoded, header: Header, error: Exception) -> str:
    """One line on what is wrong with an image that Pillow could not decode: damaged or truncated, and how."""
    why = reason(error)
    if header.complete or (header.format == "PNG" and any(kind == b"IEND" for kind, _, _ in png_chunks(data))):
        return f"is a damaged {header.format}: {why}"
    if header.format not in _PLUGINS:
        return f"is an image in {header.format} format that can't be decoded: {why}"
    marker = " without its end marker" * (header.format in ("JPEG", "PNG"))
    return f"is a truncated {header.format}: ends after {len(data):,} bytes{marker}"


# Samples from their bytes to their rows of a batch, many in one call, which releases the GIL: `native/load.c`.


def load_run(
    images: EncodedImages, headers: Headers, wanted: Resizes, *, jpegs: bool, region: bool
) -> NDArray[np.bool_]:
    """Decode boxes of plain, complete images, resize them as `resize_into`, and flip them or not.

    While a JPEG is decoded, it is scaled down as far as `wanted.at_least` allows. With `region`, only what its box
    needs is decoded. Without `jpegs`, JPEGs are left to Python, too.

    Returns:
        (N,) bool, which rows of `wanted.out` are written. The others are left to Python: other formats, JPEGs that are
        damaged or that libjpeg warns about, resizes that need PyTorch.
    """
    samples, kept = _samples(images, headers, wanted.boxes, wanted.flips)
    target = _target(wanted.out, wanted.at_least, region=region, jpegs=jpegs)
    done = np.zeros(len(wanted.out), np.bool_)
    function("effloop_load", "ppppp")(address(samples), address(target), *in_progress.addresses(), address(done))
    del kept
    return done


def decode_box(data: Encoded, header: Header, box: Box, out: Pixels, factor: int, *, region: bool) -> bool:
    """Decode a box of one plain, complete JPEG at 1 / `factor` (1, 2, 4, 8) of its size into `out`.

    `out` is (h, w, C) uint8, contiguous, of the scaled box's size. With `region`, only what the box needs is decoded.

    Returns:
        Whether `out` is written; if not, the JPEG is left to Python, as by `load_run`.
    """
    row = np.array([(header.sof_at, header.height, header.width, Kind.jpeg, 0, 1, 1, 0)], ROW)
    index = None if header.index is None else EncodedImages.of([header.index])
    one, boxes, flips = EncodedImages.of([data]), np.array([box], np.int64), np.zeros(1, np.bool_)
    samples, kept = _samples(one, Headers(row, {}, index), boxes, flips)
    target = _target(out[None], None, region=region, jpegs=True)
    done = function("effloop_decode", "ppi", "i")(address(samples), address(target), factor)
    del kept
    return bool(done)


def _samples(
    images: EncodedImages, headers: Headers, boxes: NDArray[np.int64], flips: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], list[NDArray[Any]]]:
    """As `Samples` in native/load.c; and the arrays that it points to, which must be kept while it is used."""
    columns: list[NDArray[Any]] = [images.addresses, images.sizes, headers.rows]
    indexes = headers.indexes
    columns += [] if indexes is None else [indexes.addresses, indexes.sizes]
    columns += [np.ascontiguousarray(boxes), np.ascontiguousarray(flips)]
    found = [address(column) for column in columns]
    if indexes is None:
        found[3:3] = 0, 0
    return np.array([len(flips), *found], np.int64), columns


def _target(out: Pixels, at_least: tuple[int, int] | None, *, region: bool, jpegs: bool) -> NDArray[np.int64]:
    """As `Target` in native/load.c."""
    return np.array([address(out), out.strides[0], *out.shape[1:], *(at_least or (0, 0)), region, jpegs], np.int64)


class PlainDecoder(Decoder):
    """Decodes plain, complete images by fast code and all others by Pillow.

    So all decoders accept and refuse the same files, and give the same pixels for unusual ones; a subclass
    implements `fast` for the usual ones.

    Attributes:
        has_libjpeg: whether native/load.c decodes JPEGs; those that it leaves are for `fast`.
    """

    def __init__(self, config: DecodeConfig, channels: int = 3, *, has_libjpeg: bool = False) -> None:
        self.config = config
        self.channels = channels
        self.exif = config.exif
        self.has_libjpeg = has_libjpeg
        self.uses_indexes = has_libjpeg and config.region

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt when unpickled, so that its library is imported and set up there, too.
        return type(self), (self.config, *[self.channels][: self.channels != 3])

    def fast(self, data: Encoded, header: Header) -> Pixels | None:
        """(height, width, C) uint8 of a plain, complete image; None leaves it to Pillow."""
        return None

    def decode(self, data: Encoded, box: Box | None = None, at_least: tuple[int, int] | None = None) -> Pixels:
        return self.decode_with_info(data, self.read_info(data), box, at_least)

    def decode_with_info(
        self, data: Encoded, info: Header, box: Box | None = None, at_least: tuple[int, int] | None = None
    ) -> Pixels:
        header = info
        if box is not None:
            check_box(box, header)
        if header.orientation != 1:
            return self._turned(data, header, box, at_least)
        if header.format == "PNM" and header.plain and header.complete:
            return self._raw_pixels(data, header, box)
        if header.format == "JPEG" and header.plain and header.complete and self.has_libjpeg:
            region = self._compiled(data, header, box or (0, 0, header.height, header.width), at_least)
            if region is not None:
                return region
        pixels = self.fast(data, header) if header.plain and header.complete else None
        if pixels is None or pixels.shape != (header.height, header.width, self.channels):
            pixels = decode_with_pillow(data, header, self.channels, self.config.window)
        return pixels if box is None else _crop(pixels, box)

    def decode_resized(self, images: EncodedImages, infos: Headers, wanted: Resizes) -> NDArray[np.bool_]:
        if type(self).decode_with_info is not PlainDecoder.decode_with_info:  # a subclass may do more
            return super().decode_resized(images, infos, wanted)
        allowed = wanted if self.config.dct_scaling else replace(wanted, at_least=None)
        return load_run(images, infos, allowed, jpegs=self.has_libjpeg, region=self.config.region)

    def _compiled(self, data: Encoded, header: Header, box: Box, at_least: tuple[int, int] | None) -> Pixels | None:
        """Pixels of a JPEG's box, maybe scaled down, by native/load.c."""
        factor = _scale_factor(box, at_least) if at_least is not None and self.config.dct_scaling else 1
        height, width = _scaled_box(box, factor)[2:]
        out = np.empty((height, width, self.channels), np.uint8)
        return out if decode_box(data, header, box, out, factor, region=self.config.region) else None

    def _turned(self, data: Encoded, header: Header, box: Box | None, at_least: tuple[int, int] | None) -> Pixels:
        """Pixels of an image, or of a box of it, that its EXIF orientation turns."""
        turn = header.orientation
        height, width = upright_size(header.height, header.width, turn)
        stored = replace(header, height=height, width=width, orientation=1)
        wanted = None if box is None else stored_box(box, turn, header.height, header.width)
        small = None if at_least is None else upright_size(*at_least, turn)
        return upright(self.decode_with_info(data, stored, wanted, small), turn)

    def _raw_pixels(self, data: Encoded, header: Header, box: Box | None) -> Pixels:
        """Stored raw pixels: the box is a view, unless it is grey and colours are wanted, or the other way round."""
        pixels = pnm_pixels(data, header)
        region = pixels if box is None else _crop(pixels, box)
        if region.shape[2] == self.channels:
            return region
        return to_grey(region) if self.channels == 1 else to_rgb(region)

    def size(self, data: Encoded) -> tuple[int, int]:
        header = self.read_info(data)
        return header.height, header.width

    def read_info(self, data: Encoded) -> Header:
        header = read_header(data)
        pixels, limit = header.height * header.width, self.config.max_pixels
        if pixels > limit:
            raise DataError(
                f"is too large: {header.height} x {header.width} (height x width) are {pixels:,} pixels; "
                f"allowed are {limit:,}; if that is intended, set decode.max_pixels={pixels}"
            )
        if self.exif and (turn := read_orientation(data, header)) != 1:
            height, width = upright_size(header.height, header.width, turn)
            return replace(header, height=height, width=width, orientation=turn)
        return header

    def read_infos(self, images: EncodedImages) -> Headers:
        """As `read_info`, which a subclass overrides with it."""
        headers = read_headers(images, lambda row: self.read_info(images[row]), turn=self.exif)
        pixels = headers.sizes.prod(axis=1)
        if pixels.max(initial=0) > self.config.max_pixels:
            self.read_info(images[int(pixels.argmax())])  # which refuses it
        return headers


def _scale_factor(box: Box, at_least: tuple[int, int]) -> int:
    """The largest of 8, 4, 2, 1 by which a box may be scaled down."""
    most = min(box[2] // at_least[0], box[3] // at_least[1])
    return next((factor for factor in (8, 4, 2) if factor <= most), 1)


def _scaled_box(box: Box, factor: int) -> Box:
    """The box in an image of 1 / `factor` of the size, with rounded edges; at least its own size over the factor."""
    top, left, height, width = box
    ends = (top + height + factor // 2) // factor, (left + width + factor // 2) // factor
    top, left = (top + factor // 2) // factor, (left + factor // 2) // factor
    return top, left, ends[0] - top, ends[1] - left


def _crop(pixels: Pixels, box: Box) -> Pixels:
    top, left, height, width = box
    return pixels[top : top + height, left : left + width]


def check_box(box: Box, header: Header) -> None:
    """Raise ValueError unless the box is inside the image and not empty."""
    top, left, height, width = box
    rows_fit = 0 <= top < top + height <= header.height
    columns_fit = 0 <= left < left + width <= header.width
    if not (rows_fit and columns_fit):
        raise ValueError(
            f"box (top, left, height, width) = {box} is not inside an image of "
            f"{header.height} x {header.width} (height x width)"
        )


@decoders.register("pillow", DecodeConfig)
class PillowDecoder(PlainDecoder):
    """Pillow: every format, the reference for all others, always installed."""

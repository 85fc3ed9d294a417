"""Whole images by Pillow, of any format that it reads: what every decoder falls back on."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import BmpImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, PpmImagePlugin, WebPImagePlugin

from effloop.data.image.header import Encoded, Header, expected_size
from effloop.data.image.other import open_other
from effloop.errors import DataError


def decode_with_pillow(data: Encoded, header: Header, channels: int = 3, window: Any = None) -> NDArray[np.uint8]:
    """Decode a whole image to (height, width, channels) uint8, with Pillow at its strictest.

    Raises:
        DataError: truncated or damaged.
    """
    try:
        with _PLUGINS[header.format](io.BytesIO(data)) if header.format in _PLUGINS else open_other(data) as image:
            pixels = to_pixels(image, channels, window)
    except (MemoryError, DataError):
        raise  # about the machine, not about the image; or it says what is wrong
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


def to_pixels(image: Image.Image, channels: int = 3, window: Any = None) -> NDArray[np.uint8]:
    """Pillow's image -> (height, width, channels) uint8, colours as `Decoder` says.

    Args:
        image: is loaded by this.
        channels: 3 for RGB, 1 for grey.
        window: `DecodeConfig.window`.

    Raises:
        DataError: there is a window, and the image has more than 8 bits that Pillow reduces to 8.
    """
    if window is not None and not image.mode.startswith(("I", "F")) and _is_deep(image):
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


def _is_deep(image: Image.Image) -> bool:
    """Whether an image that isn't loaded yet has 16 bits in PNG, TIFF or PNM; of JPEG 2000 Pillow doesn't tell."""
    tiles = getattr(image, "tile", ())
    return any(";16" in str(args) or (codec == "ppm" and args[1] > 255) for codec, _, _, args in tiles)


def _eight_bits(grey: NDArray[Any], window: Any) -> NDArray[np.uint8]:
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
    expected, reason = expected_size(data, header), " ".join(str(error).split()) or type(error).__name__
    if header.complete or (expected is not None and expected <= len(data)):
        return f"is a damaged {header.format}: {reason}"
    if header.format not in _PLUGINS:
        return f"is an image in {header.format} format that can't be decoded: {reason}"
    ends = f"is a truncated {header.format}: ends after {len(data):,}"
    if expected is None:
        return f"{ends} bytes without its end marker"
    return f"{ends} of {'at least ' if header.format == 'PNG' else ''}{expected:,} bytes"

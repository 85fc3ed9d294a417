"""Pictures of samples, and of masks with their colours and legends."""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from effloop.batch import Preview

IGNORED = 255  # the value of pixels that aren't counted
MAX_COLOURED = 256  # classes that a mask of uint8, and its palette, can distinguish
_SHARE = 128  # weight of the class's colour in an overlay, of 256


def _voc() -> NDArray[np.uint8]:
    """PASCAL VOC's colours: bits 0, 1 and 2 of an index are the highest bits of red, green and blue, bits 3, 4 and 5
    the next ones, and so on (`VOClabelcolormap` of its devkit); but white for 255.
    """
    index = np.arange(MAX_COLOURED)
    colours = np.zeros((MAX_COLOURED, 3), np.uint8)
    for place in range(8):
        for channel in range(3):
            bit = index >> (3 * place + channel) & 1
            colours[:, channel] |= (bit << (7 - place)).astype(np.uint8)
    colours[IGNORED] = 255
    return colours


PALETTE = _voc()  # (256, 3) uint8 RGB: a colour for each class, and white for what isn't counted


def overlay(images: NDArray[np.uint8], masks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images with half of their classes' colours, (..., H, W, 3) uint8 RGB.

    Args:
        images: (..., H, W, 3) uint8 RGB.
        masks: (..., H, W) uint8 class indices.
    """
    blended = ((256 - _SHARE) * images.astype(np.uint16) + _SHARE * PALETTE[masks].astype(np.uint16)) >> 8
    return blended.astype(np.uint8)


def encode(mask: NDArray[np.uint8]) -> bytes:
    """(H, W) uint8 class indices -> a PNG file that holds them, 8 bits each, with `PALETTE`."""
    picture = Image.fromarray(mask)  # mode L
    picture.putpalette(PALETTE.tobytes())  # makes it mode P, its pixels as they are
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=3)
    return file.getvalue()


def classes_in(masks: Sequence[NDArray[np.uint8]]) -> list[int]:
    """The values that occur in some masks, in ascending order."""
    return sorted({int(value) for mask in masks for value in np.flatnonzero(np.bincount(mask.ravel()))})


def class_name(value: int, names: Sequence[str]) -> str:
    """A mask's value in words: its class, or that it isn't counted."""
    return names[value] if value < len(names) else "not counted" if value == IGNORED else f"class {value}"


_GAP = 2
_FONT_SIZE = 11
_MAX_CHARACTERS = 25  # of a class's name in a legend
_BACKGROUND, _INK = "#181818", "#e0e0e0"
_STYLE: dict[str, Any] = {"color": _INK, "size": _FONT_SIZE, "family": "DejaVu Sans Mono", "parse_math": False}
_CHARACTER, _LINE = 6.63, 14  # width and height of this font, in pixels
_SHOWN = (96, 224)  # least and most pixels of the longer side of pictures that are fitted
_SWATCH, _LEGEND_LINE = 14, 20  # pixels of a class's colour, and of a line with its name
_MAX_CLASSES = 64  # named in a legend
_COLUMNS, _CELL = 8, 150  # images in a row, and the least width of a sample, for its name


def draw(preview: Preview, *, fitted: bool = False) -> NDArray[np.uint8]:
    """Draw each sample's images side by side, with up to three lines of its name below; and the classes of masks.

    As many samples are in a row as have eight images together. With `fitted` small images are magnified and large ones
    reduced, otherwise they are drawn pixel for pixel. Returns (H, W, 3) uint8 RGB.
    """
    rows, parts = preview.images.shape[:2]
    images = [[_tile(preview, row, part) for part in range(parts)] for row in range(rows)]
    if fitted:
        images = [[*map(_fitted, row)] for row in images]
    height, part_width = images[0][0].shape[0], images[0][0].shape[1] + _GAP
    columns, width = min(max(1, _COLUMNS // parts), rows), max(parts * part_width, _CELL) + 4 * _GAP
    head = (_LINE + 2 * _GAP) * (parts > 1)
    pitch = height + 3 * _LINE + 8 * _GAP
    texts, tiles = [], []
    for column, (part, name) in itertools.product(range(columns), enumerate(preview.columns)):
        if head and len(name) * _CHARACTER < part_width:
            left = column * width + (width - parts * part_width) / 2
            texts.append(_Text(left + (part + 0.5) * part_width, head / 2, name))
    for number, (row, caption) in enumerate(zip(images, preview.rows, strict=True)):
        y, x = head + number // columns * pitch + 2 * _GAP, number % columns * width
        text = _shortened(caption, int(width / _CHARACTER) - 2, 3)
        texts.append(_Text(x + width / 2, y + height + 2 * _GAP, text, va="top"))
        left = x + (width - parts * part_width) // 2
        tiles += [(y, left + part * part_width, tile) for part, tile in enumerate(row)]
    picture = _picture(head + math.ceil(rows / columns) * pitch, columns * width, texts, tiles)
    if shown := [mask for mask in preview.masks if mask is not None]:
        picture = np.concatenate([picture, legend(classes_in(shown), preview.classes, picture.shape[1])])
    return picture


def _tile(preview: Preview, row: int, column: int) -> NDArray[np.uint8]:
    """An image, with its mask if there is one."""
    image, mask = preview.images[row, column], preview.masks[column] if preview.masks else None
    return image if mask is None else overlay(image, mask[row])


def legend(values: Sequence[int], classes: Sequence[str], width: int) -> NDArray[np.uint8]:
    """Draw the colours of classes, of more than 64 the first ones, with their names, as many in a row as fit."""
    shown = values[:_MAX_CLASSES]
    names = [_shortened(class_name(value, classes), _MAX_CHARACTERS, 1) for value in shown]
    if len(values) > _MAX_CLASSES:
        names.append(f"… {len(values) - _MAX_CLASSES} more")
    cell = int(max(map(len, names), default=0) * _CHARACTER) + 2 * _SWATCH + 4 * _GAP
    columns = max(1, (width - 2 * _GAP) // cell)
    height = math.ceil(len(names) / columns) * _LEGEND_LINE + 4 * _GAP
    texts, tiles = [], []
    for number, name in enumerate(names):
        y, x = number // columns * _LEGEND_LINE + 2 * _GAP, number % columns * cell + 3 * _GAP
        texts.append(_Text(x + _SWATCH + 2 * _GAP, y + _LEGEND_LINE / 2, name, "left"))
        if number < len(shown):
            swatch = np.full((_SWATCH, _SWATCH, 3), 96, np.uint8)  # a frame: black is a class's colour, too
            swatch[1:-1, 1:-1] = PALETTE[shown[number]]
            tiles.append((y + (_LEGEND_LINE - _SWATCH) // 2, x, swatch))
    return _picture(height, width, texts, tiles)


def _fitted(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """An image of a size to look at: pixels that are shown several times, or fewer of them."""
    longest = max(image.shape[:2])
    if longest <= _SHOWN[1]:
        times = math.ceil(_SHOWN[0] / longest)
        return image.repeat(times, axis=0).repeat(times, axis=1)
    height, width = (max(1, round(side * _SHOWN[1] / longest)) for side in image.shape[:2])
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BOX))


class _Text(NamedTuple):
    """A text at a position, in pixels."""

    x: float
    y: float
    text: str
    ha: str = "center"
    va: str = "center"


def _picture(
    height: int, width: int, texts: Iterable[_Text], tiles: Iterable[tuple[int, int, NDArray[np.uint8]]]
) -> NDArray[np.uint8]:
    """(H, W, 3) uint8 RGB: a picture with texts, and tiles with their upper left corners' y and x."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here, because that takes 0.3 s
    from matplotlib.figure import Figure

    # At 72 dpi a point is a pixel. The half pixel keeps the size from being rounded down.
    figure = Figure(((width + 0.5) / 72, (height + 0.5) / 72), dpi=72, facecolor=_BACKGROUND)
    for each in texts:
        figure.text(each.x / width, 1 - each.y / height, each.text, ha=each.ha, va=each.va, **_STYLE)
    canvas: Any = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a character that the font lacks is a box
        canvas.draw()
    picture = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[:, :, :3])
    for y, x, tile in tiles:  # matplotlib would take 0.15 µs a pixel, 1.2 s for 8 million
        picture[y : y + tile.shape[0], x : x + tile.shape[1]] = tile
    return picture


def png(picture: NDArray[np.uint8]) -> bytes:
    """Encode (H, W, 3) uint8 RGB as a PNG file."""
    file = io.BytesIO()
    # 32 photographs of 224 pixels: 86 ms for 1.57 MB; with Pillow's defaults 374 ms for 1.48.
    Image.fromarray(picture).save(file, "PNG", compress_level=1, compress_type=Image.RLE)
    return file.getvalue()


def _shortened(name: str, most: int, num_lines: int) -> str:
    """The first lines of a name, of at most so many characters; longer ones lose their middle."""
    lines = name.encode(errors="replace").decode().splitlines()[:num_lines]
    third = most // 3
    return "\n".join(line if len(line) <= most else f"{line[:third]}…{line[third + 1 - most :]}" for line in lines)

"""Pictures of samples."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
from images import photo
from numpy.typing import NDArray
from PIL import Image

from effloop.batch import ImageSize, Preview
from effloop.record.grid import Layout, draw, gallery, png, rows_within


def preview(rows: int, columns: int, side: int, name: str = "shoes\nshoes/1.jpg") -> Preview:
    tiles = [photo(side, side, seed=number) for number in range(rows * columns)]
    images = np.stack(tiles).reshape(rows, columns, side, side, 3)
    return Preview(images, (name,) * rows, tuple(f"epoch {column}" for column in range(columns)))


def names_of(picture: NDArray[np.uint8], layout: Layout) -> NDArray[np.uint8]:
    """What stands left of the tiles."""
    top, left = layout.corner(0, 0)
    return picture[top:, :left]


@pytest.mark.parametrize("side", [5, 16, 28, 31, 64])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 2)])
def test_tiles_are_pixel_for_pixel(rows: int, columns: int, side: int) -> None:
    shown, layout = preview(rows, columns, side), Layout(ImageSize.of(side), rows, columns)
    picture = draw(shown)
    assert picture.shape == (*layout.size, 3)
    covered = np.zeros(picture.shape[:2], np.int64)
    for row in range(rows):
        for column in range(columns):
            y, x = layout.corner(row, column)
            assert np.array_equal(picture[y : y + side, x : x + side], shown.images[row, column])
            covered[y : y + side, x : x + side] += 1
    assert covered.max() == 1  # none over another
    assert covered.sum() == rows * columns * side**2


@pytest.mark.parametrize(("side", "columns"), [(1, 1), (24, 4), (64, 4), (224, 64), (300, 2)])
def test_rows_that_a_picture_has_room_for(side: int, columns: int) -> None:
    rows = rows_within(2_000_000, ImageSize.of(side), columns)
    assert (
        Layout(ImageSize.of(side), rows, columns).pixels
        <= 2_000_000
        < Layout(ImageSize.of(side), rows + 1, columns).pixels
    )


def test_no_room_for_a_single_row() -> None:
    assert rows_within(100_000, ImageSize.of(400), 1) == 0


def test_large_tiles_stand_close_together() -> None:
    layout = Layout(ImageSize.of(64), 2, 2)
    assert np.subtract(layout.corner(1, 1), layout.corner(0, 0)).tolist() == [66, 66]


@pytest.mark.parametrize("name", ["shoes\nshoes/1.jpg", "Größe", "Ωμέγα\nёж", "W" * 80])
def test_names_are_beside_their_tiles(name: str) -> None:
    layout = Layout(ImageSize.of(64), 3, 2)
    margin = names_of(draw(preview(3, 2, 64, name)), layout).max(axis=(1, 2))
    lit = margin > margin.min()
    for row in range(3):
        assert lit[row * 66 + 16 : row * 66 + 48].any()
        assert not lit[row * 66 : row * 66 + 16].any()
        assert not lit[row * 66 + 48 : row * 66 + 64].any()
    assert np.ptp(names_of(draw(preview(3, 2, 64, "")), layout)) == 0


@pytest.mark.parametrize("name", ["x" * 5000, "long/" * 30 + "a.jpg\nb", "衣" * 100, "\n\n\n", "\udcff", "$x^2$", ""])
def test_any_name(name: str) -> None:
    shown = preview(2, 1, 24, name)
    with warnings.catch_warnings(action="error"):
        assert draw(shown).shape == (*Layout(ImageSize.of(24), 2, 1).size, 3)


def test_a_long_name_keeps_both_ends() -> None:
    """The first and the last letters are drawn, those between aren't."""
    shown, layout = (
        [preview(1, 1, 24, name) for name in ("ab" + "0" * 98 + "yz", "ab" + "1" * 98 + "yz")],
        Layout(ImageSize.of(24), 1, 1),
    )
    zeros, ones = (names_of(draw(each), layout) for each in shown)
    differ = np.flatnonzero((zeros != ones).any(axis=(0, 2)))
    drawn = np.flatnonzero((zeros != zeros[0, 0]).any(axis=(0, 2)))
    assert drawn[0] < differ[0] - 10
    assert differ[-1] + 10 < drawn[-1] < layout.corner(0, 0)[1]


def test_nothing_to_show() -> None:
    assert draw(Preview(np.empty((0, 0, 1, 1, 3), np.uint8), (), ())).shape == (*Layout(ImageSize.of(1), 0, 0).size, 3)


def test_png_holds_every_pixel() -> None:
    picture = draw(preview(2, 3, 32))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(picture)))), picture)


@pytest.mark.parametrize(("height", "width", "shown"), [(16, 16, (96, 96)), (99, 60, (99, 60)), (896, 448, (224, 112))])
def test_a_gallery_has_all_pictures(height: int, width: int, shown: tuple[int, int]) -> None:
    """Small ones magnified by whole pixels, large ones reduced; each in a colour of its own."""
    colours = [(20 * number, 250 - 20 * number, 128) for number in range(10)]
    images = np.stack([np.full((height, width, 3), colour, np.uint8) for colour in colours])
    picture = gallery(images, ["a/1.jpg\ndress\n→ shirt 97%"] * 10)
    for colour in colours:
        rows, columns = np.nonzero((picture == colour).all(axis=2))
        assert (len(np.unique(rows)), len(np.unique(columns))) == shown
    assert (picture.min(axis=2) > 150).sum() > 300  # ink of the captions
    assert picture.shape[1] <= 8 * (224 + 8)


def test_captions_stay_within_their_pictures() -> None:
    """A long path loses its middle; what has more than three lines the rest."""
    images = np.zeros((2, 100, 100, 3), np.uint8)
    one, both = (gallery(images, [f"{'x' * 500}\n\n\nfourth", second]) for second in ("", "y" * 500))
    middle = one.shape[1] // 2
    assert np.array_equal(one[:, :middle], both[:, :middle])
    assert not np.array_equal(one[:, middle:], both[:, middle:])

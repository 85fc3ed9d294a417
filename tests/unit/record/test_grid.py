"""Pictures of samples."""

from __future__ import annotations

import io

import numpy as np
import pytest
from images import photo
from PIL import Image

from effloop.batch import Preview
from effloop.record.grid import Layout, draw, png, rows_within


def preview(rows: int, columns: int, side: int, name: str = "shoes\nshoes/1.jpg") -> Preview:
    tiles = [photo(side, side, seed=number) for number in range(rows * columns)]
    images = np.stack(tiles).reshape(rows, columns, side, side, 3)
    return Preview(images, (name,) * rows, tuple(f"epoch {column}" for column in range(columns)))


@pytest.mark.parametrize("side", [5, 16, 28, 31, 64])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 2)])
def test_tiles_are_pixel_for_pixel(rows: int, columns: int, side: int) -> None:
    shown = preview(rows, columns, side)
    picture, layout = np.asarray(draw(shown)), Layout.of(shown)
    covered = np.zeros(picture.shape[:2], np.int64)
    for row in range(rows):
        for column in range(columns):
            x, y = layout.corner(row, column)
            assert np.array_equal(picture[y : y + side, x : x + side], shown.images[row, column])
            covered[y : y + side, x : x + side] += 1
    assert covered.max() == 1  # none over another
    assert covered.sum() == rows * columns * side**2


@pytest.mark.parametrize("name", ["", "a\nb.jpg", f"{'W' * 80}\n{'W' * 80}"])
@pytest.mark.parametrize(("side", "columns"), [(1, 1), (24, 4), (64, 4), (224, 64), (300, 2)])
def test_rows_that_a_picture_has_room_for(side: int, columns: int, name: str) -> None:
    budget = 2_000_000
    rows = rows_within(budget, side, columns)
    heads = [f"epoch {column}" for column in range(columns)]
    assert Layout.named(side, [name] * rows, heads).pixels <= budget
    widest = Layout.widest(side, rows, columns)
    assert Layout.named(side, [name] * rows, heads).pixels <= widest.pixels <= budget
    assert Layout.widest(side, rows + 1, columns).pixels > budget


def test_no_room_for_a_single_row() -> None:
    assert rows_within(100_000, 400, 1) == 0


def test_large_tiles_stand_close_together() -> None:
    layout = Layout.of(preview(2, 2, 64))
    assert np.subtract(layout.corner(1, 1), layout.corner(0, 0)).tolist() == [66, 66]


def test_names_are_beside_their_tiles() -> None:
    named, bare = preview(3, 2, 64), preview(3, 2, 64, name="")
    layout = Layout.of(named)
    margin = np.asarray(draw(named))[layout.top :, : layout.left].max(axis=(1, 2))
    lit = margin > margin.min()
    for row in range(3):
        first = layout.corner(row, 0)[1] - layout.top
        assert lit[first + 16 : first + 48].any()
        assert not lit[first : first + 16].any()
        assert not lit[first + 48 : first + 64].any()
    without = Layout.of(bare)
    assert np.ptp(np.asarray(draw(bare))[without.top :, : without.left]) == 0


@pytest.mark.parametrize("name", ["x" * 5000, "long/" * 30 + "a.jpg\nb", "衣" * 100, "\n\n\n", "\udcff", ""])
def test_any_name(name: str) -> None:
    shown = preview(2, 1, 24, name)
    layout = Layout.of(shown)
    assert layout.left <= 180
    assert draw(shown).size == layout.size


def test_a_long_name_keeps_both_ends() -> None:
    (name,) = Layout.of(preview(1, 1, 24, f"train/{'0' * 100}/last.jpg")).names
    assert name.startswith("train/")
    assert name.endswith("/last.jpg")
    assert "…" in name


def test_nothing_to_show() -> None:
    assert draw(Preview(np.empty((0, 0, 1, 1, 3), np.uint8), (), ())).size == (12, 12)


def test_png_holds_every_pixel() -> None:
    picture = draw(preview(2, 3, 32))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(picture)))), np.asarray(picture))

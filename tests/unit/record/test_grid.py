"""Pictures of samples."""

import io
import warnings

import numpy as np
import pytest
from images import occurs, photo
from PIL import Image

from effloop.batch import Preview
from effloop.record import grid
from effloop.record.grid import draw, legend, png


def preview(rows: int, columns: int, side: int, name: str = "shoes\nshoes/1.jpg") -> Preview:
    tiles = [photo(side, side, seed=number) for number in range(rows * columns)]
    images = np.stack(tiles).reshape(rows, columns, side, side, 3)
    return Preview(images, (name,) * rows, tuple(f"epoch {column}" for column in range(columns)))


@pytest.mark.parametrize(("side", "rows", "columns"), [(5, 3, 2), (31, 1, 1), (64, 9, 2)])
def test_images_are_drawn_pixel_for_pixel(side, rows, columns):
    shown = preview(rows, columns, side)
    picture = draw(shown)
    assert all(occurs(picture, shown.images[place]) for place in np.ndindex(rows, columns))


@pytest.mark.parametrize(("height", "width", "wanted"), [(16, 16, (96, 96)), (896, 448, (224, 112))])
def test_fitted_images(height, width, wanted):
    """Small ones magnified by whole pixels, large ones reduced; each in a colour of its own."""
    colours = [(20 * number, 250 - 20 * number, 128) for number in range(10)]
    images = np.stack([np.full((1, height, width, 3), colour, np.uint8) for colour in colours])
    picture = draw(Preview(images, ("a/1.jpg\ndress\n→ shirt 97%",) * 10, ("image",)), fitted=True)
    for colour in colours:
        rows, columns = np.nonzero((picture == colour).all(axis=2))
        assert (len(np.unique(rows)), len(np.unique(columns))) == wanted
    assert (picture.min(axis=2) > 150).sum() > 300  # ink of the captions
    assert picture.shape[1] <= 8 * (224 + 10)


@pytest.mark.parametrize("name", ["x" * 5000, "衣" * 100 + "\n\n\n", "\udcff $x^2$", ""])
def test_any_name(name):
    shown = preview(2, 1, 24, name)
    with warnings.catch_warnings(action="error"):
        assert draw(shown).shape[2] == 3


def test_png_holds_every_pixel():
    picture = draw(preview(2, 3, 32))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(picture)))), picture)


# Masks as pictures: colours, overlays, legends, files.


def test_the_palette_is_voc_s():
    """The 21 colours of its masks, as the devkit's documentation lists them."""
    wanted = (
        "000000 800000 008000 808000 000080 800080 008080 808080 400000 c00000 408000 "
        "c08000 400080 c00080 408080 c08080 004000 804000 00c000 80c000 004080"
    )
    assert " ".join(bytes(colour).hex() for colour in grid.PALETTE[:21]) == wanted
    assert grid.PALETTE[grid.IGNORED].tolist() == [255, 255, 255]
    assert len(np.unique(grid.PALETTE, axis=0)) == 256


def test_an_overlay_is_half_of_both():
    image, mask = np.full((2, 3, 3), 100, np.uint8), np.array([[0, 1, 15], [255, 1, 1]], np.uint8)
    found = grid.overlay(image, mask)
    assert found[0].tolist() == [[50, 50, 50], [114, 50, 50], [146, 114, 114]]
    assert found[1, 0].tolist() == [177] * 3
    assert np.array_equal(grid.overlay(image[None], mask[None])[0], found)


def test_a_file_holds_the_classes():
    mask = np.arange(256, dtype=np.uint8).reshape(8, 32)
    with Image.open(io.BytesIO(grid.encode(mask))) as picture:
        assert (picture.format, picture.mode) == ("PNG", "P")
        assert np.array_equal(np.asarray(picture), mask)
        assert np.array_equal(np.asarray(picture.convert("RGB")), grid.PALETTE[mask])


def test_names_of_values():
    found = [grid.class_name(value, ("sky", "road")) for value in (1, 255, 7)]
    assert found == ["road", "not counted", "class 7"]
    assert grid.classes_in([np.array([[3, 3]], np.uint8), np.array([[255], [0]], np.uint8)]) == [0, 3, 255]


def test_a_grid_with_masks():
    """A column without masks has the images; below all are the classes that the masks have."""
    images = np.stack([photo(32, 40, seed=number) for number in range(4)]).reshape(2, 2, 32, 40, 3)
    mask = np.zeros((2, 32, 40), np.uint8)
    mask[1, 5:20, 5:20] = 2
    picture = draw(Preview(images, ("a", "b"), ("image", "target"), (None, mask), ("ground", "sky", "tree")))
    for row in range(2):
        assert occurs(picture, images[row, 0])
        assert occurs(picture, grid.overlay(images[row, 1], mask[row]))
    wanted = legend([0, 2], ("ground", "sky", "tree"), picture.shape[1])
    below = picture[-len(wanted) :]
    assert np.array_equal(below, wanted)
    assert (below == grid.PALETTE[2]).all(axis=2).sum() == 12 * 12
    assert not (below == grid.PALETTE[1]).all(axis=2).any()


@pytest.mark.parametrize("count", [1, 65])
def test_a_legend_has_a_swatch_for_each_class(count):
    found = legend(range(count), tuple(f"class {number}" for number in range(count)), 700)
    assert found.shape[1] == 700
    for value in range(1, min(count, 64)):
        assert (found == grid.PALETTE[value]).all(axis=2).sum() >= 12 * 12, value

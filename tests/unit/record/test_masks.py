"""Masks as pictures: colours, overlays, legends, files."""

from __future__ import annotations

import io

import numpy as np
import pytest
from images import photo
from PIL import Image

from effloop.batch import ImageSize, Preview
from effloop.record import masks
from effloop.record.grid import Layout, draw, gallery, legend


def test_the_palette_is_voc_s() -> None:
    """The 21 colours of its masks, as the devkit's documentation lists them."""
    wanted = (
        "000000 800000 008000 808000 000080 800080 008080 808080 400000 c00000 408000 "
        "c08000 400080 c00080 408080 c08080 004000 804000 00c000 80c000 004080"
    )
    assert " ".join(bytes(colour).hex() for colour in masks.PALETTE[:21]) == wanted
    assert masks.PALETTE[masks.IGNORED].tolist() == [255, 255, 255]
    assert len(np.unique(masks.PALETTE, axis=0)) == 256


def test_an_overlay_is_half_of_both() -> None:
    image, mask = np.full((2, 3, 3), 100, np.uint8), np.array([[0, 1, 15], [255, 1, 1]], np.uint8)
    found = masks.overlay(image, mask)
    assert found[0].tolist() == [[50, 50, 50], [114, 50, 50], [146, 114, 114]]
    assert found[1, 0].tolist() == [177] * 3
    assert np.array_equal(masks.overlay(image[None], mask[None])[0], found)


def test_borders_are_in_full_colour() -> None:
    image, mask = photo(9, 9), np.zeros((9, 9), np.uint8)
    mask[2:7, 2:7] = 3
    found, plain = masks.overlay(image, mask, borders=True), masks.overlay(image, mask)
    ring = mask.astype(bool)
    ring[3:6, 3:6] = False
    assert (found[ring] == masks.PALETTE[3]).all()
    assert np.array_equal(found[~ring], plain[~ring])


def test_a_file_holds_the_classes() -> None:
    mask = np.arange(256, dtype=np.uint8).reshape(8, 32)
    with Image.open(io.BytesIO(masks.encode(mask))) as picture:
        assert (picture.format, picture.mode) == ("PNG", "P")
        assert np.array_equal(np.asarray(picture), mask)
        assert np.array_equal(np.asarray(picture.convert("RGB")), masks.PALETTE[mask])


def test_names_of_values() -> None:
    found = [masks.class_name(value, ("sky", "road")) for value in (1, 255, 7)]
    assert found == ["road", "not counted", "class 7"]
    assert masks.classes_in([np.array([[3, 3]], np.uint8), np.array([[255], [0]], np.uint8)]) == [0, 3, 255]


def test_a_grid_with_masks() -> None:
    """A column without masks has the images; below all are the classes that the masks have."""
    images = np.stack([photo(32, 40, seed=number) for number in range(4)]).reshape(2, 2, 32, 40, 3)
    mask = np.zeros((2, 32, 40), np.uint8)
    mask[1, 5:20, 5:20] = 2
    picture = draw(Preview(images, ("a", "b"), ("image", "target"), (None, mask), ("ground", "sky", "tree")))
    layout = Layout(ImageSize(32, 40), 2, 2)
    for row in range(2):
        (y, x), (top, left) = layout.corner(row, 0), layout.corner(row, 1)
        assert np.array_equal(picture[y : y + 32, x : x + 40], images[row, 0])
        assert np.array_equal(picture[top : top + 32, left : left + 40], masks.overlay(images[row, 1], mask[row]))
    below = picture[layout.size[0] :]
    assert np.array_equal(below, legend([0, 2], ("ground", "sky", "tree"), layout.size[1]))
    assert (below == masks.PALETTE[2]).all(axis=2).sum() == 12 * 12
    assert not (below == masks.PALETTE[1]).all(axis=2).any()


@pytest.mark.parametrize("count", [1, 21, 64, 65, 256])
def test_a_legend_has_a_swatch_for_each_class(count: int) -> None:
    found = legend(range(count), tuple(f"class {number}" for number in range(count)), 700)
    assert found.shape[1] == 700
    for value in range(1, min(count, 64)):
        assert (found == masks.PALETTE[value]).all(axis=2).sum() >= 12 * 12, value


def test_a_gallery_of_several_parts() -> None:
    picture = gallery(np.full((3, 256, 768, 3), (9, 99, 201), np.uint8), ["a\nb\nc"] * 3, parts=3)
    rows, columns = np.nonzero((picture == (9, 99, 201)).all(axis=2))
    assert (len(np.unique(rows)), len(np.unique(columns))) == (2 * 224, 2 * 672)

"""What an audit finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """A sample of a split."""

    split: str
    sample: int


@dataclass(frozen=True)
class Finding:
    """One thing that may be wrong with one image, with several that belong together, or with a class."""

    kind: str  # one of `KINDS`
    places: tuple[Place, ...]  # of the images; of copies the one that stays comes first. Of a class, a few examples
    text: str  # what was found, such as "mirrored", "has one colour" or "predicted: pants (0.93)"
    value: float = 0.0  # what findings of the kind are ranked by, the largest first
    exclude: tuple[Place, ...] = ()  # of the images, those that an edit of the data would leave out


KINDS = {
    # Images that are there twice; clusters.
    "leak": "copies of an image in several splits",
    "contradiction": "copies of an image with different labels",
    "copy": "copies of an image within a split",
    # Images that are odd.
    "unreadable": "images that can't be decoded",
    "blank": "images of one colour",
    "plain": "images of nearly one colour",
    "dark": "very dark images",
    "bright": "very bright images",
    "blurred": "blurred images",
    "size": "images of an unusual size",
    "shape": "images of an unusual shape",
    "grey": "grey images among coloured ones",
    "turned": "images that are trained sideways",
    "thumbnail": "images with another image in their file",
    "ignored": "files that aren't recognised as images",
    # Labels.
    "label": "labels that the predictions contradict",
    "confused": "classes that are taken for each other",
    "few": "classes with few images",
    "spelling": "class names that may be mistyped",
    # Splits.
    "group": "groups that are in several splits",
    "shares": "classes whose shares differ between the splits",
}
"""Kinds of findings, in the order in which they are shown."""

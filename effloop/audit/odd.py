"""Images that are odd: by what the pass over all of them has kept, and by a closer look at a few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.audit.findings import Finding, Place
from effloop.audit.records import SIDE
from effloop.data.decode import DecodeConfig, Decoder, decoders
from effloop.data.image.pixels import opencv
from effloop.data.source import Source
from effloop.errors import DataError
from effloop.system.progress import in_threads

LOOKS = ("contrast", "low", "high", "span", "others", "detail")
"""Columns of what `measure` returns; the others are 0. Of a thumbnail's luminance, 0 to 255: deviation, quantiles of 5
and 99 %. Then the range of the colour that has the largest, the share of the pixels that are not within 8 levels of the
median colour, and the variance of the luminance's Laplacian.
"""

_ALIKE = 8  # levels between colours that are taken for the same
_WEIGHTS = np.array([0.299, 0.587, 0.114], np.float32)

# An image is odd where a value is below a limit, and below a fence under the quartile of all images, in logarithms: a
# multiple of the distance between the quartiles (Tukey, "Exploratory Data Analysis", 1977), a factor of 2 at least. So
# a set of dark images has no dark ones. The limits of dark and long images are those of cleanvision 0.3.7, as in its
# `ImagePropertyIssueManager.get_default_params`.
_DARK, _BRIGHT, _PLAIN, _BLURRED, _LONG = 0.32 * 255, 0.15 * 255, 0.05, 0.05, 0.35
_GREY = 0.1  # of the images may be grey where others have colours
# Blur doesn't show in a thumbnail. Of images that were blurred by 2 % of their longer side, all were in the tenth that
# has the least detail and bytes. So these are decoded, and a sample of all to compare them with.
_SUSPECTS, _SAMPLE, _CLOSER = 0.1, 200, 128
_TURNS = {2: "mirrored", 3: "upside down", 4: "upside down and mirrored"}  # orientations; others are on their side
_SHOWN = 6  # examples of many


def measure(thumbnails: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What odd images are found by: (n, SIDE, SIDE, 3) uint8 thumbnails -> (n, 8) float32, as `LOOKS` says."""
    found = np.zeros((len(thumbnails), 8), np.float32)
    planes = thumbnails.reshape(-1, SIDE * SIDE, 3).transpose(0, 2, 1).astype(np.float32, order="C")
    ordered, grey = np.sort(planes), _WEIGHTS @ planes  # of floats: NumPy sorts bytes 30 times as slowly
    found[:, 0] = grey.std(axis=1)
    found[:, 1:3] = np.quantile(grey, [0.05, 0.99], axis=1).T
    found[:, 3] = (ordered[:, :, -1] - ordered[:, :, 0]).max(axis=1)
    median = ordered[:, :, SIDE * SIDE // 2, None]
    found[:, 4] = (np.abs(planes - median) > _ALIKE).any(axis=1).mean(axis=1)
    image = grey.reshape(-1, SIDE, SIDE)
    near = image[:, 2:, 1:-1] + image[:, :-2, 1:-1] + image[:, 1:-1, 2:] + image[:, 1:-1, :-2]
    found[:, 5] = (near - 4 * image[:, 1:-1, 1:-1]).var(axis=(1, 2))
    return found


def find(
    splits: Mapping[str, Source], records: Mapping[str, NDArray[Any]], config: DecodeConfig, num_threads: int
) -> list[Finding]:
    """Find the images that can't be decoded, or are unlike the others of a dataset.

    Args:
        splits: name -> split.
        records: name -> (n,) of `RECORD`, as `scan` returns them.
        config: how images are decoded for training.
        num_threads: how many of the images that are looked at closely are decoded at the same time.
    """
    rows = np.concatenate([records[name] for name in splits])
    places = np.concatenate([np.arange(len(records[name])) for name in splits])
    split_of = np.repeat([*splits], [len(records[name]) for name in splits])
    decoder = decoders.build(replace(config, dct_scaling=True))

    def place(row: int) -> Place:
        return Place(str(split_of[row]), int(places[row]))

    def look(row: int) -> tuple[float, float] | str:
        return _look(splits[str(split_of[row])], int(places[row]), decoder)

    failed = np.flatnonzero(rows["state"] == 2).tolist()
    found = [
        Finding("unreadable", (place(row),), why, exclude=(place(row),))
        for row, why in zip(failed, in_threads(look, failed, num_threads), strict=True)
        if isinstance(why, str)
    ]
    if (rows["state"] == 1).any():
        closer = np.full((2, len(rows)), np.nan)
        suspects = _suspects(rows)
        for row, looked in zip(suspects, in_threads(look, suspects, num_threads), strict=True):
            closer[:, row] = np.nan if isinstance(looked, str) else looked
        for kind, row, text, value in chain(_unlike(rows, *closer), _turned(rows, config)):
            found.append(Finding(kind, (place(row),), text, value, (place(row),) if kind == "blank" else ()))
    if extra := int(rows["extra"].sum(dtype=np.int64)):
        largest = np.argsort(-rows["extra"].astype(np.int64), kind="stable")[:_SHOWN]
        share, count = extra / int(rows["bytes"].sum(dtype=np.int64)), np.count_nonzero(rows["extra"])
        text = f"{count:,} files have another image, {share:.1%} of all bytes, which are read for nothing"
        examples = tuple(place(row) for row in largest.tolist() if rows["extra"][row])
        found.append(Finding("thumbnail", examples, text, share))
    ignored = {name: source.left_out for name, source in splits.items() if source.left_out}
    return found + [Finding("ignored", (), f"{name}: {text}") for name, text in ignored.items()]


Odd = Iterator[tuple[str, int, str, float]]  # kind, row, text, value


def _suspects(rows: NDArray[Any]) -> list[int]:
    """The images that are looked at closely: those that may be blurred or of one colour, and a sample."""
    seen = np.flatnonzero(rows["state"] == 1)
    contrast, _, _, span, _, detail = rows["looks"][seen].T[: len(LOOKS)]
    score = rows["bytes"][seen] / rows["height"][seen] / rows["width"][seen] * detail / contrast.clip(1)
    closer = (score <= np.quantile(score, _SUSPECTS)) | (span <= 2 * _ALIKE)
    closer[np.linspace(0, len(seen) - 1, min(_SAMPLE, len(seen))).astype(np.int64)] = True
    found: list[int] = seen[closer].tolist()
    return found


def _look(source: Source, sample: int, decoder: Decoder) -> tuple[float, float] | str:
    """The range of an image's colours, from 0 to 255, and its sharpness; or why it can't be decoded.

    The sharpness is the variance of the Laplacian at a fixed size (Pech-Pacheco et al., "Diatom autofocusing in
    brightfield microscopy", 2000) over that of the luminance, so that little contrast isn't taken for blur.
    """
    try:
        data = source.read(sample)
        pixels = decoder.decode_with_info(data, decoder.read_info(data), None, (_CLOSER, _CLOSER))
    except DataError as error:
        return str(error)
    cv2, scale = opencv(), _CLOSER / max(pixels.shape[:2])
    size = [max(1, round(side * scale)) for side in pixels.shape[1::-1]]
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    grey = cv2.resize(pixels.mean(axis=2, dtype=np.float32), size, interpolation=how)
    return float(np.ptp(pixels, axis=(0, 1)).max()), float(cv2.Laplacian(grey, cv2.CV_32F).var() / max(1.0, grey.var()))


def _unlike(rows: NDArray[Any], spans: NDArray[Any], sharpness: NDArray[Any]) -> Odd:
    """Images that are unlike the others by their pixels; of what isn't known of all, NaN is left out."""
    seen = rows["state"] == 1
    _, low, high, _, others, _ = rows["looks"].T[: len(LOOKS)].astype(np.float64)
    height, width = (rows[side].clip(1).astype(np.float64) for side in ("height", "width"))
    few_grey = rows["grey"][seen].mean() <= _GREY
    odd = spans <= _ALIKE
    yield from (("blank", row, "has one colour", 1.0) for row in np.flatnonzero(odd).tolist())
    for kind, values, fence, limit, text in (
        ("dark", high, 3, _DARK, "99 % of it is darker than {0:.0f} of 255; the median image {1:.0f}"),
        ("bright", 255 - low, 3, _BRIGHT, "95 % of it is at most {0:.0f} of 255 from white; the median image {1:.0f}"),
        ("plain", others, 3, _PLAIN, "{0:.1%} of it has another colour; the median image {1:.0%}"),
        ("blurred", sharpness, 1.5, _BLURRED, "has a sharpness of {0:.3f}; the median image {1:.2f}"),
        ("grey", np.where(rows["grey"], 0.1, 1.0), 3, float(few_grey), "has no colours"),
        ("size", np.sqrt(height * width), 3, np.inf, "{width}x{height} pixels, far fewer than most images"),
        ("size", 1 / np.sqrt(height * width), 3, np.inf, "{width}x{height} pixels, far more than most images"),
        ("shape", np.minimum(height / width, width / height), 3, _LONG, "{width}x{height} pixels"),
    ):
        logs = np.where(seen, np.log(values.clip(1e-3)), np.nan)
        first, median, third = np.nanquantile(logs, [0.25, 0.5, 0.75])
        which = (logs < first - max(fence * (third - first), np.log(2))) & (values < limit)
        if kind not in ("size", "shape"):
            which &= ~odd
            odd |= which
        for row in np.flatnonzero(which).tolist():
            sizes = {side: rows[side][row] for side in ("height", "width")}
            yield kind, row, text.format(values[row], np.exp(median), **sizes), float(median - logs[row])


def _turned(rows: NDArray[Any], config: DecodeConfig) -> Odd:
    """Images that aren't upright as they are trained."""
    for row in np.flatnonzero((rows["turn"] > 1) & ~np.bool_(config.exif)).tolist():
        yield "turned", row, f"is {_TURNS.get(int(rows['turn'][row]), 'on its side')}; decode.exif=true turns it", 1.0

"""Images that are odd: by what the pass over all of them has kept, and by a closer look at a few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.audit.findings import Finding, Place
from effloop.audit.records import SIDE
from effloop.data.decode import DecodeConfig, Decoder, decoders
from effloop.data.image.pixels import opencv
from effloop.data.source import Source
from effloop.errors import DataError
from effloop.system.hardware import in_threads

LOOKS = ("contrast", "low", "high", "span", "others", "detail")
"""Columns of what `measure` returns; the others are 0. Of a thumbnail's luminance, 0 to 255: deviation, quantiles of 5
and 99 %. Then the range of the colour that has the largest, the share of the pixels that are not within 8 levels of the
median colour, and the variance of the luminance's Laplacian.
"""

_FIELDS = ("state", "turn", "grey", "height", "width", "bytes", "extra", "looks")
_ALIKE, _BLANK = 8, 2  # levels between colours that are nearly the same, and within an image that has one
_WEIGHTS = np.array([0.299, 0.587, 0.114], np.float32)

# An image is odd where a value is below a limit, and below a fence under the quartile of all images, in logarithms: a
# multiple of the distance between the quartiles (Tukey, "Exploratory Data Analysis", 1977), a factor of 2 at least. So
# a set of dark images has no dark ones. The limits of dark and long images are those of cleanvision 0.3.7, as in its
# `ImagePropertyIssueManager.get_default_params`; grey ones may be a tenth.
_DARK, _BRIGHT, _PLAIN, _BLURRED, _GREY, _LONG = 0.32 * 255, 0.25 * 255, 0.05, 0.05, 0.1, 0.35
# Blur doesn't show in a thumbnail, but such images have little detail in it, and few bytes: the twentieth with least is
# decoded, and a sample of all.
_SUSPECTS, _SAMPLE, _CLOSER = 0.05, 200, 128


def measure(thumbnails: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What odd images are found by: (n, SIDE, SIDE, 3) uint8 thumbnails -> (n, 8) float32, as `LOOKS` says."""
    found = np.zeros((len(thumbnails), 8), np.float32)
    planes = np.ascontiguousarray(thumbnails.reshape(len(thumbnails), SIDE * SIDE, 3).transpose(0, 2, 1))
    colours = planes.astype(np.float32)
    grey = _WEIGHTS @ colours
    found[:, 0] = grey.std(axis=1)
    found[:, 1:3] = np.sort(grey, axis=1)[:, [SIDE * SIDE * 5 // 100, SIDE * SIDE * 99 // 100]]
    ordered = np.sort(planes, axis=2, kind="stable")  # a radix sort: 5 µs an image instead of 97
    found[:, 3] = (ordered[:, :, -1] - ordered[:, :, 0]).max(axis=1)
    found[:, 4] = (np.abs(colours - ordered[:, :, SIDE * SIDE // 2, None]).max(axis=1) > _ALIKE).mean(axis=1)
    image = grey.reshape(-1, SIDE, SIDE)
    found[:, 5] = (np.diff(image, 2, axis=1)[:, :, 1:-1] + np.diff(image, 2, axis=2)[:, 1:-1]).var(axis=(1, 2))
    return found


def find(
    splits: Mapping[str, Source], records: Mapping[str, NDArray[Any]], config: DecodeConfig, num_threads: int
) -> list[Finding]:
    """Find the images that can't be decoded, or are unlike the others of a dataset, by (n,) of `RECORD` for each split;
    `config` says how they are decoded for training. The few that need a closer look are read and decoded.
    """
    rows = {field: np.concatenate([records[name][field] for name in splits]) for field in _FIELDS}
    split_of = np.repeat(np.arange(len(splits)), [len(records[name]) for name in splits])
    samples, names = np.concatenate([np.arange(len(records[name])) for name in splits]), [*splits]
    decoder, odd = decoders.build(replace(config, dct_scaling=True)), list[_Odd]()

    def look(row: int) -> tuple[float, float] | str:
        return _look(splits[names[split_of[row]]], int(samples[row]), decoder)

    def place(row: int) -> Place:
        return Place(names[split_of[row]], int(samples[row]))

    seen = np.flatnonzero(rows["state"] == 1)
    sample = seen[np.linspace(0, len(seen) - 1, min(_SAMPLE, len(seen))).astype(np.int64)]
    refused = (rows["state"] == 2) | (rows["height"].astype(np.int64) * rows["width"] > config.max_pixels)
    closely = np.unique(np.concatenate([_suspects(rows, seen), sample, np.flatnonzero(refused)])).tolist()
    spans, sharpness = np.full((2, len(samples)), np.float32(255))
    for row, looked in zip(closely, in_threads(look, closely, num_threads), strict=True):
        if isinstance(looked, str):
            odd.append(("unreadable", row, looked, 1.0))
        else:
            spans[row], sharpness[row] = looked
    odd += _unlike(rows, spans, sharpness, sample) if len(sample) else ()
    turned = [] if config.exif else np.flatnonzero(rows["turn"] > 1).tolist()
    turn = "EXIF orientation {}, which decode.exif=true would apply"
    odd += [("turned", row, turn.format(rows["turn"][row]), 1.0) for row in turned]
    drop = ("unreadable", "blank")
    found = [Finding(kind, at := (place(row),), text, value, at * (kind in drop)) for kind, row, text, value in odd]
    if len(having := np.flatnonzero(rows["extra"])):
        share = int(rows["extra"].sum(dtype=np.int64)) / int(rows["bytes"].sum(dtype=np.int64))
        text = f"{len(having):,} of {len(samples):,} files have another image in them: {share:.1%} of all bytes"
        found.append(Finding("thumbnail", tuple(map(place, having[:6].tolist())), text, float(len(having))))
    left_out = {name: source.left_out for name, source in splits.items() if source.left_out}
    return found + [Finding("ignored", (), f"{name}: {text}") for name, text in left_out.items()]


_Rows = Mapping[str, NDArray[Any]]
_Odd = tuple[str, int, str, float]  # kind, row, text, value


def _suspects(rows: _Rows, seen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of the images `seen` that may be blurred or of one colour."""
    contrast, _, _, span, _, detail = rows["looks"][seen].T[: len(LOOKS)]
    score = rows["bytes"][seen] / rows["height"][seen] / rows["width"][seen] * detail / contrast.clip(1) ** 2
    return seen[(score <= np.quantile(score, _SUSPECTS)) | (span <= _ALIKE)] if len(seen) else seen


def _look(source: Source, sample: int, decoder: Decoder) -> tuple[float, float] | str:
    """The range of an image's luminance, from 0 to 255, and its sharpness; or why it can't be decoded.

    The sharpness is the variance of the Laplacian at a fixed size (Pech-Pacheco et al., "Diatom autofocusing in
    brightfield microscopy", 2000) over that of the luminance, so that little contrast isn't taken for blur.
    """
    try:
        data = source.read(sample)
        pixels = decoder.decode_with_info(data, decoder.read_info(data), None, (_CLOSER, _CLOSER))
    except DataError as error:
        return str(error)
    cv2, scale = opencv(), min(1.0, _CLOSER / max(pixels.shape[:2]))
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    size = [max(1, round(side * scale)) for side in grey.shape[::-1]]
    small = cv2.resize(grey, size, interpolation=cv2.INTER_AREA)
    return float(np.ptp(grey)), float(cv2.Laplacian(small, cv2.CV_32F).var() / max(1.0, small.var()))


def _unlike(rows: _Rows, spans: NDArray[Any], sharpness: NDArray[Any], sample: NDArray[Any]) -> Iterator[_Odd]:
    """Images that are unlike a sample of all by their pixels or size."""
    _, low, high, _, others, _ = rows["looks"].T[: len(LOOKS)]
    height, width = (rows[side].clip(1).astype(np.float32) for side in ("height", "width"))
    side, colours, few = np.sqrt(height * width), np.where(rows["grey"], 0.1, 1.0), rows["grey"].mean() <= _GREY
    odd = spans <= _BLANK
    yield from (("blank", row, "has one colour", 1.0) for row in np.flatnonzero(odd).tolist())
    for kind, values, fence, limit, text in (
        ("dark", high, 3, _DARK, "99 % of it is below {0:.0f} of 255, of half of the images below {1:.0f}"),
        ("bright", 255 - low, 3, _BRIGHT, "95 % of it is within {0:.0f} of white, of half of the images {1:.0f}"),
        ("plain", others, 3, _PLAIN, "{0:.1%} of it has another colour, of half of the images {1:.0%}"),
        ("blurred", sharpness, 1.5, _BLURRED, "has a sharpness of {0:.3f}, half of the images {1:.2f}"),
        ("grey", colours, 3, float(few), "has no colours"),
        ("size", side, 3, np.inf, "{2:.0f}x{3:.0f} pixels, far fewer than most images"),
        ("size", 1 / side, 3, np.inf, "{2:.0f}x{3:.0f} pixels, far more than most images"),
        ("shape", np.minimum(height / width, width / height), 3, _LONG, "{2:.0f}x{3:.0f} pixels"),
    ):
        logs = np.log(values.clip(1e-6))
        first, median, third = np.quantile(logs[sample], [0.25, 0.5, 0.75])
        which = (rows["state"] == 1) & (logs < first - max(fence * (third - first), np.log(2))) & (values < limit)
        if kind not in ("size", "shape"):
            which &= ~odd
            odd |= which
        for row in np.flatnonzero(which).tolist():
            said = text.format(values[row], np.exp(median), width[row], height[row])
            yield kind, row, said, float(median - logs[row])

"""An audit as a page of pictures, a table, and a line for each kind of finding."""

from __future__ import annotations

import base64
import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from effloop.audit.findings import KINDS, Finding, Place
from effloop.config import Config
from effloop.data.decode import Decoder, decoders
from effloop.data.source import Source
from effloop.data.source.base import Kind
from effloop.data.source.exclude import names_in
from effloop.errors import DataError
from effloop.report.files import page as html_page
from effloop.report.values import in_cell, to_text
from effloop.system.cached import cached_property
from effloop.system.files import explained_writing, replacing
from effloop.system.hardware import in_threads

_SIDE, _TINY, _QUALITY = 160, 64, 78  # pixels of thumbnails' longer side, and of those that are shown pixel by pixel
_MAX_PICTURES, _MAX_TOGETHER = 48, 6  # of a kind, and of one finding: 21 kinds of 8 KB each stay below 10 MB

COLUMNS = ("finding", "split", "name", "label", "group", "value", "text", "exclude")

_OF_CLASSES = ("confused", "few", "spelling", "shares")  # whose images are a few examples


@dataclass(frozen=True)
class Audit:
    """What was found in a dataset.

    Attributes:
        config: by which its images are read.
        splits: name -> source.
        findings: of all kinds, each kind's most remarkable first.
        scores: kind -> what the findings mean for the score of a run, such as "without them top1 is 71.2% instead of
            74.8%".
        notes: lines on what predicted the labels.
    """

    config: Config
    splits: Mapping[str, Source]
    findings: Sequence[Finding]
    scores: Mapping[str, str]
    notes: Sequence[str] = ()

    @cached_property
    def excluded(self) -> set[Place]:
        """The images that `data.exclude` would leave out."""
        return {place for finding in self.findings for place in finding.exclude}

    def lines(self) -> dict[str, tuple[str, str]]:
        """What was found: kind -> a number, and what it counts."""
        found = {}
        for kind, title in KINDS.items():
            if not (of := [finding for finding in self.findings if finding.kind == kind]):
                continue
            places = {place for finding in of for place in finding.places}
            number, text = f"{len(places) - len(of) * (kind == 'copy'):,}", of[0].text + ", …" * (len(of) > 1)
            words = [title, self.scores.get(kind, "")]
            if kind == "leak":  # the images that are to be new to a model
                number = f"{sum(place.split == 'val' for place in places):,}"
                words[0] = f"of {len(self.splits.get('val', ())):,} val images are copies of train images"
            elif kind in ("thumbnail", "group"):
                number = f"{of[0].value:,.0f}"
                words = [text.removeprefix(f"{number} ")]
            elif kind in (*_OF_CLASSES, "ignored"):
                number, words = f"{len(of):,}" * (kind != "ignored"), [title, text]
            found[kind] = number, ": ".join(filter(None, words))
        return found

    def label(self, place: Place) -> str:
        """The target of an image as text; nothing where it is a mask."""
        source = self.splits[place.split]
        return "" if source.kind is Kind.masks else source.target_name(place.sample)


def write(found: Audit, page: Path, table: Path, command: str, num_threads: int) -> None:
    """Write the page, with the command that trains without what is left out, and the table: both or, by a ConfigError,
    none.
    """
    text = _render(found, command, num_threads)
    with explained_writing("out", table, "set out=NAME"), replacing(table) as cells, replacing(page) as file:
        file.write(text.encode("utf-8", "replace"))
        wrapped = io.TextIOWrapper(cells, "utf-8", errors="replace", newline="", write_through=True)
        csv.writer(wrapped, lineterminator="\n").writerows([COLUMNS, *_rows(found)])
        wrapped.detach()  # else it would close the file


def _rows(found: Audit) -> Iterator[Sequence[Any]]:
    """A row for each image of each finding; of one without images one that names none. Then those that `data.exclude`
    has left out, so that this table can take the place of that one.
    """
    for group, finding in enumerate(found.findings, 1):
        left_out, what = {*finding.exclude}, (group, f"{finding.value:.6g}", in_cell(to_text(finding.text)))
        for place in finding.places:
            texts = found.splits[place.split].key(place.sample), found.label(place)
            split = place.split if place.split != "all" else ""  # by whose names a later division's samples are found
            yield finding.kind, split, *(in_cell(to_text(text)) for text in texts), *what, int(place in left_out)
        if not finding.places:
            yield finding.kind, "", "", "", *what, 0
    if before := found.config.data.exclude:
        text = in_cell(to_text(f"left out by {before}"))
        for split, names in names_in(Path(os.path.expanduser(before))).items():
            for name in sorted(names):
                yield "excluded", in_cell(to_text(split)), in_cell(name.decode()), "", "", "", text, 1


def _render(found: Audit, command: str, num_threads: int) -> str:
    """The page: it needs nothing else, no network and no script, and everything in it is escaped."""
    lines = found.lines()
    shown = {kind: [*_shown(found.findings, kind)] for kind in lines}
    places = {place: None for of in shown.values() for _, finding in of for place in finding.places[:_MAX_TOGETHER]}
    decode = replace(found.config.decode, exif=True, dct_scaling=True)
    decoder = decoders.build_for(found.config.data.channels, decode)
    thumbnails = in_threads(partial(_thumbnail, decoder, found.splits), places, num_threads)
    return html_page(
        "audit.html.j2",
        {},
        root=found.config.data.root or found.config.data.name,
        found=found,
        lines=lines,
        titles=KINDS,
        shown=shown,
        together=_MAX_TOGETHER,
        side=_SIDE,
        thumbnails=dict(zip(places, thumbnails, strict=True)),
        command=command,
    )


def _shown(findings: Sequence[Finding], kind: str) -> Iterator[tuple[int, Finding]]:
    """The first ones of a kind with their numbers, until there are enough pictures."""
    pictures = 0
    for number, finding in enumerate(findings, 1):
        if finding.kind == kind:
            pictures += min(len(finding.places), _MAX_TOGETHER) or 1
            if pictures > _MAX_PICTURES:
                return
            yield number, finding


def _thumbnail(decoder: Decoder, splits: Mapping[str, Source], place: Place) -> tuple[str, bool]:
    """An upright image as a data: URL, empty if it can't be decoded, and whether it is a few pixels large."""
    try:
        pixels = decoder.decode(splits[place.split].read(place.sample), at_least=(_SIDE, _SIDE))
    except DataError:
        return "", False
    picture, file = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels), io.BytesIO()
    picture.thumbnail((_SIDE, _SIDE))
    picture.save(file, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}", max(picture.size) <= _TINY

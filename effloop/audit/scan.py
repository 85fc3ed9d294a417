"""One pass over all images of a dataset."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.audit.copies import describe
from effloop.audit.odd import measure
from effloop.audit.records import RECORD, SIDE
from effloop.data.decode import DecodeConfig, Decoder, decoders
from effloop.data.image.encoded import EncodedImages, Headers, Kind, read_headers
from effloop.data.image.header import Encoded, Header
from effloop.data.image.orientation import upright, upright_size
from effloop.data.image.pixels import opencv
from effloop.data.source.base import Source
from effloop.data.source.storage.kept import kept_folder
from effloop.data.source.view import unwrapped
from effloop.errors import DataError
from effloop.native import address, function
from effloop.system.files import explained_writing, replacing
from effloop.system.hardware import in_threads, set_own_threads
from effloop.system.progress import Meter

_VERSION = 1  # of what is kept: another number's is made again
_RUN = 64  # images that a thread takes at a time
_STAMPS = 1 << 16  # samples whose names are in memory at a time
_SHORTEST = 600  # bytes before a JPEG's frame header from which on another image may be there


def scan(splits: Mapping[str, Source], index_dir: str | None, num_threads: int) -> dict[str, NDArray[Any]]:
    """Look at all images of some splits, and show the progress.

    What is found is kept in the cache folder: a call that was killed is continued by the next, and images that were
    looked at, however the data were divided, are read again only where they have changed.

    Args:
        splits: name -> opened split.
        index_dir: `data.index_dir`.
        num_threads: how many runs of images are looked at at the same time; 0 means one.

    Returns:
        For each split (N,) of `RECORD`.

    Raises:
        ConfigError: the cache folder can't be written.
    """
    found = {}
    decoder = decoders.build(DecodeConfig("auto", dct_scaling=True))
    with Meter() as meter:
        for name, split in splits.items():
            source, samples = unwrapped(split)
            rows = kept("audit", RECORD, source, index_dir)
            left = samples[rows["state"][samples] == 0]
            meter.begin(name, total=len(left))
            runs = [left[start : start + _RUN] for start in range(0, len(left), _RUN)]
            looks = in_threads(partial(_look, source, decoder), runs, num_threads)
            for run, records in zip(runs, looks, strict=True):
                states = records["state"].copy()
                records["state"] = 0  # until all else is there: this process may be killed
                rows[run] = records
                rows["state"][run] = states
                meter.advance(len(run))
            found[name] = rows if np.array_equal(samples, np.arange(len(rows))) else rows[samples]
    return found


def kept(name: str, record: np.dtype[Any], source: Source, index_dir: str | None) -> NDArray[Any]:
    """A record for each sample of a source, mapped from the file that they are kept in; 0 of one that is new or has
    changed.
    """
    where = hashlib.sha256(os.fsencode(os.path.abspath(source.where))).hexdigest()[:16]
    path, stamps = kept_folder(index_dir) / f"{name}-{where}.index", _stamps(source)
    row = np.dtype([("of", np.uint64), ("record", record)])  # of which sample it is, by `_stamps`
    with explained_writing("data.index_dir", path, "set data.index_dir=PATH"):
        before = _mapped(path, row)
        if not np.array_equal(before["of"], stamps):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                os.posix_fallocate(file.fileno(), 0, len(stamps) * row.itemsize or 1)  # a full disk is found here
                _, now, then = np.intersect1d(stamps, before["of"], return_indices=True)
                rows = _mapped(Path(file.name), row)
                rows["of"], rows[now] = stamps, before[then]
        found: NDArray[Any] = _mapped(path, row)["record"]
    return found


def _mapped(path: Path, row: np.dtype[Any]) -> NDArray[Any]:
    try:
        return np.memmap(path, row, "r+")
    except (FileNotFoundError, ValueError):  # none, or no whole rows
        return np.empty(0, row)


def _stamps(source: Source) -> NDArray[np.uint64]:
    """(n,) what identifies the bytes of each sample: its name and size, and when they were changed."""
    of_all = json.dumps([_VERSION, source.identity()], sort_keys=True, default=str)

    def changed(sample: int) -> int | str:
        try:
            when = source.modified_ns(sample)
        except DataError:
            when = 0
        return of_all if when is None else when

    found = np.empty(len(source), np.uint64)
    for start in range(0, len(source), _STAMPS):
        samples = range(start, min(start + _STAMPS, len(source)))
        names = source.raw_keys(np.array(samples)).items()
        found[start : samples.stop] = [
            int.from_bytes(
                hashlib.blake2b(
                    b"%b %d %b" % (name, source.size(sample), str(changed(sample)).encode()), digest_size=8
                ).digest()
            )
            for sample, name in zip(samples, names, strict=True)
        ]
    return found


def _look(source: Source, decoder: Decoder, samples: NDArray[np.int64]) -> NDArray[Any]:
    """The records of (n,) samples."""
    set_own_threads(1)  # the calls are parallel; an operation by two threads takes 40 times as long where both are busy
    images, records = _read(source, samples), np.zeros(len(samples), RECORD)
    headers = read_headers(images, lambda row: _header(decoder, images[row]), turn=True)
    thumbnails, digests = np.zeros((len(samples), SIDE, SIDE, 3), np.uint8), np.empty(len(samples), np.uint64)
    done = np.empty(len(samples), np.bool_)
    function("effloop_thumbnails", "pplppp")(
        *(address(images.addresses), address(images.sizes), len(images)),
        *(address(thumbnails), address(digests), address(done)),
    )
    for row, header in headers.others.items():
        done[row] &= header.height > 0
        thumbnails[row] = upright(thumbnails[row], header.orientation)
    for row in np.flatnonzero(~done).tolist():
        done[row] = _decode(decoder, images[row], thumbnails[row])
    records["state"], records["digest"] = np.where(done, 1, 2), digests
    records["bytes"] = images.sizes.clip(max=2**32 - 1)
    records["grey"] = done & (thumbnails == thumbnails[..., :1]).all((1, 2, 3))
    records["code"], records["looks"] = describe(thumbnails), measure(thumbnails)
    _describe_files(records, images, headers)
    return records


def _describe_files(records: NDArray[Any], images: EncodedImages, headers: Headers) -> None:
    """Write what the headers say."""
    records["turn"], jpeg, frames = 1, headers.rows["kind"] == Kind.jpeg, headers.rows["at"].copy()
    records["height"], records["width"] = headers.sizes.T
    for row, header in headers.others.items():
        records["turn"][row], jpeg[row], frames[row] = header.orientation, header.format == "JPEG", header.sof_at
        stored = upright_size(header.height, header.width, header.orientation)
        records["height"][row], records["width"][row] = stored
    for row in np.flatnonzero(jpeg & (frames > _SHORTEST)).tolist():
        before = bytes(images[row][2 : frames[row]])
        start = before.find(b"\xff\xd8\xff")
        records["extra"][row] = max(0, before.rfind(b"\xff\xd9") + 2 - start) if start >= 0 else 0


def _read(source: Source, samples: NDArray[np.int64]) -> EncodedImages:
    """The encoded images; empty where one can't be read."""
    source.will_need(samples.tolist())
    try:
        return source.read_run(samples)
    except DataError:
        return EncodedImages.of([_read_one(source, sample) for sample in samples.tolist()])


def _read_one(source: Source, sample: int) -> Encoded:
    try:
        return source.read(sample)
    except DataError:
        return b""


def _header(decoder: Decoder, data: Encoded) -> Header:
    try:
        return decoder.read_info(data)
    except DataError:
        return Header("", 0, 0, plain=False, complete=False)


def _decode(decoder: Decoder, data: Encoded, out: NDArray[np.uint8]) -> bool:
    """Write the thumbnail of one image, if it can be decoded."""
    try:
        pixels = decoder.decode(data, at_least=(SIDE, SIDE))
    except DataError:
        return False
    out[:] = opencv().resize(pixels, (SIDE, SIDE), interpolation=opencv().INTER_AREA)
    return True

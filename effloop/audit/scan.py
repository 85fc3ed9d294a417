"""One pass over all images of a dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.audit.copies import describe
from effloop.audit.odd import measure
from effloop.audit.records import FORMATS, RECORD, SIDE
from effloop.data.decode import DecodeConfig, Decoder, decoders
from effloop.data.decode.base import Resizes
from effloop.data.image.encoded import EncodedImages, Kind, read_headers
from effloop.data.image.header import Encoded, Header
from effloop.data.image.orientation import upright_size
from effloop.data.image.pixels import resize_into
from effloop.data.source.base import Source
from effloop.data.source.storage.kept import kept_folder
from effloop.data.source.view import unwrapped
from effloop.errors import ConfigError, DataError
from effloop.system.progress import Meter, in_threads

_VERSION = 1  # of a record: another number's are made again
_RUN = 64  # images that a thread takes at a time


def scan(splits: Mapping[str, Source], index_dir: str | None, num_threads: int) -> dict[str, NDArray[Any]]:
    """Look at all images of some splits, and show the progress.

    What is found is kept in the cache folder: a call that was killed is continued by the next, and of data that were
    looked at, however divided, nothing is read.

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
            found[name] = rows[samples]
    return found


def kept(name: str, record: np.dtype[Any], source: Source, index_dir: str | None) -> NDArray[Any]:
    """A record for each sample of a source, mapped from the file that they are kept in; 0 in a new one."""
    what = json.dumps([_VERSION, record.itemsize, source.identity()], sort_keys=True, default=str)
    path = kept_folder(index_dir) / f"{name}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.index"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.truncate(len(source) * record.itemsize)
        return np.memmap(path, record, "r+")
    except OSError as error:
        raise ConfigError(
            f"data.index_dir: {path} can't be written: {error.strerror}; set data.index_dir=PATH"
        ) from None


def _look(source: Source, decoder: Decoder, samples: NDArray[np.int64]) -> NDArray[Any]:
    """The records of (n,) samples."""
    images, records = _read(source, samples), np.zeros(len(samples), RECORD)
    headers = read_headers(images, lambda row: _header(decoder, images[row]), turn=True)
    thumbnails = np.zeros((len(samples), SIDE, SIDE, 3), np.uint8)
    boxes = np.concatenate([np.zeros_like(headers.sizes), headers.sizes], axis=1)
    wanted = Resizes(boxes, np.zeros(len(samples), np.bool_), (SIDE, SIDE), thumbnails)
    done = decoder.decode_resized(images, headers, wanted)
    for row in np.flatnonzero(~done).tolist():
        done[row] = _decode(decoder, images[row], headers[row], thumbnails[row])
    records["state"] = np.where(done, 1, 2)
    records["format"], records["turn"] = FORMATS.index("JPEG"), 1
    records["height"], records["width"] = headers.sizes.T
    for row, header in headers.others.items():
        records["format"][row] = FORMATS.index(header.format) if header.format in FORMATS else 0
        records["turn"][row] = header.orientation
        stored = upright_size(header.height, header.width, header.orientation)
        records["height"][row], records["width"][row] = stored
    records["format"][headers.rows["kind"] == Kind.pnm] = FORMATS.index("PNM")
    records["grey"] = done & (thumbnails == thumbnails[..., :1]).all((1, 2, 3))
    records["bytes"] = images.sizes.clip(max=2**32 - 1)
    records["extra"] = [_extra(images[row], headers[row]) for row in range(len(samples))]
    records["digest"] = [_digest(data) for data in images]
    records["code"], records["looks"] = describe(thumbnails), measure(thumbnails)
    return records


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


def _decode(decoder: Decoder, data: Encoded, header: Header, out: NDArray[np.uint8]) -> bool:
    """Write the thumbnail of one image, if it can be decoded."""
    try:
        pixels = decoder.decode_with_info(data, header, (0, 0, header.height, header.width), (SIDE, SIDE))
    except (DataError, ValueError):
        return False
    resize_into(pixels, out)
    return True


def _extra(data: Encoded, header: Header) -> int:
    """Bytes of a JPEG within another's segments."""
    before = bytes(data[2 : header.sof_at])
    start = before.find(b"\xff\xd8\xff")
    return max(0, before.rfind(b"\xff\xd9") + 2 - start) if start >= 0 else 0


def _digest(data: Encoded) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

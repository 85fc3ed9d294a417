"""Small tar archives for tests."""

import io
import tarfile
from pathlib import Path

from effloop.data.source.formats.tar import tar_header

Members = list[tuple[str, bytes]]


def make(path: Path, members: Members, fmt: int = tarfile.USTAR_FORMAT, **fields: object) -> Path:
    """An archive as Python's tarfile writes it; `fields` are set in every header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=fmt) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in fields.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(data))
    return path


def pairs(*names: str) -> Members:
    """The members of good samples; the labels count up."""
    return [
        item for label, name in enumerate(names) for item in ((f"{name}.jpg", b"image"), (f"{name}.cls", b"%d" % label))
    ]


def edited(name: bytes, size: int, at: int, field: bytes) -> bytes:
    """A header with another field in it, and the checksum that fits."""
    header = tar_header(name, size)
    return with_checksum(header[:at] + field + header[at + len(field) :])


def with_checksum(header: bytes) -> bytes:
    """A header that was altered, as if it had been written so."""
    return header[:148] + b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 256) + header[156:]

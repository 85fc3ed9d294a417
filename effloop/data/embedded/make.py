"""Makes `clothing.effloop`: python -m effloop.data.embedded.make ROOT OUT

ROOT is the clothing set as ROOT/{train,val}/CLASS/*.jpg. Photographs are shrunk to a short side of
96 pixels and written as JPEG of quality 80, 3.3 KB on average.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from effloop.data.source.folder import FolderConfig, FolderSource
from effloop.data.source.memmap import Record, write_memmap

SHORT_SIDE = 96
QUALITY = 80


def shrunk(data: bytes) -> bytes:
    """An encoded photograph at a short side of 96 pixels, without metadata."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = SHORT_SIDE / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=QUALITY, optimize=True)
    return out.getvalue()


def records(source: FolderSource) -> Iterator[Record]:
    """The samples of one split, shrunk."""
    for index, label in enumerate(source.labels.tolist()):
        yield source.key(index).encode(), label, shrunk(bytes(source.read(index)))


def main(root: str, out: str) -> None:
    """Write the file OUT from the folder ROOT."""
    splits = {split: FolderSource(FolderConfig(name="folder", root=root), split) for split in ("train", "val")}
    write_memmap(Path(out), splits["train"].classes, {name: records(source) for name, source in splits.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])

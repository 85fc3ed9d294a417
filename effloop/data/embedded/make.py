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
from effloop.data.source.formats.memmap import write_memmap
from effloop.data.source.storage.writing import Dataset, Record

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


class Shrunk:
    """The samples of one split, shrunk."""

    num_bytes = 0  # known when they are made; this format doesn't ask

    def __init__(self, source: FolderSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Record]:
        for index, label in enumerate(self.source.labels.tolist()):
            yield Record(self.source.raw_key(index), label, shrunk(bytes(self.source.read(index))))


def main(root: str, out: str) -> None:
    """Write the file OUT from the folder ROOT."""
    splits = {split: FolderSource(FolderConfig(name="folder", root=root), split) for split in ("train", "val")}
    about = {"payload": "jpeg", "quality": QUALITY, "short_side": SHORT_SIDE}
    records = {name: Shrunk(source) for name, source in splits.items()}
    write_memmap(Path(out), Dataset(splits["train"].classes, records, about))


if __name__ == "__main__":
    main(*sys.argv[1:])

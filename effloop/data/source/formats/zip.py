"""Images in a ZIP archive, in class folders: SPLIT/CLASS/NAME.jpg, compressed or not; copied once."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from effloop.data.image.header import EXTENSIONS
from effloop.data.source.base import WHOLE, NoSplitError, sources
from effloop.data.source.formats.npz import DAMAGED
from effloop.data.source.root import begins_with, root_file
from effloop.data.source.storage import imported, loose, packed, writing
from effloop.data.source.vocabulary import SPLIT_WORDS
from effloop.errors import DataError, reason


@sources.register("zip", packed.PackedConfig)
class ZipSource(imported.ImportedSource):
    """A ZIP archive of images in class folders, SPLIT/CLASS/NAME.jpg."""

    @classmethod
    def claims(cls, root: Path) -> bool:
        if not root.is_file() or not begins_with(root, b"PK\x03\x04"):
            return False
        try:
            with zipfile.ZipFile(root) as archive:
                return bool(_images(archive))
        except (*DAMAGED, ValueError):
            return root.suffix == ".zip"

    def originals(self) -> Sequence[Path]:
        return [root_file(self.config)]

    def contents(self, files: Sequence[Path]) -> imported.Contents:
        try:
            with zipfile.ZipFile(files[0]) as archive:
                images = _images(archive)
        except (*DAMAGED, ValueError) as error:
            raise DataError(f"{files[0]} is damaged, or no ZIP archive: {reason(error)}; get it again") from None
        splits = {path: path.parts[-3] if path.parts[-3:-2] else WHOLE for path in images}
        found = {path: info for path, info in images.items() if self.split == splits[path]}
        if self.split == WHOLE:  # of an archive without splits, whatever folder its classes are in
            found = {path: info for path, info in images.items() if splits[path] not in SPLIT_WORDS}
        if not found:
            raise NoSplitError(
                f"{files[0]} has no images in {self.split}/CLASS/; set data.train_split or data.val_split to one of "
                f"{', '.join(sorted({*splits.values()})[:8]) or 'others'}"
            )
        if large := next((path for path, info in found.items() if info.file_size > loose.MAX_BYTES), None):
            raise DataError(f"{files[0]}: {large} has more than {loose.MAX_BYTES:,} bytes; leave it out")
        order = sorted(found, key=lambda path: path.as_posix().encode())
        classes = list(dict.fromkeys(sorted((path.parent.name for path in order), key=str.encode)))
        places = {name: place for place, name in enumerate(classes)}

        def records() -> Iterator[writing.Record]:
            with zipfile.ZipFile(files[0]) as archive:
                for path in order:
                    try:
                        data = archive.read(found[path])
                    except DAMAGED as error:
                        raise DataError(f"{files[0]}: {path} is damaged: {reason(error)}; get it again") from None
                    yield writing.Record("/".join(path.parts[-2:]).encode(), places[path.parent.name], data)

        return imported.Contents(records(), len(order), sum(info.file_size for info in found.values()), classes)


def _images(archive: zipfile.ZipFile) -> Mapping[PurePosixPath, zipfile.ZipInfo]:
    """The images in class folders, without what macOS adds."""
    paths = {PurePosixPath(info.filename): info for info in archive.infolist()}
    return {
        path: info
        for path, info in paths.items()
        if path.suffix.lower() in EXTENSIONS and len(path.parts) > 1 and path.parts[0] != "__MACOSX"
    }

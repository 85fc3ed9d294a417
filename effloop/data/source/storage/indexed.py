"""Sources of files that other programs write too: with an index beside them, or one made by scanning them."""

from __future__ import annotations

from pathlib import Path

from effloop.data.source.base import Kind
from effloop.data.source.storage.columns import ColumnFile
from effloop.data.source.storage.index import (
    open_index,
    verify_files,
)
from effloop.data.source.storage.mapped import MappedFiles, Payload, ScatteredPayload
from effloop.data.source.storage.packed import Split, open_columns, targets_in
from effloop.data.source.storage.scanned import ScannedSource
from effloop.data.source.storage.targets import Targets


class IndexedSource(ScannedSource):
    """Files with an index beside them, or one that is kept of a scan."""

    def payload(self, files: MappedFiles, index: ColumnFile) -> Payload:
        """How samples are read; overridden by a format whose samples may be in parts."""
        return ScatteredPayload(files, *(index.unsigned(name) for name in ("file", "offset", "size")))

    def open_split(self) -> Split:
        root = self.base()
        found = open_index(root, self.split)
        return self.opened(*(found or self._kept_index(root)))

    def opened(self, index: ColumnFile, files: list[Path]) -> Split:
        """The split that an index is of; arguments as from `open_index`."""
        header = index.meta["header"]
        if header["classes"] is None:
            names = self._class_names(self.base(), index)
            targets = {"targets": Targets(Kind.masks, tuple(names)).header()} if "targets" in header else {}
            header = {**header, "classes": names, **targets}
        self._index, self._files, self._file_of = index, files, index.unsigned("file")
        masks: ScatteredPayload | None = None
        if targets_in(header).kind is Kind.masks and "mask_offset" in index:  # in the files, beside their images
            places = map(index.unsigned, ("file", "mask_offset", "mask_size"))
            masks = ScatteredPayload(MappedFiles(self._files), *places)
        return open_columns(index, header, self.payload(MappedFiles(self._files), index), masks=masks)

    def verify_index(self) -> None:
        super().verify_index()
        verify_files(self.base(), self.split)

"""Sources of files that other programs write too: with an index beside them, or one made by scanning them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.base import Kind
from effloop.data.source.ranges import Ranges
from effloop.data.source.storage.columns import ColumnFile
from effloop.data.source.storage.index import (
    open_index,
    verify_files,
)
from effloop.data.source.storage.mapped import MappedFiles, Payload, ScatteredPayload, WindowedFiles
from effloop.data.source.storage.packed import Split, open_columns, targets_in
from effloop.data.source.storage.scanned import ScannedSource
from effloop.data.source.storage.targets import Targets
from effloop.errors import DataError
from effloop.system.cached import cached_property

if TYPE_CHECKING:
    from effloop.data.remote.window import WindowState


class IndexedSource(ScannedSource):
    """Files with an index beside them, or one that is kept of a scan."""

    def payload(self, files: MappedFiles, index: ColumnFile) -> Payload:
        """How samples are read; overridden by a format whose samples may be in parts."""
        return ScatteredPayload(files, *(index.unsigned(name) for name in ("file", "offset", "size")))

    def open_split(self) -> Split:
        root = self.base()
        found = open_index(root, self.split, whole=not self.in_windows)
        return self.opened(*(found or self._kept_index(root)))

    def shard_files(self) -> tuple[list[Path], NDArray[np.int64]]:
        """The files of the split, and how many samples are in each."""
        counts = np.zeros(len(self._files), np.int64)
        np.add.at(counts, self._file_of[self._same_file.starts], self._same_file.lengths)
        return self._files, counts

    @property
    def in_order(self) -> bool:
        """Whether the samples of each file follow each other."""
        files = self._file_of[self._same_file.starts]
        return bool((files[1:] > files[:-1]).all())

    def present(self) -> Ranges | None:
        if not self.in_windows:
            return None
        here = np.array([file.exists() for file in self._files])[self._file_of[self._same_file.starts]]
        return Ranges(self._same_file.starts[here], self._same_file.stops[here])

    @cached_property
    def _same_file(self) -> Ranges:
        """Samples that are in the same file; 0.2 s for 100 million."""
        with self._index.read_ahead("file"):
            found = Ranges.of_equal(self._file_of)
        if (self._file_of[found.starts] >= len(self._files)).any():
            raise DataError(
                f"{self.where} is damaged: its index has samples in files that it doesn't list; convert again"
            )
        return found

    @cached_property
    def window_state(self) -> WindowState:
        """What is known of the files where only some are here at a time."""
        from effloop.data.remote.window import WindowState

        return WindowState(self.base())

    def __getstate__(self) -> dict[str, Any]:
        windows = {"window_state": self.window_state} if self.in_windows else {}
        return {**super().__getstate__(), **windows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "window_state" in state:
            self.window_state = state["window_state"]
        super().__setstate__(state)

    def _mapped(self) -> MappedFiles:
        return WindowedFiles(self._files, self.window_state) if self.in_windows else MappedFiles(self._files)

    def opened(self, index: ColumnFile, files: list[Path]) -> Split:
        """The split that an index is of; arguments as from `open_index`."""
        header = index.meta["header"]
        if header["classes"] is None:
            names = self._class_names(self.base(), index)
            masks = Targets(Kind.masks, tuple(names)).header() if "targets" in header else None
            header = {**header, "classes": names, **({"targets": masks} if masks else {})}
        self._index, self._files, self._file_of = index, files, index.unsigned("file")
        masks = None
        if targets_in(header).kind is Kind.masks and "mask_offset" in index:  # in the files, beside their images
            masks = ScatteredPayload(self._mapped(), *map(index.unsigned, ("file", "mask_offset", "mask_size")))
        return open_columns(index, header, self.payload(self._mapped(), index), masks=masks)

    def verify_index(self) -> None:
        for file in self._files if self.in_windows else ():
            self.window_state.wait_for(file)  # else each of those that aren't here would be a problem
        super().verify_index()
        verify_files(self.base(), self.split)

"""Sources whose files are scanned once where no index is beside them, and what is kept of that."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from effloop.data.source.base import Kind, NoSplitError, printable
from effloop.data.source.root import root_folder
from effloop.data.source.storage.columns import ColumnFile
from effloop.data.source.storage.index import (
    NAMES,
    Entry,
    IndexWriter,
    open_index,
    read_names,
    verify_files,
)
from effloop.data.source.storage.kept import file_state, listing, open_kept, said
from effloop.data.source.storage.mapped import MappedFiles, Payload, ScatteredPayload
from effloop.data.source.storage.packed import PackedConfig, PackedSource, Split, open_columns, targets_in
from effloop.data.source.storage.shards import counted, find_shards
from effloop.data.source.storage.targets import CLASSES, Targets, read_targets, unnamed
from effloop.errors import DataError

MAX_UNNAMED = 1 << 20
"""Classes without names. 30,000,000, from one wrong label, took 3 GB of numbers as text."""


class IndexedSource(PackedSource):
    """Files with an index beside them; otherwise they are scanned once, and what is found is kept in `data.index_dir`.

    A format finds the files of a split (`shards`), by their names alone, and scans each of them (`scan_file`).

    Attributes:
        duplicate_fix: what to do about two samples with the same key.
        scans_masks: whether `scan_file` finds masks, too.
    """

    config: PackedConfig
    duplicate_fix: ClassVar[str] = "remove one of the two"
    scans_masks: ClassVar[bool] = False

    @abstractmethod
    def shards(self, root: Path) -> list[Path]:
        """The files of `self.split`, in order; empty if there are none."""

    @abstractmethod
    def scan_file(self, files: Sequence[Path], number: int, targets: Targets) -> Iterator[Entry]:
        """Every sample in one of these files, in order, in bounded memory; `targets` is what theirs are.

        Raises:
            DataError: damaged or unsupported content; the message has file and key.
        """

    def scan(self, files: Sequence[Path], targets: Targets) -> Iterator[Entry]:
        """Every sample in these files; as `scan_file`."""
        for number in range(len(files)):
            yield from self.scan_file(files, number, targets)

    def sidecars(self, files: Sequence[Path]) -> list[Path]:
        """Other files that a scan reads: if one of them changes, the kept index is not used."""
        return []

    def base(self) -> Path:
        """Where the dataset is: its folder, or its only file."""
        return root_folder(self.config).absolute()

    def class_names(self, files: Sequence[Path], targets: Targets) -> list[str] | None:
        """The classes that these files name themselves, in the order of their labels, if the format has room for it."""
        return None

    def about_in(self, files: Sequence[Path]) -> dict[str, Any]:
        """What to note in the index about files that EffLoop didn't write, as of `writing.Dataset.about`."""
        return {}

    def embedded_header(self, files: Sequence[Path]) -> dict[str, Any] | None:
        """The header of a split that EffLoop wrote into these files themselves, if the format has room for it.

        Raises:
            DataError: missing, of another version, or damaged.
        """
        return None

    def learned_in(self, files: Sequence[Path]) -> Targets:
        """What the targets in these files are, where no `targets.json` says it."""
        return CLASSES

    @staticmethod
    def key_identity(key: bytes) -> bytes:
        """The part of a key that must be unique in a split."""
        return key

    def find(self, root: Path, endings: Sequence[str]) -> list[Path]:
        """`find_shards` for this split."""
        return find_shards(root, self.split, endings, self._splits)

    @property
    def _splits(self) -> set[str]:
        """Names of the training and validation split."""
        return {self.config.train_split, *filter(None, [self.config.val_split])}

    def _counted(self) -> set[str]:
        """The splits over which classes without names are counted."""
        return counted(self.config, self.split, self._has_files)

    def _has_files(self, split: str) -> bool:
        try:
            return bool(self._of_split(split).shards(self.base()))
        except NoSplitError:
            return False

    def _kept_index(self, root: Path) -> tuple[ColumnFile, list[Path]]:
        """The index of files that have none beside them: kept from an earlier scan, or from a new one."""
        files = self.shards(root)
        if not files:
            raise NoSplitError(
                f"data.root: '{self.config.root}' has no files of the split '{self.split}'; {listing(root)}"
            )
        states = [file_state(file) for file in (*files, *self.sidecars(files), *said(root))]

        def is_current(index: ColumnFile) -> bool:
            return index.meta.get("files") == states and isinstance(index.meta.get("header"), dict)

        def write(path: Path) -> None:
            self._write_scan(path, files, states, read_targets(root) or self.learned_in(files))

        identity = f"{self.config.name}\0{self.base().resolve()}\0{self.split}\0{self.own_options}"
        return open_kept(self.config.name, self.config.index_dir, identity, is_current, write), files

    def _write_scan(self, path: Path, files: Sequence[Path], states: list[Any], targets: Targets) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = self.embedded_header(files)
        targets = targets_in(own) if own else targets
        if targets.kind is Kind.masks and not self.scans_masks:
            raise DataError(
                f"{self.where} has masks, which are in {self.split}.index beside its files, and that is not there: put "
                "it back, or convert again"
            )
        names = own["classes"] if own else self.class_names(files, targets)
        writer = IndexWriter(None if names is None else len(names), path.parent, self.key_identity, targets)
        for entry in self.read_originals(self.scan(files, targets)):
            try:
                writer.add_entry(entry)
            except DataError as error:  # a label that can't be one
                raise DataError(f"{files[entry.file]}: {error}; correct it or leave it out") from None
        writer.check_unique(files, self.duplicate_fix)
        found = writer.fingerprint()
        if own and own["fingerprint"] != found:
            expected, count = own["fingerprint"]["samples"], found["samples"]
            other = "doesn't match their keys and labels"
            what = f"says {expected} samples, it holds {count}" if expected != count else other
            raise DataError(f"{self.where} is damaged: its header {what}; convert it again")
        header = own or {**unnamed(targets, names), "about": self.about_in(files), "fingerprint": found}
        writer.write(path, {"header": header, "files": states, "labels_end": writer.max_label + 1})

    def _class_names(self, root: Path, index: ColumnFile) -> list[str]:
        """Class names for files that store numbers: `classes.txt`, or the numbers up to the largest in any split."""
        end = index.meta["labels_end"]
        names = read_names(root)
        if names is not None:
            if end > len(names):
                raise DataError(
                    f"{root / NAMES} names {len(names)} classes, but '{self.split}' has the label {end - 1}; "
                    "add the missing names"
                )
            return names
        self._check_few(index, root)
        for split in filter(self._has_files, self._counted() - {self.split}):
            other = self._of_split(split)
            scanned = other._kept_index(root)[0]
            other._check_few(scanned, root)
            end = max(end, scanned.meta["labels_end"])
        return [str(label) for label in range(end)]

    def _of_split(self, split: str) -> Self:
        """A source of another split, not opened: only its files are asked of it."""
        found = type(self).__new__(type(self))
        found.config, found.split = self.config, split
        return found

    def _check_few(self, index: ColumnFile, root: Path) -> None:
        """Refuse labels that can't be class numbers, before a name is made for each number up to the largest."""
        end = index.meta["labels_end"]
        if end > MAX_UNNAMED:
            key = bytes(index.blobs("key")[int(index["label"].argmax())])
            raise DataError(
                f"{self.where}/{printable(key)} has the label {end - 1}; without {root / NAMES}, which names the "
                f"classes one a line, {MAX_UNNAMED - 1} is the largest: correct the label or write that file"
            )

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

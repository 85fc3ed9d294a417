"""Shards of a URL's training split that come and go: what tells one from another, and what a scan found in each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from effloop.data.remote.manifest import Manifest
from effloop.data.remote.window_pass import ShardPass
from effloop.data.source.config import DataConfig
from effloop.data.source.root import download_folder
from effloop.data.source.storage.parts import Part
from effloop.errors import PROGRAM, DataError, printable_lines
from effloop.system.cached import cached_property

_ENDING = ".part"


@dataclass(frozen=True)
class ComingShards:
    """The shards of a split.

    Attributes:
        config: of the data.
        manifest: of all its files.
        names: of the shards, in order, as in the manifest.
        kept: folder for what was found in them.
    """

    config: DataConfig
    manifest: Manifest
    names: Sequence[str]
    kept: Path

    def scan(self, keep: Callable[[int, Path], None]) -> None:
        """Have each shard here for once, a window of them at a time, unless it is known what is in it.

        Args:
            keep: scans a shard, given by its place among the names, and writes what it finds to a path.

        Raises:
            ConfigError, DataError: they can't be fetched, or as from `keep`.
            OSError: what is found can't be written.
        """
        paths = dict(zip(self.names, self._paths, strict=True))

        def missing() -> list[str]:
            return [name for name, path in paths.items() if not path.exists()]

        if missing():
            self._scan(missing, keep)
        for path in {*self.kept.glob(f"*{_ENDING}")} - {*self._paths}:  # of shards that have changed, or are gone
            path.unlink(missing_ok=True)

    def _scan(self, missing: Callable[[], list[str]], keep: Callable[[int, Path], None]) -> None:
        self.kept.mkdir(parents=True, exist_ok=True)
        assert self.config.window is not None
        places = {name: place for place, name in enumerate(self.names)}
        folder, limit_gb = download_folder(self.config), self.config.download_gb
        turns = ShardPass(self.manifest, self.names, folder, limit_gb, self.config.window)
        with closing(turns.each(missing, self._say)) as names:
            for name in names:
                keep(places[name], self._paths[places[name]])

    def part(self, place: int) -> Part:
        """What was found in a shard that is given by its place.

        Raises:
            DataError: it was damaged since.
        """
        path = self._paths[place]
        try:
            return Part(path)
        except DataError:  # also an empty file, or one of another version
            path.unlink(missing_ok=True)
            raise DataError(f"{path} was damaged, and is removed; start again, so that its shard is scanned") from None

    @cached_property
    def _paths(self) -> list[Path]:
        files = {self.manifest.name(file): file for file in self.manifest.files}
        return [self.kept / f"{files[name].identity(self.manifest.place)}{_ENDING}" for name in self.names]

    def _say(self, names: Sequence[str], num_bytes: int) -> None:
        line = (
            f"data.window: no index beside the shards of {self.config.root} says what is in them; {len(names):,} "
            f"({decimal(num_bytes)}) are fetched and scanned now, once, {self.config.window} at a time; {PROGRAM} "
            "convert writes such an index"
        )
        print(f"effloop: {printable_lines(line)}", file=sys.stderr, flush=True)

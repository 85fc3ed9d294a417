"""Whether a window of shards has room, and what is fetched before the first one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from effloop.data.remote.manifest import Manifest, RemoteFile
from effloop.errors import ConfigError, DataError

_BLOCK = 4096


@dataclass(frozen=True)
class Window:
    """How many shards are here at a time.

    Attributes:
        count: of shards.
        first: names of files that are fetched before all others, where they are there, as they say which are shards.
        shards_of: `data.root` on this machine, with these files and links to where all others will be -> names of the
            shards.
    """

    count: int
    first: Collection[str]
    shards_of: Callable[[Path], list[str]]


def disk_bytes(file: RemoteFile, *, fetched: bool = True) -> int:
    """What a file takes at most, in whole blocks; while it is fetched, a list of its parts is there, too."""
    return (-(-file.size // _BLOCK) + (not fetched)) * _BLOCK


def before_training(manifest: Manifest, shards: Collection[str], count: int, room: float, there: int) -> Manifest:
    """The files that are fetched before the first step: all but the shards, and one of these if none is here.

    Args:
        manifest: of the dataset.
        shards: names of its shards.
        count: how many of them are here at a time.
        room: bytes that all may have.
        there: number of shards that are here.

    Raises:
        ConfigError: there are too few shards, or two windows of them have no room.
        DataError: a shard is not among the files.
    """
    names = {manifest.name(file) for file in manifest.files}
    if lacking := sorted(set(shards) - names):
        raise DataError(f"data.root: '{manifest.root}' has no {lacking[0]}, which its index lists; convert it again")
    if count >= len(shards):
        raise ConfigError(
            f"data.window: {count} of {len(shards)} shards are all of them; drop data.window, or set it to less than "
            "their number"
        )
    found = [file for file in manifest.files if manifest.name(file) in shards]
    others = [file for file in manifest.files if manifest.name(file) not in shards]
    sizes = sorted((disk_bytes(file, fetched=False) for file in found), reverse=True)
    rest = sum(map(disk_bytes, others))
    needed = rest + 2 * sum(sizes[:count])
    if needed > room:
        fits = max((each for each in range(count) if rest + 2 * sum(sizes[:each]) <= room), default=0)
        smaller = f"data.window={fits}, " if fits else ""
        raise ConfigError(
            f"data.window: {count} needs {_mb(needed)}, two windows of {count} shards and {_mb(rest)} of other files, "
            f"and there is room for {_mb(room)}; set {smaller}data.download_gb higher or data.download_dir to a larger "
            "disk"
        )
    return replace(manifest, files=tuple(others + found[: not there]))


def _mb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.3f} MB"

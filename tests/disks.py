"""Disks that are small, and full."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own, of so many bytes; the test is skipped where none can be mounted."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "effloop-test", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"a full disk needs mount: {error}")
    if done.returncode:
        pytest.skip(f"a full disk can't be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no free block on the disk of a folder."""
    block = bytes(4096)
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(block)
    assert shutil.disk_usage(folder).free == 0

"""Conversions that are killed and started again. By hand: python tests/kills.py [KILLS [FORMAT ...]]"""

from __future__ import annotations

import filecmp
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from runs import call, make_photos, start

OPTIONS = ("max_side=24", "num_workers=2")


def convert(photos: Path, out: Path, to: str, *options: str) -> None:
    """A conversion that nothing disturbs."""
    code, _, errors = call("convert", *_words(photos, out, to), *options, cwd=out.parent)
    assert code == 0, errors


def kill(photos: Path, out: Path, to: str, *options: str, when: Callable[[Path], bool]) -> bool:
    """Start a conversion and SIGKILL it and all it started as soon as `when` says so of its work folder.

    Returns:
        Whether it was killed; else it had come to its end.
    """
    work = out.parent / f".{out.name}.partial"
    with start("convert", *_words(photos, out, to), *options, cwd=out.parent) as process:
        while process.poll() is None:
            if when(work):
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return process.returncode == -signal.SIGKILL
        process.communicate()
    return False


def _words(photos: Path, out: Path, to: str) -> tuple[str, ...]:
    return f"data.root={photos}", f"to={to}", f"out={out}"


def same(one: Path, other: Path) -> bool:
    """Whether two files, or two folders and all in them, are equal to the byte."""
    if one.is_file():
        return other.is_file() and filecmp.cmp(one, other, shallow=False)
    names = [sorted(path.relative_to(root).as_posix() for path in root.rglob("*")) for root in (one, other)]
    return names[0] == names[1] and all(same(one / n, other / n) for n in names[0] if (one / n).is_file())


def kept(work: Path) -> int:
    """How many re-encoded images are in the journals."""
    return sum(path.stat().st_size // 8 for path in work.glob("journal/*/*/ends"))


def check(photos: Path, out: Path, to: str, wanted: Path, *, when: Callable[[Path], bool]) -> bool:
    """Kill a conversion, look that its output is absent or complete, and start it again."""
    killed = kill(photos, out, to, *OPTIONS, when=when)
    was_there = os.path.lexists(out)
    assert not was_there or same(out, wanted)
    if killed:
        code, _, errors = call("convert", *_words(photos, out, to), *OPTIONS, cwd=out.parent)
        assert code == 0 or (was_there and "is there already" in errors), errors
    assert same(out, wanted)
    assert not (out.parent / f".{out.name}.partial").exists()
    return killed


def main(kills: int = 20, *formats: str) -> None:
    """Kill each format's conversion at moments drawn over the time that it takes from its first sign of life."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        photos = make_photos(folder / "photos", train=3000, val=300)
        for to in formats or ("memmap", "lmdb"):
            convert(photos, folder / to, to, *OPTIONS)
            rng, hits = random.Random(0), 0
            for number in range(kills):
                seen: list[float] = []
                delay = rng.uniform(0, 2.5)

                def when(work: Path, seen: list[float] = seen, delay: float = delay) -> bool:
                    if not seen and work.exists():
                        seen.append(time.monotonic())
                    return bool(seen) and time.monotonic() - seen[0] >= delay

                out = folder / f"{to}-{number}" / to
                out.parent.mkdir()
                hits += check(photos, out, to, folder / to, when=when)
            print(f"{to}: {kills} conversions, {hits} killed in the middle, all equal to one that wasn't", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, *sys.argv[2:])

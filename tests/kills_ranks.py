"""Runs of two ranks of which one is killed. By hand: python tests/kills_ranks.py [KILLS]"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from ranks import all_gone, done, pids, started, wait_until
from runs import TINY, make_photos

ARGS = ("effloop", *TINY, "device=cpu", "batch_size=4", "parallel=ddp", "run=run")


def kill(photos: Path, folder: Path, rng: random.Random, *options: str) -> tuple[int, str, float]:
    """Kill a rank in the middle of an epoch; exit code, standard error, and seconds until all had gone."""
    process = started([*ARGS, f"data.root={photos}", *options], folder)
    metrics = folder / "outputs" / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"epoch": 1' in metrics.read_text(), process)
    time.sleep(rng.uniform(0, 0.5))
    os.kill(pids(folder)[1], signal.SIGKILL)
    at = time.monotonic()
    code, _, err = done(process)
    assert all_gone(process.pid)
    return code, err, time.monotonic() - at


def main(kills: int = 20) -> None:
    """Kill, and look that one line is said and nothing left; a last time with a restart, which comes to its end."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        photos = make_photos(Path(name) / "photos")
        slowest = 0.0
        for number in range(kills):
            folder = Path(name) / str(number)
            folder.mkdir()
            code, err, seconds = kill(photos, folder, rng, "epochs=2000")
            assert code == 2, err
            assert err.count("\n") == 1, err
            assert "effloop: rank 1 on" in err and "was killed by SIGKILL" in err, err  # noqa: PT018
            assert not list(folder.glob("effloop-ranks-*"))
            slowest = max(slowest, seconds)
            print(f"{number + 1}: all gone in {seconds:.1f} s", flush=True)
        folder = Path(name) / "again"
        folder.mkdir()
        code, err, _ = kill(photos, folder, rng, "epochs=30", "parallel.max_restarts=1")
        assert (code, err) == (0, "")
        assert json.loads((folder / "outputs" / "run" / "summary.json").read_text())["last"]["epoch"] == 29
        print(f"{kills} kills: all gone within {slowest:.1f} s each time, one line; with a restart the run ends")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)

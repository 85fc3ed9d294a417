"""Runs that are killed or asked to stop, and gone on with. By hand: python tests/kills_train.py [KILLS [STOPS]]"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from forks import Forked
from ranks import all_gone, started
from runs import TINY, call, make_photos, once, rows

from effloop.checkpoint import files
from effloop.errors import PreemptedRunError

EXACT = (
    "model",
    "trained",
    "average",
    "optimizer",
    "schedule",
    "precision",
    "checkpoints",
    "progress",
    "metrics",
    "rng",
)
SOURCES = ("folder", "lmdb", "tar", "memmap")
ENGINES = ("threads", "processes")
RANKS = (1, 2)
IMAGES, EPOCHS = 96, 3
WORDS = (
    *TINY,
    f"epochs={EPOCHS}",
    "num_workers=1",
    "record.log_every=3",
    "optim.ema=0.9",
    "schedule=step",
    "checkpoint.every_steps=2",
    "device=cpu",
)

LEDGER = """
import json, os, time
from effloop.train.trainer import Trainer

forward_backward, opened = Trainer.forward_backward, []

def noted(trainer, batch, *, sync):
    if not opened:
        name = f"{time.time_ns()}-{trainer.parallel.rank}"
        opened.append(os.open(os.path.join(os.environ["LEDGER"], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    progress = trainer.progress
    line = [progress.epoch, progress.samples_seen, trainer.parallel.rank, batch.ids.tolist()]
    os.write(opened[0], (json.dumps(line) + "\\n").encode())
    time.sleep(float(os.environ.get("SLOWER", "0")))
    return forward_backward(trainer, batch, sync=sync)

Trainer.forward_backward = noted
"""
"""A plugin file: writes which samples each rank trains on, as it does."""


def equal(ours: Any, theirs: Any) -> bool:
    """Equal to the bit, in trees of tensors and plain values."""
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(equal(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)


@dataclass
class Runs:
    """Runs over one dataset in several formats.

    Attributes:
        folder: for all that they write.
        sources: formats of the data.
        kills: of processes in the middle of a run, so far.
        resumed: starts that went on from a checkpoint.
        seconds: from a signal to the end of the process.
    """

    folder: Path
    sources: Sequence[str] = SOURCES
    kills: int = 0
    resumed: int = 0
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        make_photos(self.folder / "folder", train=IMAGES, val=16)
        (self.folder / "ledger.py").write_text(LEDGER)
        for source in self.sources[1:]:
            words = (f"data.root={self.folder / 'folder'}", f"to={source}", f"out={self.folder / source}")
            code, _, errors = call("convert", *words, cwd=self.folder)
            assert code == 0, errors
        self._references: dict[tuple[str, ...], Path] = {}

    def start(self, name: str, words: Sequence[str], ranks: int, resumed: Sequence[str] = ()) -> Forked:
        """The run `name`, or what is left of it; then with the overrides `resumed`."""
        cwd, plugin = self.folder / name, f"plugins=[{self.folder / 'ledger.py'}]"
        (cwd / "ledger").mkdir(parents=True, exist_ok=True)
        run = cwd / "outputs" / "x"
        if (run / "checkpoints" / "last.ckpt").is_file():
            args = ["effloop", "resume", "outputs/x", *resumed, plugin]
            self.resumed += 1
        else:
            shutil.rmtree(run, ignore_errors=True)
            for path in (cwd / "ledger").iterdir():
                path.unlink()
            args = ["effloop", "train", *once(*WORDS, *words, *parallel(ranks)), "run=x", plugin]
        process = started(args, cwd, LEDGER=str(cwd / "ledger"))
        assert isinstance(process, Forked)
        return process

    def reference(self, ranks: int, *words: str) -> Path:
        """A run that nothing disturbs."""
        key = (str(ranks), *words)
        if key not in self._references:
            name = f"reference-{len(self._references)}"
            process = self.start(name, [f"data.root={self.folder / 'folder'}", "engine=threads", *words], ranks)
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            self._references[key] = self.folder / name
        return self._references[key]

    def disturbed(self, name: str, words: Sequence[str], ranks: int, signals: Iterator[tuple[int, int, float]]) -> None:
        """A run that gets a signal at these times after so many steps, and is gone on with until it is done."""
        for number, steps, delay in signals:
            process = self.start(name, words, ranks)
            ledger = self.folder / name / "ledger"
            before, until = {*ledger.iterdir()}, time.monotonic() + 120
            while batches_of({*ledger.iterdir()} - before) < steps * ranks and process.poll() is None:
                assert time.monotonic() < until
                time.sleep(0.002)
            time.sleep(delay)
            if process.poll() is not None:
                _, errors = process.communicate()
                assert process.returncode == 0, errors
                return
            self._signal(process, number)
            assert all_gone(process.pid)
        process = self.start(name, words, ranks)
        _, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors

    def _signal(self, process: Forked, number: int) -> None:
        at = time.monotonic()
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
        _, errors = process.communicate(timeout=120)
        if number == signal.SIGKILL:
            self.kills += process.returncode == -number
            return
        self.seconds.append(time.monotonic() - at)
        if process.returncode != 0:  # else it had come to its end
            self.kills += 1
            assert process.returncode == PreemptedRunError.exit_code, errors
            assert errors.count("\n") == 1, errors
            assert f"stopped by {signal.Signals(number).name}" in errors, errors
            assert "resume with: " in errors or "type the command again" in errors, errors


def batches_of(paths: Iterable[Path]) -> int:
    """How many batches these ledgers have."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def parallel(ranks: int) -> list[str]:
    """As many images in a batch, however many ranks share them."""
    return [f"batch_size={8 // ranks}", *(["parallel=ddp", f"parallel.processes={ranks}"] if ranks > 1 else [])]


def check_same(folder: Path, reference: Path, but: Sequence[str] = ()) -> None:
    """Weights, optimizer, position, rows: all is that of the reference."""
    ours, theirs = (each / "outputs" / "x" for each in (folder, reference))
    for name in ("last", "best"):
        one, other = (files.read(run / "checkpoints" / f"{name}.ckpt") for run in (ours, theirs))
        differ = [part for part in EXACT if part not in but and not equal(one.get(part), other.get(part))]
        assert not differ, (folder, name, differ)
    assert rows(ours) == rows(theirs), folder
    spans = [[(row["span"], row["step"]) for row in rows(run, "perf.jsonl")] for run in (ours, theirs)]
    assert spans[0] == spans[1], folder
    tables = [[x.split(",")[:-3] for x in (run / "metrics.csv").read_text().splitlines()] for run in (ours, theirs)]
    assert tables[0] == tables[1], folder
    one, other = (json.loads((run / "summary.json").read_text()) for run in (ours, theirs))
    assert [one[key] for key in ("best", "last", "step")] == [other[key] for key in ("best", "last", "step")]


def check_ledger(folder: Path, ranks: int) -> int:
    """Each sample of each epoch once in what counts: what a start did after the position of the next one, doesn't.

    Returns:
        How many batches were done again.
    """
    starts: dict[int, list[tuple[int, list[Any]]]] = defaultdict(list)
    for path in (folder / "ledger").iterdir():
        at, rank = map(int, path.name.split("-"))
        lines = path.read_text().splitlines(keepends=True)
        starts[rank].append((at, [json.loads(line) for line in lines if line.endswith("\n")]))
    seen: dict[int, list[int]] = defaultdict(list)
    again = 0
    assert set(starts) == set(range(ranks))
    for rank, all_lines in starts.items():
        committed: dict[tuple[int, int], list[int]] = {}
        for _, lines in sorted(all_lines):
            assert lines[0][2] == rank
            for epoch, position, _, ids in lines:
                again += (epoch, position) in committed
                assert committed.setdefault((epoch, position), ids) == ids, (folder, epoch, position)
        positions = sorted(committed)
        assert positions == [(epoch, at) for epoch in range(EPOCHS) for at in range(0, IMAGES, 8)], (folder, positions)
        for (epoch, _), ids in committed.items():
            seen[epoch] += ids
    for epoch in range(EPOCHS):
        assert sorted(seen[epoch]) == list(range(IMAGES)), (folder, epoch)
    return again


def global_order(folder: Path) -> dict[tuple[int, int], list[int]]:
    """{epoch and position: the samples of all ranks}, by rank."""
    found: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
    for path in (folder / "ledger").iterdir():
        for line in path.read_text().splitlines():
            epoch, position, rank, ids = json.loads(line)
            found[epoch, position][rank] = ids
    return {place: [id_ for rank in sorted(ids) for id_ in ids[rank]] for place, ids in sorted(found.items())}


def campaign(runs: Runs, count: int, *, numbers: Sequence[int] = (signal.SIGKILL,), seed: int = 0) -> tuple[int, int]:
    """Disturb runs over all sources, engines and numbers of ranks until `count` processes have got a signal.

    Returns:
        Signals that ended a process, and runs.
    """
    rng, done, before = random.Random(seed), 0, runs.kills
    cells = [(source, engine, ranks) for ranks in RANKS for engine in ENGINES for source in SOURCES]
    while runs.kills - before < count:
        source, engine, ranks = cells[done % len(cells)]
        name, words = f"run-{seed}-{done}", [f"data.root={runs.folder / source}", f"engine={engine}"]
        left = -(-(count - runs.kills + before) // max(1, len(cells) - done))
        signals = (
            (rng.choice(numbers), rng.randint(1, 5), rng.uniform(0, 0.05)) for _ in range(max(1, left))
        )  # in steps: however busy the machine is, most come after a checkpoint
        runs.disturbed(name, words, ranks, signals)
        check_same(runs.folder / name, runs.reference(ranks))
        check_ledger(runs.folder / name, ranks)
        shutil.rmtree(runs.folder / name)
        done += 1
        print(f"{name} {source} {engine} {ranks}: {runs.kills - before} so far, {runs.resumed} resumed", flush=True)
    return runs.kills - before, done


def main(kills: int = 20, stops: int = 0) -> None:
    """Kill, and stop by signals; print the figures."""
    with tempfile.TemporaryDirectory() as name:
        runs = Runs(Path(name))
        for count, numbers in ((kills, [signal.SIGKILL]), (stops, [signal.SIGTERM]), (stops // 5, [signal.SIGUSR1])):
            if count:
                began = time.monotonic()
                done, over = campaign(runs, count, numbers=numbers, seed=int(numbers[0]))
                print(f"{signal.Signals(numbers[0]).name}: {done} in {over} runs, {time.monotonic() - began:.0f} s")
                if runs.seconds:
                    most, mean = max(runs.seconds), sum(runs.seconds) / len(runs.seconds)
                    print(f"  from the signal to the end of the process: {most:.1f} s at most, {mean:.1f} s mean")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

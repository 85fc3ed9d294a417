"""Trainings in which some batches are poisoned, or left out."""

import hashlib
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import effloop
from effloop.batch import Batch
from effloop.errors import EffLoopError
from effloop.train.trainer import Trainer


class Poisoned:
    """A loader's batches, of which some are poisoned on one rank, or left out on all.

    Args:
        trainer: whose batches they are; even positions get NaN images, odd ones an infinite gradient.
        positions: batches of the run, counted from 0.
        out: leave them out instead.
    """

    def __init__(self, trainer: Trainer, positions: Iterable[int], *, out: bool) -> None:
        self.stream, self.positions, self.out = trainer.train, {*positions}, out
        self.rank, self.ranks = trainer.parallel.rank, trainer.parallel.world_size
        self.spoils = False
        self.ids: dict[int, list[int]] = {}
        parameter = next(trainer.model.parameters())
        parameter.register_hook(lambda gradient: gradient * float("inf") if self.spoils else gradient)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __len__(self) -> int:
        return len(self.stream)

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        first = epoch * len(self.stream) + samples_seen // self.stream.global_batch
        for number, batch in enumerate(self.stream.epoch(epoch, samples_seen), first):
            poisoned = number in self.positions
            if poisoned and self.out:
                continue
            self.spoils = False
            if poisoned:
                self.ids[number] = batch.ids.tolist()
                if number // 2 % self.ranks == self.rank:
                    self.spoils = bool(number % 2)
                    if not self.spoils:
                        batch.images[0] = float("nan")
            yield batch


def positions(count: int, of: int, seed: int = 0) -> list[int]:
    """So many positions in a run of so many updates."""
    return sorted(random.Random(seed).sample(range(of), count))


def outcome(overrides: list[str], where: list[int], *, out: bool = False, resume: str = "") -> dict[str, Any]:
    """A training: its weights' hash, the line it ended with, the list of poisoned updates, the ids it was given."""
    again = Path(resume) if resume else None
    trainer = effloop.build_trainer(effloop.compose(overrides), resume=again, run_dir=again and again.parents[1])
    loaded = trainer.nan.state_dict()
    trainer.train = stream = Poisoned(trainer, where, out=out)
    line = ""
    try:
        trainer.fit()
    except EffLoopError as error:
        line = str(error)
    digest = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    run = trainer.checkpoints.folder.parent
    trainer.parallel.close()
    listed = run / "nan.jsonl"
    kept = [  # which rank 0 alone knows while it writes
        all(bool(each.isfinite().all()) for each in torch.load(path, weights_only=True)["model"].values())
        for path in run.glob("checkpoints/*.ckpt")
        if not trainer.parallel.rank
    ]
    return {
        "weights": digest.hexdigest(),
        "line": line,
        "list": [json.loads(row) for row in listed.read_text().splitlines()] if listed.exists() else [],
        "ids": stream.ids,
        "kept": kept,
        "step": trainer.progress.step,
        "loaded": loaded,
        "counts": trainer.nan.state_dict(),
    }


if __name__ == "__main__":
    overrides, where, out, resume = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps(outcome(overrides, where, out=out, resume=resume)))

"""Several trained models as one, the mean of what they give; each sees images as it was trained to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from effloop.assemble.checks import check_trained_on
from effloop.assemble.loader import build_loader, loader_of
from effloop.config import Config
from effloop.data.augment.base import RecipeConfig
from effloop.data.source.base import USUAL
from effloop.data.source.splits import open_part, undivided
from effloop.data.source.view import View
from effloop.errors import ConfigError, warn
from effloop.inference.options import Average
from effloop.inference.together import Seen, Together
from effloop.inference.trained import Trained
from effloop.runs.reader import SWEEP, read_jobs, unstarted_jobs
from effloop.task import Task

_DIVISION = ("root", "train_split", "val_split", "val", "folds", "group", "split_seed", "fold")


class Ensemble(nn.Module):
    """The mean of models' outputs, by the task's `ensemble` or of the outputs themselves."""

    def __init__(self, members: Sequence[Trained], places: Sequence[int], task: Task, average: Average) -> None:
        super().__init__()
        self.members, self.places, self.task, self.average = members, places, task, average

    def forward(self, images: Tensor | Seen) -> Tensor:
        seen = images if isinstance(images, Seen) else dict.fromkeys(self.places, images)
        asked = [(each, place) for each, place in zip(self.members, self.places, strict=True) if place in seen]
        found = [member.forward(seen[place]) for member, place in asked]
        if len(found) == 1:
            return found[0]
        return Task.ensemble(self.task, found) if self.average == "logits" else self.task.ensemble(found)


def runs_of(run: Path) -> list[Path]:
    """The runs that are named: one, several with commas between, or the jobs of a sweep but for those it has pruned."""
    if not run.exists() and "," in str(run):
        return [each for part in str(run).split(",") for each in runs_of(Path(part).expanduser())]
    if not (run / SWEEP).is_file():
        return [run]
    jobs = [job for job in read_jobs(run) if job.state != "pruned"]
    if (waiting := unstarted_jobs(run)) or any(job.state != "done" for job in jobs) or not jobs:
        names = [f"{job.name} is {job.state}" for job in jobs if job.state != "done"]
        names += [f"{waiting} haven't started"] * bool(waiting)
        raise ConfigError(
            f"'{run}': not all jobs are done ({', '.join(names)}); continue the sweep by sweep.resume=true, or name "
            f"some with commas between: {run}/0,{run}/1"
        )
    return [job.path for job in jobs]


def open_runs(run: Path, overrides: Sequence[str], average: Average, split: str | None) -> Trained:
    """One run, or the mean of several; with `split` of their own data. Of folds, each sample of `val` is left to the
    models that haven't seen it. A ConfigError for runs that don't go together.
    """
    members = [Trained.open(path, overrides) for path in runs_of(run)]
    first = members[0]
    if len(members) == 1:
        return first
    for other in members[1:]:
        for what, one, two in (
            ("task", (first.config.task.name,), (other.config.task.name,)),
            ("classes", first.target_names, other.target_names),
        ):
            if one != two:
                ours, theirs = ", ".join(one[:8]), ", ".join(two[:8])
                raise ConfigError(f"{first.path} has the {what} {ours}, {other.path} {theirs}; name runs of the same")
    divisions = [tuple(getattr(member.config.data, key) for key in _DIVISION) for member in members]
    ways = [_way(first.config, member.config) for member in members]
    unique = [way for number, way in enumerate(ways) if way not in ways[:number]]
    if first.task.spatial and len(unique) > 1:
        raise ConfigError(
            f"task={first.config.task.name}: masks have a mean only where all models see the same pixels, and "
            "image_size, decode, augment.eval or data.mean of these runs differ; name runs of the same"
        )
    task, states = copy.copy(first.task), [member.task.state_dict() for member in members]
    task.load_state_dict({key: np.mean([each[key] for each in states], axis=0).tolist() for key in states[0]})
    keys: list[Any] = [unique.index(way) for way in ways]
    folds = split in ("train", "val") and len({*divisions}) > 1
    if folds:
        if split == "train" or len({division[:-1] for division in divisions}) > 1 or first.task.spatial:
            raise ConfigError(
                f"split={split}: of these runs some were trained on what others were validated on, which a mean would "
                "know; name images, or one run after the other"
            )
        keys = [*zip(keys, divisions, strict=True)]
    places = [keys.index(key) for key in keys] if folds else keys
    parts = _by_fold(members, ways, places, divisions) if folds else None
    model = Ensemble(members, places, task, average)
    return replace(first, path=run, task=task, model=model, members=tuple(members), ways=tuple(unique), folds=parts)


def _way(first: Config, own: Config) -> Config:
    """The first run's config with another one's preparation of images."""
    data = replace(first.data, channels=own.data.channels, mean=own.data.mean, std=own.data.std)
    augment = own.augment
    if isinstance(first.augment, RecipeConfig) and isinstance(augment, RecipeConfig):  # the rest is for training
        augment = replace(first.augment, eval=augment.eval, eval_ratio=augment.eval_ratio)
    return replace(first, image_size=own.image_size, decode=own.decode, augment=augment, data=data)


def _by_fold(
    members: Sequence[Trained], ways: Sequence[Config], places: Sequence[int], divisions: Sequence[tuple[Any, ...]]
) -> Together:
    """Each sample of the folds' validation parts for the models that weren't trained on it."""
    data, classes, parts = members[0].config.data, list(members[0].classes), []
    whole = undivided(data)
    for division in dict.fromkeys(divisions):
        of = [number for number, each in enumerate(divisions) if each == division]
        fold = members[of[0]].config.data.fold
        configs = {places[number]: replace(ways[number], data=replace(ways[number].data, fold=fold)) for number in of}
        loaders = {place: build_loader(way, "val", classes=classes, evaluate=True) for place, way in configs.items()}
        source = next(iter(loaders.values())).plan.source
        for number in of:
            check_trained_on(members[number].facts, source)
            members[number].check_divided_alike(source)
        part: Any = open_part(replace(data, fold=fold), "val")
        parts.append((loaders, np.asarray(part.ids), int(fold or 0)))
    covered = np.sort(np.concatenate([ids for _, ids, _ in parts]).astype(np.int64))
    total = sum(len(open_part(data, split)) for split in USUAL)
    if missing := total - len(covered):
        warn(f"{missing:,} of {total:,} samples aren't scored: they are in the folds of other runs")
    base = loader_of(members[0].config, View(whole, covered) if len(covered) < len(whole) else whole)
    places_of = [(loaders, np.searchsorted(covered, ids)) for loaders, ids, _ in parts]
    made = Together(base, places_of)
    made.folds = np.zeros(len(covered), np.int64)
    for (_, numbers), (_, _, fold) in zip(places_of, parts, strict=True):
        made.folds[numbers] = fold
    return made

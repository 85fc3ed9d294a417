"""A trained model with its task, its data and its images' preparation, from a run or an exported file."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from effloop import config as configs
from effloop.assemble.checks import check_same_model, check_same_tensors, check_trained_on, fitting, trained_names
from effloop.assemble.environment import resolved
from effloop.assemble.loader import build_loader
from effloop.assemble.model import build_model, state_preserved
from effloop.batch import ImageSize
from effloop.checkpoint import files
from effloop.config import Config
from effloop.config.overrides import key_of
from effloop.config.schema import word
from effloop.data.loader import Loader
from effloop.data.source import Source
from effloop.data.source.base import USUAL, WHOLE, NoSplitError
from effloop.data.source.splits import has_splits, open_part, open_split
from effloop.errors import CheckpointError, ConfigError, EffLoopError, warn
from effloop.inference.formats import Format, format_of, one_line_errors, read_metadata
from effloop.inference.together import together
from effloop.precision import Precision, precisions
from effloop.record import Metrics
from effloop.runs.compare import inputs as differing_inputs
from effloop.system import gpu
from effloop.system.hardware import set_reproducible, set_threads
from effloop.task import Task, tasks
from effloop.train.evaluation import Scorer, View, evaluate


def config_of(facts: Mapping[str, Any], overrides: Sequence[str], path: Path) -> Config:
    """The config that a model was trained by, with overrides, for a single process that doesn't compile, in float32.

    Other data than the run's isn't divided as the run's is, nor are samples left out of it, unless an override says so.
    """
    # A run of an earlier version may have set removed keys, which a trained model doesn't depend on.
    alone = {key: value for key, value in facts["config"].items() if key not in ("distill", "stop")}
    alone |= {"parallel": {"name": "none"}, "compile": False, "resume": None, "global_batch": None}
    alone |= {"precision": {"name": "fp32"}, "amp": None}  # as exported files compute, whatever trained the model
    data: Any = alone.get("data")
    if isinstance(data, dict):
        data = alone["data"] = {key: value for key, value in data.items() if key != "window"}
    config = configs.from_dict(alone, overrides, f"the config in {path}")
    keys = {key_of(override) for override in overrides}
    if "data=auto" in overrides:  # whose splits are called as the run's
        names = {key: data[key] for key in ("train_split", "val_split") if data[key] and f"data.{key}" not in keys}
        config.data = replace(config.data, **names)
    moved = "data.root" in keys and not _same_path(config.data.root, data["root"])
    chosen = config.data.divides or config.data.exclude
    if not chosen or not moved or keys & {"data.val", "data.folds", "data.fold", "data.exclude"}:
        return config
    trained_on = facts.get("data") or {}
    with suppress(EffLoopError, KeyError):  # by its samples and bytes it may be the run's data, elsewhere now
        found = {split: open_part(config.data, split).fingerprint() for split in USUAL}
        counts = [[sum(each[s][k] for s in USUAL) for k in ("samples", "bytes")] for each in (found, trained_on)]
        if counts[0] == counts[1]:
            return config
    whole = dict.fromkeys(("val", "folds", "fold", "group", "exclude"))
    alone["data"] = {**data, **whole, "val_split": data["val_split"] or "val"}
    return configs.from_dict(alone, overrides, f"the config in {path}")


def _same_path(one: str | None, other: str | None) -> bool:
    return len({root and os.path.realpath(os.path.expanduser(root)) for root in (one, other)}) == 1


class FixedBatch(nn.Module):
    """A model of (batch, C, H, W) images for any number of them: the last ones are filled up."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        super().__init__()
        self.model, self.batch = model, batch

    def forward(self, images: Tensor) -> Tensor:
        missing = -len(images) % self.batch
        filled = torch.cat([images, images[:1].expand(missing, -1, -1, -1)]) if missing else images
        return torch.cat([self.model(part) for part in torch.split(filled, self.batch)])[: len(images)]


Opened = TypeVar("Opened", Loader, Source)


@dataclass(frozen=True)
class Trained:
    """A trained model, its task, its classes and the config that its images are prepared by."""

    path: Path  # the file that the model is from
    config: Config  # of the run, changed by overrides, for a single process
    facts: Mapping[str, Any]  # of the run: `config`, `classes`, `target_names`, `num_outputs`, `progress`, `data`
    task: Task  # with the meters that suit the model, and what it was fitted to
    model: nn.Module  # in eval mode, with the task's output transform: (N, 3, H, W) float32, normalised -> (N, K)
    precision: Precision  # autocast of the forward pass
    device: torch.device  # of the model
    members: tuple[Trained, ...] = ()  # of a mean of several models
    ways: tuple[Config, ...] = ()  # by which their images are prepared, where there are members
    folds: Loader | None = None  # of the validation split, where each member scores what it wasn't trained on

    @classmethod
    def open(cls, path: Path, overrides: Sequence[str] = (), *, whole_process: bool = True) -> Self:
        """A run folder, for its best checkpoint, a .ckpt file, or a file by `effloop export`, run by its own runtime.

        `overrides` change the run's config; of `whole_process` are `threads`, `deterministic` and `cudnn_benchmark`.
        An EffLoopError if it can't be read, its runtime isn't installed, or it doesn't fit the overrides.
        """
        kind = None if path.is_dir() else format_of(path)
        path = files.find(path, "best") if kind is None else path
        facts = files.read(path) if kind is None else _exported_facts(kind(), path)
        config = config_of(facts, overrides, path)
        check_same_model(config, facts)
        if config.decode.exif != (turned := facts["config"]["decode"].get("exif", False)):
            now, then = word(config.decode.exif), word(turned)
            warn(f"decode.exif={now}: the model was trained with {then}, and may score otherwise on turned images")
        if kind and config.size != (size := ImageSize(*facts["input"]["shape"][2:])):
            raise ConfigError(f"image_size: {config.size}, but the exported file takes {size}; export the run again")
        task = tasks.build(config.task)
        # A checkpoint may have neither a number nor classes: then the data tells.
        count = facts.get("num_outputs") or len(facts["classes"]) or task.num_outputs(open_part(config.data, "val"))
        if whole_process:
            set_threads(config.threads)
            set_reproducible(deterministic=config.deterministic, cudnn_benchmark=not config.deterministic)
        device = gpu.use(gpu.find_device(config.device))
        precision = precisions.build(resolved(config).precision, device)
        if kind and precision.dtype:
            raise ConfigError(f"{path} computes as it was exported; leave amp and precision out, or name the run")
        task = task.for_outputs(count)
        with fitting("the run" if kind is None else str(path)):
            task.load_state_dict(facts.get("task") or {})
        task = task.to(device)
        if kind is None:
            model = _network(config, count, device)
            with fitting("the run"):
                check_same_tensors(model, facts["model"])
                model.load_state_dict(facts["model"])
            model = task.with_output_transform(model)
        else:
            with one_line_errors(f"{path} can't be opened"):
                model = kind().open(path, device, lambda: task.with_output_transform(_network(config, count, device)))
            batch = facts["input"]["shape"][0]
            model = FixedBatch(model, batch) if isinstance(batch, int) else model
        names = ("config", "classes", "target_names", "progress", "data", "int8", "half")
        kept = {key: facts.get(key) for key in names}
        return cls(path, config, {**kept, "num_outputs": count}, task, model.eval(), precision, device)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs; empty where targets are no classes."""
        return tuple(self.facts["classes"])

    @property
    def target_names(self) -> tuple[str, ...]:
        """Names of the outputs: the classes, or of each of the numbers."""
        return trained_names(self.facts)

    @property
    def num_outputs(self) -> int:
        return int(self.facts["num_outputs"])

    @property
    def epoch(self) -> int:
        """The epoch that its weights are of, counted from 0."""
        return int(self.facts["progress"]["epoch"]) - 1

    def network(self) -> nn.Module:
        """The same model before training, on the device."""
        return self.task.with_output_transform(_network(self.config, self.num_outputs, self.device))

    @property
    def computes_in(self) -> str:
        """`float32`, or as of `Precision.name`; of an exported file what its weights are; of a mean those of all."""
        if self.members:
            return ", ".join(dict.fromkeys(each.computes_in for each in self.members))
        return "int8" if self.facts["int8"] else "float16 weights" if self.facts["half"] else self.precision.name

    def describe(self) -> str:
        """The file, the epoch that its weights are of, and what it computes in; of a mean those of all members."""
        if self.members:
            epochs = ", ".join(str(each.epoch) for each in self.members)
            how = "each for the fold that it hasn't seen" if self.folds is not None else "their mean"
            return f"{self.path}: {len(self.members)} models, {how}, epochs {epochs}, {self.computes_in}"
        return f"{self.path}, epoch {self.epoch}, {self.computes_in}"

    def loader(self, split: str = "val") -> Loader:
        """A split of the data, in order and never augmented: val, train or any other split of it, e.g. test; `val` is
        all of other data than the run's that has no splits.
        """
        if self.folds is not None:
            return self.folds

        def build(split: str) -> Loader:
            ways = self.ways or (self.config,)
            return together([build_loader(way, split, classes=list(self.classes), evaluate=True) for way in ways])

        loader = self._or_whole(build, split, scored=True)
        self.task.num_outputs(loader.plan.source)  # refuses targets of another kind
        check_trained_on(self.facts, loader.plan.source)
        if split == "val":
            self.check_divided_alike(loader.plan.source)
        return loader

    def source(self, split: str = "val") -> Source:
        """The samples of a split as of `loader`, whatever their classes are."""
        data = self.config.data
        if split == "val" and data.divides:
            with suppress(EffLoopError):  # opening the split reports what is wrong
                self.check_divided_alike(open_split(data, split, self.classes))
        elif not data.divides:
            data = replace(data, allow_missing_classes=True)
        return self._or_whole(partial(open_part, data), split, scored=False)

    def _or_whole(self, opening: Callable[[str], Opened], split: str, *, scored: bool) -> Opened:
        """A split, or all of data that has no splits; what the run was trained on isn't scored."""
        try:
            return opening(split)
        except NoSplitError:
            data, own = self.config.data, _same_path(self.config.data.root, self.facts["config"]["data"]["root"])
            if split == "val" and not (data.divides or (scored and own) or has_splits(data)):
                with suppress(NoSplitError):
                    found = opening(WHOLE)
                    if scored:
                        warn(f"data.root: '{data.root}' has no splits, so all of it is used")
                    return found
            raise

    def check_divided_alike(self, source: Source) -> None:
        """Warn of a validation part that isn't the one that the run validated on."""
        trained_on = (self.facts.get("data") or {}).get("val")
        if not (self.config.data.divides and trained_on):
            return
        excluded = self.facts["config"]["data"].get("exclude")
        if excluded != self.config.data.exclude:  # what an override leaves out now wasn't trained on either
            with suppress(EffLoopError):
                source = open_split(replace(self.config.data, exclude=excluded), "val", self.classes)
        if how := "; ".join(differing_inputs({"val": trained_on}, {"val": source.fingerprint()})):
            warn(f"{source.where} may have images that were trained on: it isn't divided as for the run ({how})")

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) float32, normalised, on the model's device -> (N, K) outputs, in `precision`."""
        dtype = self.precision.dtype
        with torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            outputs: Tensor = self.model(images)
        return outputs

    def scorers(self, views: Collection[View] = (), *, keeps: bool = False) -> list[Scorer]:
        """New ones for an evaluation, of which the last keeps what its details need."""
        count = 2 if views else 1
        metrics = (Metrics(self.task.num_sums, self.device) for _ in range(count))
        return [Scorer(self.task, each, keeps=keeps and last == count) for last, each in enumerate(metrics, 1)]

    def evaluate(
        self, loader: Loader, views: Collection[View] = (), scorers: Sequence[Scorer] = ()
    ) -> list[dict[str, float]]:
        """The task's scores on all samples of a loader, which is closed: of the images and, with views, second, of them
        with their views together; `scorers` are those of `scorers`.
        """
        scorers = scorers or self.scorers(views)
        with closing(loader):
            return evaluate(self.model, loader.epoch(0), scorers, self.precision, views)


def _exported_facts(form: Format, path: Path) -> dict[str, Any]:
    """The metadata of an exported file, by the names that a checkpoint has."""
    if not path.is_file():
        raise CheckpointError(f"'{path}' is not there; name a run folder, a .ckpt file or an exported file")
    with one_line_errors(f"{path} can't be read"):
        text = form.read_metadata(path)
    found = read_metadata(text, path)
    made = found["provenance"]
    return {**found, "progress": {"epoch": made["epoch"] + 1}, "data": made["data"], "task": found.get("task_state")}


def _network(config: Config, num_outputs: int, device: torch.device) -> nn.Module:
    """The model as a config builds it, for inference; the process's random numbers stay as they were."""
    plain = replace(config, model=replace(config.model, freeze=[], checkpointing=False))
    with state_preserved(nn.Module()):
        return build_model(resolved(plain), num_outputs, device)

"""Config -> parts -> Trainer. Flat on purpose: here a newcomer reads the whole house."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from effloop import config as configs
from effloop.build.autotune import compile_now, settled
from effloop.build.checks import check_resumable, check_same_data, check_same_model, check_trained_on, fitting
from effloop.build.loader import build_loader, build_stages
from effloop.build.model import build_model
from effloop.checkpoint import Checkpoints, files, keepers, rng
from effloop.config import Config
from effloop.config.hydra_setup import check_run_name
from effloop.data.loader import Loader
from effloop.data.source import sources
from effloop.data.source.base import check_same_classes
from effloop.errors import ConfigError
from effloop.model import Probe, load_weights, parameter_groups, probe
from effloop.optim import Average, NoAverage, Objective, optimizers, scaled_lr, schedules
from effloop.parallel import Parallel, parallels
from effloop.precision import Precision, precisions
from effloop.record import Metrics, recorders
from effloop.runs.folder import RunInfo, claim_run_dir, record_resume, write_run_info
from effloop.runs.pruning import MedianPruner
from effloop.runs.reader import JOB, flatten
from effloop.system.hardware import determinism_explained, find_device, keep_freed_memory, set_reproducible
from effloop.train.step import Step
from effloop.train.trainer import LoopConfig, Progress, Trainer, evaluate

Advise = Callable[[Config, nn.Module, Probe, Sequence[Loader], Parallel, Precision], list[str]]
"""Config, model, its probe, loaders, parallel and precision of a run -> lines for people."""


def build_trainer(
    config: Config,
    *,
    run_dir: Path | None = None,
    overrides: Sequence[str] = (),
    resume: Path | None = None,
    begun: Callable[[Path], None] = lambda run_dir: None,
    advise: Advise | None = None,
) -> Trainer:
    """The whole training, ready for `.fit()`, with its run folder made.

    Args:
        config: from `compose`.
        run_dir: the run folder; None is `outputs/{config.run}`.
        overrides: what the config was composed from, or changed by since, for the run folder.
        resume: a checkpoint of `run_dir`, which must be given then, to go on from in that same folder.
        advise: lines for people about the run as it is built; None says nothing.
        begun: called on rank 0 with the run folder as soon as it is this run's, which may end before all is built.

    Raises:
        ConfigError, DataError, CheckpointError: what can be known to fail before the first step.
    """
    if config.data.mean is None:
        raise ConfigError("data.mean: null leaves the images uint8, which no model takes; set data.mean and data.std")
    if resume is not None and run_dir is None:
        raise ConfigError("resume: goes on in the run's own folder; give run_dir, or set config.resume")
    rng.seed_all(config.seed)
    set_reproducible(deterministic=config.deterministic, cudnn_benchmark=not config.deterministic)
    parallel = parallels.build(config.parallel, find_device(config.device))
    parallel.first(config.record.require)
    assert config.precision is not None  # `finish` decided it
    precision = precisions.build(config.precision, parallel.device)
    if config.reuse_memory:
        keep_freed_memory()  # before anything is measured
    config, notes = _settled(config, parallel)
    train = build_loader(config, "train", parallel=parallel)
    batches, largest = build_stages(config, train, parallel)
    val = build_loader(config, "val", parallel=parallel)
    data = {"train": train.plan.source.fingerprint(), "val": val.plan.source.fingerprint()}
    check_same_classes(train.plan.source, val.plan.source)
    parallel.same("the data", json.dumps(data, sort_keys=True))

    checkpoint = resume or (files.find(Path(config.resume), "last") if config.resume else None)
    state = files.read(checkpoint) if checkpoint else None
    model = build_model(config, train.classes, parallel.device)
    if state:
        with fitting("resume"):  # before there is a new run folder
            check_resumable(config, state, world_size=parallel.world_size, in_place=resume is not None)
            check_trained_on(state, train.classes, train.plan.source.where)
            notes += check_same_data(state, data, in_place=resume is not None)
            model.load_state_dict(state["model"])
    elif config.model.weights:
        arch = getattr(config.model, "arch", None) if config.model.name == "torchvision" else None
        notes.append(load_weights(model, config.model.weights, arch))
    if config.model.weights and config.resume:
        notes.append(f"weights: those of {checkpoint}; model.weights is not read")
    with determinism_explained():
        found = probe(model, config.image_size, channels_last=bool(config.channels_last))
    if advise:
        notes += advise(config, model, found, [largest, val], parallel, precision)
    learner = _build_learner(config, model, train, precision)
    notes += learner.notes
    if parallel.rank:  # the same weights everywhere, but not the same dropout
        rng.seed_all(config.seed + parallel.rank)
    train_step = parallel.wrap(learner.step, find_unused=bool(found.unused))
    if config.compile:
        seconds = compile_now(config, train_step, learner.average.model, precision, len(train.classes))
        notes.append(f"compile  {seconds:.1f} s, before the first step")

    classes = list(train.classes)
    about = RunInfo(config, overrides, {"classes": classes, **data}, parallel.world_size)
    epoch = state["progress"]["epoch"] if state and resume else None
    run_dir = Path(parallel.first(partial(_run_dir_of, about, run_dir, epoch, begun)))
    facts = {"config": configs.to_dict(config), "classes": classes, "data": data, "world_size": parallel.world_size}
    trainer = Trainer(
        model=model,
        train_step=train_step,
        average=learner.average,
        optimizer=learner.optimizer,
        schedule=learner.schedule,
        objective=learner.step.objective,
        metrics=Metrics(parallel.device, parallel.sum),
        parallel=parallel,
        precision=precision,
        recorder=recorders.build(
            config.record,
            run_dir=run_dir,
            first_step=Progress(**state["progress"]).step if state else 0,
            hyperparameters=flatten(configs.to_dict(config)),
            rank=parallel.rank,
            world_size=parallel.world_size,
        ),
        checkpoints=(
            Checkpoints(config.checkpoint, run_dir, facts)
            if parallel.rank
            else keepers.build(config.checkpoint, run_dir, facts)
        ),
        train=batches,
        val=val,
        notes=notes,
        prunes=_prunes(config, run_dir, parallel),
        loop=LoopConfig(epochs=config.epochs, accumulate=config.accumulate, max_grad_norm=config.max_grad_norm),
    )
    if state:
        with fitting("resume"):
            trainer.load_state_dict(state)
    return trainer


@dataclass(frozen=True)
class Learner:
    """What learns, and by which steps.

    Attributes:
        step: model, objective and precision, not yet wrapped by a strategy.
        average: has the weights that are evaluated.
        optimizer, schedule: of the parameters that are trained.
        notes: lines for people.
    """

    step: Step
    average: NoAverage
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    notes: list[str]


def _build_learner(config: Config, model: nn.Module, train: Loader, precision: Precision) -> Learner:
    """What changes a model, which has the weights that training begins with.

    Raises:
        ConfigError: an epoch has no update.
    """
    updates = len(train) // config.accumulate
    if not updates:
        raise ConfigError(
            f"accumulate: {config.accumulate} is more than the {len(train)} batches of an epoch; "
            f"set accumulate={len(train)} or less"
        )
    average = Average(model, config.optim.ema) if config.optim.ema else NoAverage(model)
    if config.optim.ema and config.compile:
        average.model.compile()  # a copy isn't, though what it is a copy of is
    images = train.global_batch * config.accumulate
    optim = replace(config.optim, lr=scaled_lr(config.optim, images))
    groups = parameter_groups(model, decay_norm_and_bias=optim.decay_norm_and_bias, weight_decay=optim.weight_decay)
    optimizer = optimizers.build(optim, groups)
    schedule = schedules.build(config.schedule, optimizer, updates=updates * config.epochs)
    step = Step(model, Objective(config.optim.label_smoothing), precision)
    notes = []
    if optim.scale_lr:
        notes.append(f"lr     {optim.lr:g} = {config.optim.lr:g} x {images} / {optim.scale_lr} images of an update")
    return Learner(step, average, optimizer, schedule, notes)


def _settled(config: Config, parallel: Parallel) -> tuple[Config, list[str]]:
    """The config with nothing left to `auto`, and lines that say why it is what it is."""
    if config.cudnn_benchmark is None:
        config = replace(config, cudnn_benchmark=not config.deterministic)
    if "auto" not in (config.compile, config.channels_last, config.cudnn_benchmark):
        set_reproducible(deterministic=config.deterministic, cudnn_benchmark=bool(config.cudnn_benchmark))
        return config, []
    classes = sources.build(config.data, config.data.train_split).classes
    config, lines = settled(config, len(classes), parallel)
    set_reproducible(deterministic=config.deterministic, cudnn_benchmark=bool(config.cudnn_benchmark))
    rng.seed_all(config.seed)
    return config, lines


def _run_dir_of(about: RunInfo, run_dir: Path | None, epoch: int | None, begun: Callable[[Path], None]) -> str:
    """The run folder, made with what it says of its run; or the one to go on in, brought up to date."""
    if epoch is not None:
        assert run_dir is not None
        record_resume(run_dir, about, epoch)
        begun(run_dir)
        return str(run_dir)
    made = claim_run_dir(run_dir or Path("outputs") / check_run_name(about.config.run))
    begun(made)
    write_run_info(made, about)
    return str(made)


def _prunes(config: Config, run_dir: Path, parallel: Parallel) -> Callable[[int, int], bool]:
    """Whether a run ends early, by a rule that rank 0 asks for all."""
    if not config.sweep.prune or not (run_dir / JOB).is_file():
        return lambda done, epochs: False
    rule = MedianPruner(run_dir, config.objective)
    return lambda done, epochs: parallel.first(partial(rule.should_prune, done, epochs))


def evaluate_checkpoint(config: Config, state: Mapping[str, Any]) -> tuple[dict[str, float], Loader]:
    """Validation scores (loss, top1, top5) of a checkpoint's model, and the loader they come from.

    Raises:
        ConfigError, DataError: the data or the model doesn't fit the checkpoint.
    """
    config = replace(config, compile=False)  # which takes longer than one pass
    set_reproducible(deterministic=config.deterministic, cudnn_benchmark=not config.deterministic)
    device = find_device(config.device)
    assert config.precision is not None  # `finish` decided it
    precision = precisions.build(config.precision, device)
    val = build_loader(config, "val")
    check_trained_on(state, val.classes, val.plan.source.where)
    check_same_model(config, state)
    model = build_model(config, val.classes, device)
    with fitting("eval"):
        model.load_state_dict(state["average"].get("model", state["model"]))
    with closing(val):
        objective = Objective(config.optim.label_smoothing)
        return evaluate(model, val.epoch(0), objective, Metrics(device), precision), val

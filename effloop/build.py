"""Config -> parts -> Trainer: the only place that sees the whole tree. Flat on purpose."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from effloop import config as configs
from effloop import snapshot
from effloop.auto import compile_now, settled
from effloop.build_model import build_model
from effloop.checkpoint import Checkpoints, files, keepers, rng
from effloop.compatible import check_resumable, check_same_model, check_trained_on, fitting
from effloop.config import Config
from effloop.data.augment import augments
from effloop.data.augment.mix import Mix
from effloop.data.cache import cached
from effloop.data.check import check_samples
from effloop.data.decode import decoders
from effloop.data.engine import engines
from effloop.data.loader import Loader
from effloop.data.plan import Order, Plan
from effloop.data.source import Cache, Source, Tail, sources
from effloop.data.source.base import check_same_classes
from effloop.data.stages import Stages
from effloop.data.transfer import Transfer
from effloop.errors import ConfigError, EffLoopError, warn
from effloop.hardware import available_cores, find_device, keep_freed_memory, set_reproducible
from effloop.hints import Facts, hints
from effloop.model import load_weights, parameter_groups, probe
from effloop.optim import Average, NoAverage, Objective, optimizers, scaled_lr, schedules
from effloop.parallel import Parallel, parallels
from effloop.precision import Precision, precisions
from effloop.record import Metrics, recorders
from effloop.search import check_run_name
from effloop.step import Step
from effloop.trainer import BatchStream, LoopConfig, Progress, Trainer, evaluate


def build_loader(config: Config, split: str = "train", *, parallel: Parallel | None = None) -> Loader:
    """The batches of one split, for EffLoop's loop or anybody's.

        for batch in effloop.build_loader(cfg, split="train").epoch(0):
            batch.images, batch.targets, batch.ids, batch.valid

    Args:
        config: from `compose`.
        split: `train` (shuffled, augmented, tail dropped or wrapped) or `val` (in order, centre
            crops, tail padded and marked in `valid`).
        parallel: whose slice of the batches; None is a single process.

    Returns:
        A loader of `Batch`es on `config.device`: images (N, 3, S, S) float32, normalised with
        `data.mean` and `data.std`, or uint8 where these are null.

    Raises:
        ConfigError: a value that doesn't fit.
        DataError: the data isn't there or a sample of the first look can't be read.
    """
    if split not in ("train", "val"):
        raise ConfigError(f"split: '{split}' is not allowed; take train or val")
    train = split == "train"
    device = parallel.device if parallel else find_device(config.device)
    if config.reuse_memory:
        keep_freed_memory()
    workers = num_workers(config, parallel)
    source = sources.build(config.data, config.data.train_split if train else config.data.val_split)
    order = Order(
        num_samples=len(source),
        batch_per_rank=config.batch_size,
        seed=config.seed if train else None,
        tail=config.data.tail if train else Tail.pad,
        rank=parallel.rank if parallel else 0,
        world_size=parallel.world_size if parallel else 1,
    )
    if not len(order):
        raise ConfigError(
            f"batch_size: {order.global_batch} is more than the {len(source)} samples of {source.where}; "
            f"set batch_size={len(source) // order.world_size or 1} or less, or data.tail=wrap"
        )
    decoder = decoders.build(config.decode)
    limit = None if config.data.cache_gb is None else config.data.cache_gb * 1e9
    plan = Plan(
        source=cached(source, config.data.cache, decoder, limit, share=_share(config, source, train=train)),
        decoder=decoder,
        augment=augments.build(config.augment, size=config.image_size, train=train),
        order=order,
        seed=config.seed,
    )
    if device.type == "cpu" and plan.augment.has_device_part:
        warn("augment.device=gpu: the model is on the CPU; batches are augmented there, in the loop's own thread")
    check_samples(plan, config.data.check, workers)
    engine = engines.build(config.engine, plan, num_workers=workers, pin_memory=device.type == "cuda")
    transfer = Transfer(
        device,
        config.data.mean,
        config.data.std,
        channels_last=config.channels_last is not False,
        augment=plan.augment,
        mix=Mix(config.augment.mixup, config.augment.cutmix, len(source.classes)) if train else None,
    )
    return Loader(plan, engine, transfer)


def build_trainer(
    config: Config, *, run_dir: Path | None = None, overrides: Sequence[str] = (), resume: Path | None = None
) -> Trainer:
    """The whole training, ready for `.fit()`, with its run folder made.

    Args:
        config: from `compose`.
        run_dir: the run folder; None is `outputs/{config.run}`.
        overrides: what the config was composed from, for the run folder.
        resume: a checkpoint of `run_dir`, which must be given then, to go on from in that same folder.

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
    assert config.precision is not None  # `finish` decided it
    precision = precisions.build(config.precision, parallel.device)
    config, notes = _settled(config, parallel, precision)
    train, batches = _build_train(config, parallel)
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
            model.load_state_dict(state["model"])
    elif config.model.weights:
        arch = getattr(config.model, "arch", None) if config.model.name == "torchvision" else None
        notes.append(load_weights(model, config.model.weights, arch))
    found = probe(model, config.image_size, channels_last=bool(config.channels_last))
    notes += hints(config, Facts.of(model, found, [train, val], parallel, precision))
    learner = _build_learner(config, model, train, precision)
    if config.optim.scale_lr:
        images = f"{train.global_batch * config.accumulate} / {config.optim.scale_lr} images"
        notes.append(f"lr     {learner.optimizer.defaults['lr']:g} = {config.optim.lr:g} x {images} of an update")
    if parallel.rank:  # the same weights everywhere, but not the same dropout
        rng.seed_all(config.seed + parallel.rank)
    if config.compile:
        seconds = compile_now(config, learner.step, learner.average.model, parallel.device, len(train.classes))
        notes.append(f"compile  {seconds:.1f} s, before the first step")

    facts = {"config": configs.to_dict(config), "classes": list(train.classes), "world_size": parallel.world_size}
    if resume is None:
        path = run_dir or Path("outputs") / check_run_name(config.run)
        about = {"classes": list(train.classes), **data}
        run_dir = Path(parallel.first(lambda: str(_make_run_dir(path, config, overrides, about))))
    assert run_dir is not None
    trainer = Trainer(
        model=model,
        train_step=parallel.wrap(learner.step, find_unused=bool(found.unused)),
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
        loop=LoopConfig(epochs=config.epochs, accumulate=config.accumulate, max_grad_norm=config.max_grad_norm),
    )
    if state:
        with fitting("resume"):
            trainer.load_state_dict(state)
    return trainer


@dataclass(frozen=True)
class Learner:
    """What learns, and by which steps."""

    step: Step
    average: NoAverage
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler


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
    return Learner(step, average, optimizer, schedule)


def _settled(config: Config, parallel: Parallel, precision: Precision) -> tuple[Config, list[str]]:
    """The config with nothing left to `auto`, and lines that say why it is what it is."""
    if config.cudnn_benchmark is None:
        config = replace(config, cudnn_benchmark=not config.deterministic)
    if "auto" not in (config.compile, config.channels_last, config.cudnn_benchmark):
        set_reproducible(deterministic=config.deterministic, cudnn_benchmark=bool(config.cudnn_benchmark))
        return config, []
    classes = sources.build(config.data, config.data.train_split).classes
    config, lines = settled(config, len(classes), parallel, precision)
    set_reproducible(deterministic=config.deterministic, cudnn_benchmark=bool(config.cudnn_benchmark))
    rng.seed_all(config.seed)
    return config, lines


def _build_train(config: Config, parallel: Parallel) -> tuple[Loader, BatchStream]:
    """The training split's loader, and what the loop asks for batches: it, or several for `progressive`."""
    train = build_loader(config, "train", parallel=parallel)
    if not config.progressive:
        return train, train
    loaders = {config.image_size: train}
    for size in config.progressive:
        if size not in loaders:
            try:
                loaders[size] = build_loader(replace(config, image_size=size), "train", parallel=parallel)
            except ConfigError as error:
                raise ConfigError(f"progressive: at {size} pixels {error}") from error
    return train, Stages(config.progressive, [loaders[size] for size in config.progressive], config.epochs)


def _make_run_dir(path: Path, config: Config, overrides: Sequence[str], about: Mapping[str, Any]) -> Path:
    """A new run folder with what it says of its run."""
    run_dir = snapshot.claim_run_dir(path)
    snapshot.write(run_dir, config, overrides, about)
    return run_dir


def evaluate_checkpoint(config: Config, state: Mapping[str, Any]) -> tuple[dict[str, float], Loader]:
    """Validation scores (loss, top1, top5) of a checkpoint's model, and the loader they come from.

    Raises:
        ConfigError, DataError: the data or the model doesn't fit the checkpoint.
    """
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


def num_workers(config: Config, parallel: Parallel | None) -> int:
    """Threads or processes that load for one rank: what was asked for, or its share of the cores."""
    ranks = parallel.local_world_size if parallel else 1
    return max(1, available_cores() // ranks) if isinstance(config.num_workers, str) else config.num_workers


def _share(config: Config, source: Source, *, train: bool) -> float:
    """How much of the cache a split gets: as much as it has of both splits' bytes."""
    if config.data.cache is Cache.none:
        return 1.0
    try:
        other = sources.build(config.data, config.data.val_split if train else config.data.train_split)
    except EffLoopError:  # there is only this one
        return 1.0
    mine, others = (part.fingerprint()["bytes"] for part in (source, other))
    return float(mine / (mine + others))

"""Config -> parts -> Trainer: the only place that sees the whole tree. Flat on purpose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from effloop import config as configs
from effloop import snapshot
from effloop.checkpoint import files, keepers, rng
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
from effloop.data.transfer import Transfer
from effloop.errors import ConfigError, DataError, EffLoopError, warn
from effloop.hardware import available_cores, find_device, keep_freed_memory
from effloop.model import models
from effloop.optim import Objective, optimizers, schedules
from effloop.parallel import Parallel, parallels
from effloop.precision import precisions
from effloop.record import Metrics, recorders
from effloop.search import check_run_name
from effloop.trainer import LoopConfig, Progress, Trainer, evaluate


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
    device = find_device(config.device)
    if config.reuse_memory:
        keep_freed_memory()
    num_workers = _num_workers(config)
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
    check_samples(plan, config.data.check, num_workers)
    engine = engines.build(config.engine, plan, num_workers=num_workers, pin_memory=device.type == "cuda")
    transfer = Transfer(
        device,
        config.data.mean,
        config.data.std,
        channels_last=config.channels_last,
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
    device = find_device(config.device)
    parallel = parallels.build(config.parallel)
    assert config.precision is not None  # `finish` decided it
    precision = precisions.build(config.precision, device)
    train = build_loader(config, "train", parallel=parallel)
    val = build_loader(config, "val", parallel=parallel)
    check_same_classes(train.plan.source, val.plan.source)
    updates = len(train) // config.accumulate
    if not updates:
        raise ConfigError(
            f"accumulate: {config.accumulate} is more than the {len(train)} batches of an epoch; "
            f"set accumulate={len(train)} or less"
        )

    model = parallel.wrap(build_model(config, train.classes, device))
    optimizer = optimizers.build(config.optim, model.parameters())
    schedule = schedules.build(config.schedule, optimizer, updates=updates * config.epochs)
    checkpoint = resume or (files.find(Path(config.resume), "last") if config.resume else None)
    state = files.read(checkpoint) if checkpoint else None
    if state:
        with _fitting("resume"):  # before there is a new run folder
            _check_resumable(config, state, in_place=resume is not None)
            _check_trained_on(state, train)
            model.load_state_dict(state["model"])

    if resume is None:
        run_dir = snapshot.claim_run_dir(run_dir or Path("outputs") / check_run_name(config.run))
        data = {"train": train.plan.source.fingerprint(), "val": val.plan.source.fingerprint()}
        snapshot.write(run_dir, config, overrides, {"classes": list(train.classes), **data})
    assert run_dir is not None
    facts = {"config": configs.to_dict(config), "classes": list(train.classes)}
    first_step = Progress(**state["progress"]).step if state else 0
    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        objective=Objective(config.optim.label_smoothing),
        metrics=Metrics(device),
        parallel=parallel,
        precision=precision,
        recorder=recorders.build(config.record, run_dir=run_dir, first_step=first_step),
        checkpoints=keepers.build(config.checkpoint, run_dir, facts),
        train=train,
        val=val,
        loop=LoopConfig(epochs=config.epochs, accumulate=config.accumulate),
    )
    if state:
        with _fitting("resume"):
            trainer.load_state_dict(state)
    return trainer


def build_model(config: Config, classes: Sequence[str], device: torch.device) -> nn.Module:
    """The model on its device, in its memory layout, compiled if asked for.

    Raises:
        ConfigError: `model.num_classes` differs from the data's, or the model can't take such images.
    """
    wanted = config.model.num_classes
    if wanted is not None and wanted != len(classes):
        raise ConfigError(
            f"model.num_classes: {wanted}, but the data has {len(classes)} classes; "
            f"set model.num_classes={len(classes)} or null"
        )
    try:
        model: nn.Module = models.build(config.model, num_classes=len(classes), image_size=config.image_size)
        with torch.no_grad():  # many a network can't take a small image, and says so only now
            logits = model.eval()(torch.zeros(1, 3, config.image_size, config.image_size))
        if logits.shape != (1, len(classes)):
            raise ValueError(f"it gives {tuple(logits.shape)} for one image, not (1, {len(classes)}) logits")
    except EffLoopError:
        raise
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"model: {getattr(config.model, 'arch', config.model.name)} can't be had for "
            f"image_size={config.image_size}: {reason}; set another image_size or model"
        ) from error
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    model = model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    if config.compile:
        model.compile()  # in place, so that names in checkpoints stay as they are
    return model


def evaluate_checkpoint(config: Config, state: Mapping[str, Any]) -> tuple[dict[str, float], Loader]:
    """Validation scores (loss, top1, top5) of a checkpoint's model, and the loader they come from.

    Raises:
        ConfigError, DataError: the data or the model doesn't fit the checkpoint.
    """
    device = find_device(config.device)
    parallel = parallels.build(config.parallel)
    assert config.precision is not None  # `finish` decided it
    precision = precisions.build(config.precision, device)
    val = build_loader(config, "val", parallel=parallel)
    _check_trained_on(state, val)
    _check_same_model(config, state)
    model = build_model(config, val.classes, device)
    with _fitting("eval"):
        model.load_state_dict(state["model"])
    with closing(val):
        objective = Objective(config.optim.label_smoothing)
        return evaluate(model, val.epoch(0), objective, Metrics(device), precision, parallel), val


def _check_trained_on(state: Mapping[str, Any], loader: Loader) -> None:
    if list(loader.classes) != state["classes"]:
        raise DataError(
            f"{loader.plan.source.where} has the classes {', '.join(loader.classes[:8])}, "
            f"the checkpoint was trained on {', '.join(state['classes'][:8])}; "
            "set data.root to data of the same classes"
        )


def _check_resumable(config: Config, state: Mapping[str, Any], *, in_place: bool) -> None:
    _check_same_model(config, state)
    for key in ("batch_size", "accumulate"):  # the schedule's position counts updates
        was, now = state["config"][key], getattr(config, key)
        if was != now:
            raise ConfigError(f"{key}: the checkpoint was trained with {was}, not {now}; keep {key}={was}")
    optim, epoch = state["config"]["optim"]["name"], state["progress"]["epoch"]
    if optim != config.optim.name:
        raise ConfigError(f"optim: the checkpoint was trained by optim={optim}, not {config.optim.name}; keep it")
    if epoch >= config.epochs and not in_place:
        raise ConfigError(
            f"epochs: {config.epochs}, but {config.resume} has done {epoch}; set epochs={epoch + 1} or more"
        )


def _check_same_model(config: Config, state: Mapping[str, Any]) -> None:
    was, now = state["config"]["model"], configs.to_dict(config)["model"]
    differ = [key for key in sorted({*was, *now} - {"num_classes"}) if was.get(key) != now.get(key)]
    if differ:
        raise ConfigError(
            f"model: the checkpoint holds {', '.join(f'{key} {was.get(key)}' for key in differ)}, "
            f"not {', '.join(f'{key} {now.get(key)}' for key in differ)}; keep the model"
        )


@contextmanager
def _fitting(command: str) -> Iterator[None]:
    """Around loading a state: what doesn't fit becomes one line."""
    try:
        yield
    except (KeyError, RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{command}: the checkpoint doesn't fit this config: {reason}") from error


def _num_workers(config: Config) -> int:
    return available_cores() if isinstance(config.num_workers, str) else config.num_workers


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

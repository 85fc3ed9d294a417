"""Config -> the batches of a split: source, order, decoder, augmentation, engine, transfer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from effloop.build.environment import Environment
from effloop.build.resolve import Resolved, resolved
from effloop.config import Config
from effloop.data.augment import augments
from effloop.data.augment.mix import Mix
from effloop.data.cache.cached import cached
from effloop.data.check import check_samples
from effloop.data.decode import decoders
from effloop.data.engine import engines
from effloop.data.engine.threads import ThreadsConfig
from effloop.data.five_crops import five_crops
from effloop.data.loader import Loader
from effloop.data.plan import Order, Plan
from effloop.data.progressive import Stages
from effloop.data.source import Cache, Source, Tail, sources
from effloop.data.source.splits import check_same_classes, classes_without_samples, open_split
from effloop.data.transfer import Transfer
from effloop.errors import ConfigError, EffLoopError, warn
from effloop.parallel import OwnSlice, Slice, own_slice
from effloop.system.hardware import find_device, keep_freed_memory
from effloop.task import Task, tasks
from effloop.train.trainer import BatchStream
from effloop.train.views import ONE_VIEW, Views


def build_loader(
    config: Config,
    split: str = "train",
    *,
    parallel: Slice | None = None,
    classes: Sequence[str] | None = None,
    views: Views = ONE_VIEW,
) -> Loader:
    """The batches of one split, for EffLoop's loop or anybody's.

        for batch in effloop.build_loader(cfg, split="train"):
            batch.images, batch.targets, batch.ids, batch.valid

    Args:
        config: from `compose`.
        split: `train` (shuffled, augmented, tail dropped or wrapped), `val` (in order, centre crops, tail padded and
            marked in `valid`), or the name of any other split, which is loaded as `val` is.
        parallel: whose slice of the batches, such as `trainer.parallel`; None is this process's, as
            torch.distributed, torchrun or Slurm have it: of a single process all.
        classes: with `data.allow_missing_classes`, the names that labels count, such as those of a checkpoint; None is
            those of the training split, then others of the validation split.
        views: for test-time augmentation; with its five crops each batch comes five times in a row, as `Views.outputs`
            takes them. Not of `train`.

    Returns:
        A loader of `Batch`es on `config.device`: images (N, 3, S, S) float32, normalised with
        `data.mean` and `data.std`, or uint8 where these are null.

    Raises:
        ConfigError: a value that doesn't fit.
        DataError: the data isn't there or a sample of the first look can't be read.
    """
    if config.reuse_memory:
        keep_freed_memory()
    parallel = parallel or own_slice(find_device(config.device))
    return _loader(resolved(config, parallel), tasks.build(config.task), split, parallel, classes, views)


def loader_of(config: Config, source: Source, plan: type[Plan] = Plan, views: Views = ONE_VIEW) -> Loader:
    """The batches of any source, in order, prepared as a validation split's are, and loaded by threads.

    Args:
        config: from `compose`; of `data` only the normalisation is used, and `engine` isn't.
        source: what is loaded.
        plan: the class of the loader's plan.
        views: as in `build_loader`.

    Raises:
        ConfigError: the augmentation or the images don't allow the views.
    """
    device = find_device(config.device)
    found = resolved(config)
    found = replace(
        found,
        batch_size=max(1, min(found.batch_size, len(source))),
        data=replace(found.data, cache=Cache.none),
        engine=ThreadsConfig(name="threads"),
    )
    made = _plan(found, source, OwnSlice(0, 1, 1, device), train=False, kind=plan)
    if views.fivecrop:
        made = five_crops(made)
    return _loader_of(found, tasks.build(config.task), made, device, train=False)


def _loader(
    config: Resolved,
    task: Task,
    split: str,
    parallel: Slice,
    classes: Sequence[str] | None = None,
    views: Views = ONE_VIEW,
) -> Loader:
    train, device = split == "train", parallel.device
    plan = _plan(config, _source(config, split, parallel, classes), parallel, train=train)
    if device.type == "cpu" and plan.augment.has_device_part:
        warn("augment.device=gpu: the model is on the CPU; batches are augmented there, in the training thread")
    check_samples(plan, config.data.check, config.num_workers)
    if views.fivecrop:
        plan = five_crops(plan)
    return _loader_of(config, task, plan, device, train=train)


def _loader_of(config: Resolved, task: Task, plan: Plan, device: torch.device, *, train: bool) -> Loader:
    engine = engines.build(config.engine, plan, num_workers=config.num_workers, pin_memory=device.type == "cuda")
    transfer = Transfer(
        device,
        config.data.mean,
        config.data.std,
        channels_last=config.channels_last,
        target_dtype=task.target.dtype,
        augment=plan.augment,
        mix=_mix(config, task, plan.source) if train else None,
    )
    return Loader(plan, engine, transfer)


def _mix(config: Resolved, task: Task, source: Source) -> Mix | None:
    """What mixes the images of a batch; None where targets are no classes.

    Raises:
        ConfigError: that is asked for nevertheless.
    """
    num_outputs = task.num_outputs(source)
    if task.mixes:
        return Mix(config.augment.mixup, config.augment.cutmix, num_outputs)
    for key in ("mixup", "cutmix"):
        if value := getattr(config.augment, key):
            raise ConfigError(
                f"augment.{key}: {value} mixes classes, and task={config.task.name} has none; set augment.{key}=0"
            )
    return None


def _source(config: Resolved, split: str, parallel: Slice, classes: Sequence[str] | None) -> Source:
    """The samples of a split."""
    splits = {"train": config.data.train_split, "val": config.data.val_split}
    source = open_split(config.data, splits.get(split, split), classes)
    if config.data.allow_missing_classes and not parallel.rank and (lacking := classes_without_samples(source)):
        of = f"{len(lacking)} of {len(source.classes)} classes"
        warn(f"data.allow_missing_classes: {source.where} has no samples of {of}: {', '.join(lacking[:8])}")
    return source


def _plan(config: Resolved, source: Source, parallel: Slice, *, train: bool, kind: type[Plan] = Plan) -> Plan:
    """Which samples are loaded when, and how."""
    order = Order(
        num_samples=len(source),
        batch_per_rank=config.batch_size,
        seed=config.seed if train else None,
        tail=config.data.tail if train else Tail.pad,
        rank=parallel.rank,
        world_size=parallel.world_size,
    )
    if not len(order):
        raise ConfigError(
            f"batch_size: {order.global_batch} is more than the {len(source)} samples of {source.where}; "
            f"set batch_size={len(source) // order.world_size or 1} or less, or data.tail=wrap"
        )
    decoder = decoders.build(config.decode)
    limit = None if config.data.cache_gb is None else config.data.cache_gb * 1e9
    return kind(
        source=cached(source, config.data.cache, decoder, limit, share=_share(config, source, train=train)),
        decoder=decoder,
        augment=augments.build(config.augment, size=config.image_size, train=train),
        order=order,
        seed=config.seed,
    )


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


@dataclass(frozen=True)
class Data:
    """Both splits of a run.

    Attributes:
        train: the training split at `image_size`.
        batches: what the loop asks for batches: `train`, or loaders of several sizes that take turns.
        largest: the loader of the training split whose batches take most memory.
        val: the validation split.
        fingerprints: {split: its fingerprint}.
        notes: lines for users.
    """

    train: Loader
    batches: BatchStream
    largest: Loader
    val: Loader
    fingerprints: dict[str, Any]
    notes: Sequence[str] = ()

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of their labels; empty where targets are no classes."""
        return list(self.train.classes)


def build_data(environment: Environment) -> Data:
    """Open both splits, and start what loads them.

    Raises:
        ConfigError, DataError: they can't be, or ranks have different data.
    """
    config, task, parallel = environment.config, environment.task, environment.parallel
    train = _loader(config, task, "train", parallel)
    batches, largest = _stages(environment, train)
    val = _loader(config, task, "val", parallel)
    fingerprints = {"train": train.plan.source.fingerprint(), "val": val.plan.source.fingerprint()}
    check_same_classes(train.plan.source, val.plan.source)
    parallel.assert_equal("the data", json.dumps(fingerprints, sort_keys=True))
    notes = []
    if fingerprints["train"] == fingerprints["val"]:
        notes.append(
            f"validation uses the training images ({val.plan.source.where}): its scores say nothing about other "
            "images; set data.val_split to a split of images that aren't trained on"
        )
        parallel.on_rank0(lambda: warn(notes[0]))
    return Data(train, batches, largest, val, fingerprints, notes)


def _stages(environment: Environment, train: Loader) -> tuple[BatchStream, Loader]:
    """What the loop asks for batches, and the loader whose batches take most memory.

    Raises:
        ConfigError: a recipe can't make images of a size.
    """
    config = environment.config
    if not config.progressive:
        return train, train
    loaders = {config.image_size: train}
    for size in config.progressive:
        if size not in loaders:
            try:
                sized = replace(config, image_size=size)
                loaders[size] = _loader(sized, environment.task, "train", environment.parallel)
            except ConfigError as error:
                raise ConfigError(f"progressive: at {size} pixels {error}") from error
    stages = Stages(config.progressive, [loaders[size] for size in config.progressive], config.epochs)
    return stages, loaders[max(config.progressive)]

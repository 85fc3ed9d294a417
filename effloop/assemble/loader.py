"""Config -> the batches of splits: source, order, decoder, augmentation, engine, transfer."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from effloop.assemble.environment import Environment, Resolved, check_limits, resolved
from effloop.config import Config
from effloop.data.augment import augments
from effloop.data.augment.mix import Mix
from effloop.data.bad import Ledger, OnBad, OnError
from effloop.data.check import check_samples, copied, look
from effloop.data.decode import decoders
from effloop.data.engine import engines
from effloop.data.engine.base import engine_class
from effloop.data.loader import Loader, Stages
from effloop.data.order import Order
from effloop.data.plan import Plan
from effloop.data.source import Cache, Kind, Source, Tail
from effloop.data.source.base import classes_without_samples
from effloop.data.source.config import DataConfig, Index
from effloop.data.source.root import remote_facts, remote_files
from effloop.data.source.splits import check_same_classes, open_part, open_split
from effloop.data.source.storage.kept import opening_once
from effloop.data.transfer import Transfer
from effloop.errors import PROGRAM, ConfigError, EffLoopError, warn
from effloop.parallel import OwnSlice, Slice, own_slice
from effloop.system import gpu
from effloop.system.hardware import keep_freed_memory
from effloop.task import Task, tasks
from effloop.train.trainer import BatchStream


def build_loader(
    config: Config,
    split: str = "train",
    *,
    parallel: Slice | None = None,
    classes: Sequence[str] | None = None,
    evaluate: bool = False,
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
        evaluate: load `train`, too, as `val` is.

    Returns:
        A loader of `Batch`es on `config.device`: images (N, 3, H, W) float32, normalised with
        `data.mean` and `data.std`, or uint8 where these are null.

    Raises:
        ConfigError: a value that doesn't fit.
        DataError: the data isn't there or a sample of the first look can't be read.
    """
    if config.reuse_memory:
        keep_freed_memory()
    parallel = parallel or own_slice(gpu.find_device(config.device))
    check_limits(config, parallel, on_host=parallel.device.type == "cpu")
    train, found = split == "train" and not evaluate, resolved(config, parallel)
    if train and len(config.progressive) == 1:  # as by `eval_image_size`
        found = replace(found, image_size=config.progressive[0])
    loader = split_loader(found, tasks.build(config.task), split, parallel, train=train, classes=classes)
    loader.note = _check(found, parallel, {split: loader})
    return loader


def _check(config: Resolved, parallel: Slice, loaders: Mapping[str, Loader]) -> str:
    """As `check_samples`, and warn of those that will be skipped; returns a line about those that EXIF turns."""
    line, turned = check_samples(
        {split: loader.plan for split, loader in loaders.items()},
        config.data.check,
        config.num_workers,
        config.max_errors if config.on_error is OnError.skip else None,
        _command("verify", config.data),
    )
    if line and not parallel.rank:
        warn(line)
    return turned


def _command(name: str, config: DataConfig) -> str:
    """What to type for a command on the data of a run."""
    keys = ("root", "train_split", "val_split", "val", "folds", "fold", "group")
    given = {key: value for key in keys if (value := getattr(config, key)) != getattr(type(config), key)}
    words = [f"data.{key}={'null' if value is None else value}" for key, value in given.items()]
    return shlex.join([name, *[f"data={config.name}"] * (config.name != "auto"), *words])


def loader_of(config: Config, source: Source, plan: type[Plan] = Plan) -> Loader:
    """The batches of any source, in order, prepared as a validation split's are, and loaded by threads: of the config's
    `data` only the normalisation is used, and `engine` isn't.
    """
    from effloop.data.engine.threads import ThreadsConfig

    device = gpu.use(gpu.find_device(config.device))
    found = resolved(config)
    found = replace(
        found,
        batch_size=max(1, min(found.batch_size, len(source))),
        data=replace(found.data, cache=Cache.none, index=Index.none),
        engine=ThreadsConfig(name="threads"),
    )
    made = _plan(found, source, OwnSlice(0, 1, 1, device), train=False, kind=plan)
    return _loader_of(found, tasks.build(config.task), made, device, train=False)


def split_loader(
    config: Resolved, task: Task, split: str, parallel: Slice, *, train: bool, classes: Sequence[str] | None = None
) -> Loader:
    """The batches of a split, to be trained on or evaluated; arguments and errors as of `build_loader`."""
    source = open_split(config.data, split, classes)
    if config.data.allow_missing_classes and not parallel.rank and (lacking := classes_without_samples(source)):
        of = f"{len(lacking)} of {len(source.classes)} classes"
        warn(f"data.allow_missing_classes: {source.where} has no samples of {of}: {', '.join(lacking[:8])}")
    plan, device = _plan(config, source, parallel, train=train), parallel.device
    if device.type == "cpu" and plan.augment.has_device_part and not parallel.rank:
        warn("augment.device=gpu: the model is on the CPU; batches are augmented there, in the training thread")
    ledger = None
    if config.on_error is OnError.skip:
        plan = replace(plan, on_bad=OnBad.replace if train else OnBad.leave_out)
        ledger = Ledger(split, source.where, len(source), config.max_errors)
    loader = _loader_of(config, task, plan, device, train=train)
    loader.ledger = ledger
    return loader


def _loader_of(config: Resolved, task: Task, plan: Plan, device: torch.device, *, train: bool) -> Loader:
    transfer = Transfer(
        device,
        config.data.mean,
        config.data.std,
        channels_last=config.channels_last,
        target_dtype=torch.uint8 if plan.source.kind is Kind.masks else task.target.dtype,
        augment=plan.augment,
        mix=_mix(config, task, plan.source) if train else None,
    )
    if engine_class(config.engine).fills_by_plan:
        plan = replace(plan, output=transfer.host_output())
    engine = engines.build(config.engine, plan, num_workers=config.num_workers, device=device)
    return Loader(plan, engine, transfer)


def _mix(config: Resolved, task: Task, source: Source) -> Mix | None:
    """What mixes the images of a batch; None where the task's targets can't be mixed, a ConfigError if asked for."""
    num_outputs = task.num_outputs(source)
    for key in ("mixup", "cutmix"):
        if (value := getattr(config.augment, key)) and key not in task.mixes:
            raise ConfigError(
                f"augment.{key}: {value} mixes targets as task={config.task.name} can't learn them; set augment.{key}=0"
            )
    return Mix(config.augment, num_outputs) if task.mixes else None


def _plan(config: Resolved, source: Source, parallel: Slice, *, train: bool, kind: type[Plan] = Plan) -> Plan:
    order = Order(
        num_samples=len(source),
        batch_per_rank=config.batch_size,
        seed=config.seed if train else None,
        tail=config.data.tail if train else Tail.pad,
        rank=parallel.rank,
        world_size=parallel.world_size,
        parts=len(parallel.parts),
        repeats=config.data.repeats if train else 1,
    )
    if train and config.data.balance:
        from effloop.data.balance import BalancedOrder, ClassDraw

        folder = config.data.index_dir
        order = BalancedOrder(**vars(order), draw=ClassDraw(source, config.data.balance, config.seed, folder))
    if not len(order):
        most = len(source) // (order.world_size * order.parts)
        virtual, few = config.parallel.virtual, f"start at most {len(source)} ranks, or set"
        few = f"set parallel.virtual={len(source)} or less, or" if virtual else few
        fix = f"set batch_size={most} or less, or" if most else few
        raise ConfigError(
            f"batch_size: {order.all_parts} is more than the {len(source)} samples in {source.where}; "
            f"{fix} data.tail=wrap"
        )
    decoder = decoders.build_for(config.data.channels, config.decode)
    limit = None if config.data.cache_gb is None else config.data.cache_gb * 1e9
    exact = engine_class(config.engine).exact  # DALI decodes by itself
    kept = config.data.cache is not Cache.pixels
    if exact and decoder.uses_indexes and kept:
        from effloop.data.source.entropy import with_indexes

        source = with_indexes(source, config.data)
    augment = augments.build_for(config.data.channels, config.augment, size=config.size, train=train)
    if source.kind is Kind.masks:
        from effloop.data.masks import MaskPlan

        kind, augment = MaskPlan, augment.with_masks()
    if config.data.cache is not Cache.none:
        from effloop.data.cache.cached import cached

        source = cached(source, config.data.cache, decoder, limit, share=_share(config, source, train=train))
    return kind(source=source, decoder=decoder, augment=augment, order=order, seed=config.seed)


def _share(config: Config, source: Source, *, train: bool) -> float:
    """How much of the cache a split gets: as much as it has of both splits' bytes."""
    try:
        other = open_part(config.data, "val" if train else "train")
    except EffLoopError:  # there is only this one
        return 1.0
    mine, others = (part.fingerprint()["bytes"] or len(part) for part in (source, other))
    return float(mine / (mine + others))


@dataclass(frozen=True)
class Data:
    """Both splits of a run."""

    train: Loader  # the training split at `image_size`
    batches: BatchStream  # what the loop asks for batches: `train`, or loaders of several sizes that take turns
    largest: Loader  # the loader of the training split whose batches take most memory
    val: Loader  # the validation split
    fingerprints: dict[str, Any]  # {split: its fingerprint}; of the files behind a URL `remote`, too, or `remote-KEY`
    notes: Sequence[str]  # lines for users
    download: Mapping[str, float]  # what it took to have the files behind a URL here; empty for other data

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of their labels; empty where targets are no classes."""
        return list(self.train.classes)

    @property
    def target_names(self) -> list[str]:
        """Names of the outputs: the classes, or of each of the numbers."""
        return list(self.train.source.target_names)


@opening_once()
def build_data(environment: Environment) -> Data:
    """Open both splits, and start what loads them; an error on all ranks if they have different data."""
    config, task, parallel = environment.config, environment.task, environment.parallel
    train = split_loader(config, task, "train", parallel, train=True)
    val = split_loader(config, task, "val", parallel, train=False)
    note = _check(config, parallel, {"train": train, "val": val})
    batches, largest = _stages(environment, train)
    fingerprints = {"train": train.plan.source.fingerprint(), "val": val.plan.source.fingerprint()}
    fingerprints |= {name: manifest.fingerprint() for name, manifest in remote_files(config.data).items()}
    check_same_classes(train.plan.source, val.plan.source)
    parallel.assert_equal("the data", json.dumps(fingerprints, sort_keys=True))
    notes = [*dict.fromkeys(filter(None, (train.plan.source.note, val.plan.source.note, note)))]
    if line := train.plan.order.describe():
        notes.append(line)
    download, lines = remote_facts(config.data)
    notes += lines
    if line := parallel.on_rank0(lambda: _warned(config, train.plan.source, val.plan.source)):
        notes.append(line)
    return Data(train, batches, largest, val, fingerprints, notes, download)


def _warned(config: Resolved, train: Source, val: Source) -> str:
    """Warn of images that both splits have, if some were found; returns the line."""
    data, line = config.data, ""
    if data.cache is not Cache.none:
        from effloop.data.cache.cached import CachedSource

        train, val = (each.source if isinstance(each, CachedSource) else each for each in (train, val))
    if train.fingerprint() == val.fingerprint():
        line = (
            f"validation uses the training images ({val.where}): its scores say nothing about other images; set "
            "data.val_split to a split of images that aren't trained on"
        )
    elif found := copied(train, val, data.check, config.num_workers):
        divided = data.val or data.folds
        fix = "data.group=copies keeps them on one side" if divided else "data.exclude=audit.csv leaves them out"
        line = f"{found}: scores are too good; {PROGRAM} {_command('audit', data)} shows them, {fix}"
    if line:
        warn(line)
    return line


def _stages(environment: Environment, train: Loader) -> tuple[BatchStream, Loader]:
    """What the loop asks for batches, and the loader whose batches take most memory."""
    config = environment.config
    if not config.progressive:
        return train, train
    loaders, sizes = {config.size: train}, config.train_sizes
    for size in sizes:
        if size not in loaders:
            try:
                sized = replace(config, image_size=list(size))
                loaders[size] = split_loader(sized, environment.task, "train", environment.parallel, train=True)
                loaders[size].ledger = train.ledger
                look(loaders[size].plan, config.data.check, config.num_workers)
            except ConfigError as error:
                raise ConfigError(f"progressive: at {size} pixels {error}") from error
    stages = Stages(sizes, [loaders[size] for size in sizes], config.epochs)
    return stages, loaders[max(sizes, key=lambda size: size.pixels)]

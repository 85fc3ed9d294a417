"""Config -> what learns: model, weights, optimizer, schedule, the step around them."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from effloop import model as networks
from effloop.assemble import checks
from effloop.assemble.environment import Environment, Resolved
from effloop.assemble.loader import Data, build_loader
from effloop.assemble.model import build_model, compile_now, state_preserved
from effloop.checkpoint import files, rng
from effloop.config import Config
from effloop.data.bad import OnError
from effloop.data.loader import Loader
from effloop.data.source.storage.kept import kept_folder
from effloop.errors import ConfigError
from effloop.model import parameters
from effloop.optim import EMA, NoEMA, optimizers, scaled_lr, schedules
from effloop.parallel import Parallel
from effloop.precision import Precision
from effloop.system.hardware import determinism_explained
from effloop.task import is_spatial
from effloop.train.trainer import BatchStream, Step

_FITTED = 5000 * 32 * 32  # pixels of the images that a model is fitted to, as by cifar10-airbench
_SHOWN = 8  # layers of which the learning rate is in a run's log

Advise = Callable[[Resolved, nn.Module, networks.Probe, Sequence[Loader], Parallel, Precision], list[str]]
"""Config, model, its probe, loaders, parallel and precision of a run -> lines for users."""


@dataclass(frozen=True)
class Start:
    """What training starts from."""

    checkpoint: Path | None = None  # a file to continue from; None is a run of its own
    state: dict[str, Any] | None = None  # what it holds
    in_place: bool = False  # whether the run continues in the checkpoint's own run folder
    again: bool = False  # whether the run begins in the folder of an earlier start, which came to no checkpoint
    saved_ns: int = 0  # when the last checkpoint beside it was saved

    @property
    def epoch(self) -> int:
        return int(self.state["progress"]["epoch"]) if self.state else 0

    @classmethod
    def of(cls, config: Config, resume: Path | None) -> Start:
        """Read the checkpoint that `resume`, or `config.resume`, names; `resume` may be the run's own folder."""
        if resume and resume.is_dir():
            return replace(cls.of(config, None), again=True)
        checkpoint = resume or (files.find(Path(config.resume), "last") if config.resume else None)
        if checkpoint is None:
            return cls()
        saved_ns = _saved_ns(checkpoint)  # before it is read
        state = files.read(checkpoint)
        if split := files.split_state(checkpoint, state):
            state["shards"]["folder"] = split
        return cls(checkpoint, state, resume is not None, saved_ns=saved_ns)

    def check_unchanged(self) -> None:
        """Once the run folder is locked: a ConfigError if another process trained the run since the state was read."""
        if self.checkpoint and _saved_ns(self.checkpoint) != self.saved_ns:
            raise ConfigError(
                f"resume: another process has trained the run of {self.checkpoint} meanwhile; type it again"
            )


def _saved_ns(checkpoint: Path) -> int:
    last = checkpoint.with_name("last.ckpt")
    return last.stat().st_mtime_ns if last.exists() else 0


@dataclass(frozen=True)
class Learner:
    """What learns, and by which steps."""

    model: nn.Module  # what is trained, its names as in checkpoints
    train_step: nn.Module  # the `Step` around it, as `parallel.wrap_step` returned it
    average: NoEMA  # has the weights that are evaluated
    optimizer: torch.optim.Optimizer  # of the parameters that are trained
    schedule: torch.optim.lr_scheduler.LRScheduler
    train: BatchStream  # what the loop asks for batches
    val: BatchStream
    notes: list[str]  # lines for users
    compile_s: float = 0.0  # seconds that compiling took


def build_learner(environment: Environment, data: Data, start: Start, advise: Advise | None) -> Learner:
    """The model with the weights that training begins with, and what changes them."""
    config, parallel, precision = environment.config, environment.parallel, environment.precision
    if config.probe:
        check_probe(config, parallel)
    num_outputs = environment.task.num_outputs(data.train.source)
    model = build_model(config, num_outputs, parallel.device, environment.module)
    notes = _load(model, environment, data, start)
    found = None
    if advise or parallel.num_parts > 1 or config.model.freeze:  # else nobody needs it
        with determinism_explained(), precision.autocast():
            found = networks.probe(model, config.size, config.data.channels, channels_last=config.channels_last)
    if advise and found:
        notes += advise(config, model, found, [data.largest, data.val], parallel, precision)
    train: BatchStream = data.batches
    val: BatchStream = data.val
    if config.probe:
        train, val, more = build_probe(environment, data, model)
        notes += more
    model = parallel.wrap(model)
    copied = copy.deepcopy(model) if config.optim.ema else None  # one that is split can't be copied
    for each in filter(None, (model, copied)):  # before the optimizer: a strategy may replace the parameters
        parallel.shard(each, _blocks, precision.dtype)
    average, optimizer, schedule, more = _optimizer(config, model, copied, train, start)
    left = (len(train) // config.accumulate) * (config.epochs - start.epoch)
    config.profile.check(left, parallel.device, in_place=start.in_place)
    notes += more
    if parallel.rank:  # the same weights everywhere, but not the same dropout
        rng.seed_all(config.seed + parallel.rank)
    step = Step(model, environment.task, precision)
    train_step = parallel.wrap_step(step, find_unused=bool(found and found.unused))
    seconds = 0.0
    if config.compile:
        seconds = compile_now(config, train_step, average.model, environment.task, precision, num_outputs)
        notes.append(f"compile  {seconds:.1f} s, before the first step")
    return Learner(model, train_step, average, optimizer, schedule, train, val, notes, seconds)


def _load(model: nn.Module, environment: Environment, data: Data, start: Start) -> list[str]:
    config, notes = environment.config, []
    normalisation = tuple(config.data.mean or ()), tuple(config.data.std or ())
    if start.state:
        with checks.fitting("resume"):  # before there is a new run folder
            world_size = environment.parallel.world_size
            checks.check_resumable(config, start.state, world_size=world_size, in_place=start.in_place)
            checks.check_trained_on(start.state, data.train.source)
            notes += checks.changed_values(environment.recorded, start.state)
            notes += checks.check_same_data(start.state, data.fingerprints, in_place=start.in_place)
            checks.check_position(start.state, len(data.batches) * data.batches.global_batch)
            checks.check_same_tensors(model, files.trained(start.state))
            model.load_state_dict(files.trained(start.state))
    elif config.model.weights is not None:
        notes.append(
            networks.load_weights(model, config.model.weights, config.model.zoo, config.image_size, normalisation)
        )
    elif backbone := getattr(config.model, "backbone_weights", None):
        zoo = getattr(config.model, "backbone_zoo", None)
        notes.append(networks.load_backbone(model, backbone, zoo, config.image_size, normalisation))
    elif environment.module is None and (fit_images := getattr(model, "fit_images", None)):
        fit_images(_images_to_fit(environment, data))
    if config.model.weights and config.resume:
        notes.append(f"weights: those of {start.checkpoint}; model.weights is not read")
    return notes


def _images_to_fit(environment: Environment, data: Data) -> Tensor:
    """(N, C, H, W) of the whole training split, normalised, not augmented; of batches that were given, the first."""
    if not isinstance(data.train, Loader):
        with state_preserved(nn.Module()):
            return next(iter(data.batches.epoch(0))).images
    with closing(build_loader(environment.config, "train", parallel=environment.parallel, evaluate=True)) as loader:
        count = min(len(loader.source), max(1, _FITTED // environment.config.size.pixels))
        batch = loader.samples(np.linspace(0, len(loader.source) - 1, count).astype(np.int64).tolist())
    return batch.images[batch.valid]


def _blocks(model: nn.Module) -> list[nn.Module]:
    return networks.blocks_of(model, "parallel", "set parallel=ddp")


def _optimizer(
    config: Resolved, model: nn.Module, copied: nn.Module | None, train: BatchStream, start: Start
) -> tuple[NoEMA, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, list[str]]:
    updates = len(train) // config.accumulate
    if not updates:
        most = len(train)
        fix = f"global_batch={train.global_batch * most}" if config.global_batch else f"accumulate={most}"
        raise ConfigError(
            f"accumulate: {config.accumulate} is more than the {most} batches of an epoch; set {fix} or less"
        )
    optim = config.optim
    average = NoEMA(model)
    if copied:
        average = EMA(model, optim.ema, warmup=optim.ema_warmup, every=optim.ema_every, copied=copied)
        if config.compile:
            copied.compile()  # a copy isn't, though what it is a copy of is
    images = train.global_batch * config.accumulate
    optim = replace(optim, lr=scaled_lr(config.optim, images))
    layers, notes = _rates(config, images, model)
    settings = {key: getattr(optim, key) for key in ("weight_decay", "decay_norm_and_bias", "decay_norm")}
    rules = [networks.parameter_groups(model, layers=layers, listed=listed, **settings) for listed in (True, False)]
    then = start.state["optimizer"]["param_groups"] if start.state else []
    sizes = [[len(group["params"]) for group in groups] for groups in (*rules, then)]
    optimizer = optimizers.build(optim, rules[sizes[1] == sizes[2]])  # a run of EffLoop 0.2 keeps its groups
    named = inspect.signature(schedules[config.schedule.name].factory).parameters  # a plugin's may not take `epochs`
    epochs = {"epochs": config.epochs} if "epochs" in named else {}
    schedule = schedules.build(config.schedule, optimizer, updates=updates * config.epochs, **epochs)
    line = f"lr     {optim.lr:g} = {config.optim.lr:g} x {images} / {optim.scale_lr} images of an update"
    return average, optimizer, schedule, [*([line] if optim.scale_lr else []), *notes]


def _rates(config: Resolved, images: int, model: nn.Module) -> tuple[list[networks.Layer], list[str]]:
    """Layers' learning rates for updates of so many images, and lines for users; none where all have one rate."""
    optim = config.optim
    if optim.layer_decay is None and optim.head_lr is None and not optim.lr_factors:
        return [], []
    layers = networks.rates_by_layer(model, scaled_lr(optim, images), optim.layer_decay)
    if optim.head_lr is not None:
        layers = networks.with_head(layers, _head(config, model), scaled_lr(replace(optim, lr=optim.head_lr), images))
    layers = networks.with_factors(layers, optim.lr_factors)
    trained = {name for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
    rates = [f"{layer.lr:.2g} {layer.name}" for layer in layers if trained.intersection(layer.parameters)]
    shown = rates if len(rates) < _SHOWN else [*rates[: _SHOWN // 2], "...", *rates[-_SHOWN // 2 :]]
    return layers, [f"lr     {', '.join(shown)}"]


def _head(config: Resolved, model: nn.Module) -> list[str]:
    """Modules that have the rate of `optim.head_lr`: the last layer, or of a model of pixels all above its backbone."""
    what = "doesn't end with a linear layer"
    if is_spatial(config.task.name):
        if modules := networks.modules_above_backbone(model):
            return modules
        what = "has neither a backbone nor an encoder"
    else:
        training = model.training
        with suppress(ConfigError):
            head = networks.find_head(model.eval(), config.size, config.data.channels)
            model.train(training)
            return [head]
    raise ConfigError(
        f"optim.head_lr: {config.optim.head_lr:g}, but this model {what}; set optim.head_lr=null, optim.layer_decay "
        "decreases the rate layer by layer"
    )


# A linear probe: features of the frozen network, computed once for each split.


def check_probe(config: Resolved, parallel: Parallel) -> None:
    """Raise a ConfigError for what needs images in training, or more than one process."""
    for key, on, off in (
        ("augment.mixup", config.augment.mixup, "0"),
        ("augment.cutmix", config.augment.cutmix, "0"),
        ("progressive", config.progressive, "[]"),
        ("data.repeats", config.data.repeats > 1, "1"),
        ("compile", config.compile, "false"),
        ("parallel.virtual", config.parallel.virtual, "null"),
        ("on_error", config.on_error is OnError.skip, "fail"),
        ("optim.layer_decay", config.optim.layer_decay is not None, "null and lr"),
        ("optim.head_lr", config.optim.head_lr is not None, "null and lr"),
        ("optim.lr_factors", config.optim.lr_factors, "{}"),
    ):
        if on:
            raise ConfigError(
                f"{key}: is for training on images, and probe={config.probe} on features; set {key}={off}"
            )
    if parallel.world_size > 1 or config.parallel.replicates:
        raise ConfigError(f"parallel: {config.parallel.name} gains a probe nothing; set parallel=none, or probe=0")


def build_probe(environment: Environment, data: Data, model: nn.Module) -> tuple[BatchStream, BatchStream, list[str]]:
    """What a probe loads for training and validation, and lines for users; the model's head is all that is trained."""
    from effloop.data.loader import FeatureStream

    config = environment.config
    head = networks.find_head(model.eval(), config.size, config.data.channels)
    images = build_loader(config, "train", parallel=environment.parallel, evaluate=True)
    splits, notes = {}, []
    for split, loader in (("train", images), ("val", data.val)):
        started = time.perf_counter()
        splits[split] = _computed(parameters.Features(model, head), loader, environment)
        count, width = splits[split].shape
        notes.append(f"features  {split}: {count:,} x {width}, computed in {time.perf_counter() - started:.1f} s")
    parameters.train_head_only(model, head)
    streams = FeatureStream(data.train, splits["train"], config.probe), FeatureStream(data.val, splits["val"])
    return *streams, notes


def _computed(features: parameters.Features, loader: Loader, environment: Environment) -> NDArray[np.float32]:
    """(N, D) features of a loader's samples, in the order of the source, mapped from a file without a name."""
    from effloop.system.progress import Meter

    count, folder = len(loader.plan.source), kept_folder(environment.config.data.index_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Meter() as meter, closing(loader), TemporaryFile(dir=folder) as file:
            meter.begin("features", total=count)
            for batch in loader.epoch(0):
                with environment.precision.autocast():
                    rows = features(batch.images)[batch.valid].cpu().numpy()
                file.write(rows.tobytes())
                meter.advance(len(rows))
            file.flush()
            return np.memmap(file, np.float32, "r", shape=(count, rows.shape[1]))
    except OSError as error:
        raise ConfigError(
            f"probe: {folder} can't be written to: {error.strerror}; set the environment variable XDG_CACHE_HOME to "
            "another folder, or data.index_dir"
        ) from None

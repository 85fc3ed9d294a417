"""Config -> a linear probe: features of the frozen network, computed once for each split."""

from __future__ import annotations

import time
from contextlib import closing
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import NDArray
from torch import nn

from effloop.assemble.environment import Environment
from effloop.assemble.loader import Data, build_loader
from effloop.assemble.resolve import Resolved
from effloop.data.bad import OnError
from effloop.data.features import FeatureStream
from effloop.data.loader import Loader
from effloop.data.source.storage.kept import kept_folder
from effloop.errors import ConfigError
from effloop.model.parameters import Features, find_head, train_head_only
from effloop.parallel import Parallel
from effloop.system.progress import Meter


def check_probe(config: Resolved, parallel: Parallel) -> None:
    """Raise a ConfigError for what needs images in training, or more than one process."""
    for key, on, off in (
        ("augment.mixup", config.augment.mixup, "0"),
        ("augment.cutmix", config.augment.cutmix, "0"),
        ("progressive", config.progressive, "[]"),
        ("compile", config.compile, "false"),
        ("on_error", config.on_error is OnError.skip, "fail"),
        ("optim.layer_decay", config.optim.layer_decay is not None, "null and lr"),
        ("optim.head_lr", config.optim.head_lr is not None, "null and lr"),
    ):
        if on:
            raise ConfigError(
                f"{key}: is for training on images, and probe={config.probe} on features; set {key}={off}"
            )
    if parallel.world_size > 1 or config.parallel.replicates:
        raise ConfigError(f"parallel: {config.parallel.name} gains a probe nothing; set parallel=none, or probe=0")


def build_probe(
    environment: Environment, data: Data, model: nn.Module
) -> tuple[FeatureStream, FeatureStream, list[str]]:
    """What a probe loads for training and validation, and lines for users; the model's head is all that is trained."""
    config = environment.config
    head = find_head(model.eval(), config.size, config.data.channels)
    images = build_loader(config, "train", parallel=environment.parallel, evaluate=True)
    splits, notes = {}, []
    for split, loader in (("train", images), ("val", data.val)):
        started = time.perf_counter()
        splits[split] = _computed(Features(model, head), loader, environment)
        count, width = splits[split].shape
        notes.append(f"features  {split}: {count:,} x {width}, computed in {time.perf_counter() - started:.1f} s")
    train_head_only(model, head)
    streams = FeatureStream(data.train, splits["train"], config.probe), FeatureStream(data.val, splits["val"])
    return *streams, notes


def _computed(features: Features, loader: Loader, environment: Environment) -> NDArray[np.float32]:
    """(N, D) features of a loader's samples, in the order of the source, mapped from a file without a name."""
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

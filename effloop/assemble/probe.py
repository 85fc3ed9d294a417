"""Config -> a linear probe: features of the frozen network, computed once for each split, and kept."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from effloop import config as configs
from effloop.assemble.environment import Environment
from effloop.assemble.loader import Data, build_loader
from effloop.assemble.resolve import Resolved
from effloop.data.bad import OnError
from effloop.data.cache.cached import decoder_identity
from effloop.data.features import FeatureStream
from effloop.data.loader import Loader
from effloop.data.source.storage.kept import kept_folder
from effloop.errors import ConfigError
from effloop.model.head import Features, find_head, train_head_only
from effloop.parallel import Parallel
from effloop.precision import Precision
from effloop.system.files import replacing
from effloop.system.progress import Meter


def check_probe(config: Resolved, parallel: Parallel) -> None:
    """Raise a ConfigError for what needs images in training, or more than one process."""
    of_images = {  # key -> whether it is on, and what turns it off
        "augment.mixup": (config.augment.mixup, "0"),
        "augment.cutmix": (config.augment.cutmix, "0"),
        "progressive": (config.progressive, "[]"),
        "distill.teacher": (config.distill.teacher, "null"),
        "compile": (config.compile, "false"),
        "on_error": ("skip" if config.on_error is OnError.skip else "", "fail"),
    }
    for key in ("layer_decay", "head_lr"):
        if getattr(config.optim, key) is not None:
            raise ConfigError(f"optim.{key}: a probe trains the last layer only; set optim.{key}=null and lr")
    for key, (on, off) in of_images.items():
        if on:
            raise ConfigError(
                f"{key}: is for training on images, and probe={config.probe} on features; set {key}={off}"
            )
    if parallel.world_size > 1 or config.parallel.replicates:
        raise ConfigError(f"parallel: {config.parallel.name} gains a probe nothing; set parallel=none, or probe=0")


def build_probe(
    environment: Environment, data: Data, model: nn.Module
) -> tuple[FeatureStream, FeatureStream, list[str]]:
    """What a probe loads for training and validation, and lines for users; the model's head is all that is trained.

    Raises:
        ConfigError: the model has no head.
        DataError: a sample can't be read.
    """
    config = environment.config
    head = find_head(model.eval(), config.size, config.data.channels)
    train = build_loader(config, "train", parallel=environment.parallel, evaluate=True)
    features, notes = Features(model, head), []
    splits = {}
    for split, loader in (("train", train), ("val", data.val)):
        key = _key(config, environment.precision, model, head, loader)
        path = kept_folder(config.data.index_dir) / f"features-{key}.npy"
        splits[split], line = _kept(path, features, loader, environment.precision)
        notes.append(f"features  {split}: {line}")
    train_head_only(model, head)
    streams = FeatureStream(data.train, splits["train"], config.probe, train), FeatureStream(data.val, splits["val"])
    return *streams, notes


def _key(config: Resolved, precision: Precision, model: nn.Module, head: str, loader: Loader) -> str:
    """What identifies a split's features: the data, how it becomes a batch, the network and its weights."""
    plain = configs.to_dict(config)
    facts = {
        "data": loader.plan.source.identity(),
        "decoder": decoder_identity(loader.plan.decoder),
        **{key: plain[key] for key in ("augment", "image_size", "channels_last")},
        **{key: plain["data"][key] for key in ("mean", "std")},
        "model": {
            key: value for key, value in plain["model"].items() if key not in ("weights", "freeze", "num_classes")
        },
        "computed": [torch.__version__, str(precision.dtype), precision.device.type],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        if not name.startswith(f"{head}."):
            digest.update(name.encode() + tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _kept(path: Path, features: Features, loader: Loader, precision: Precision) -> tuple[NDArray[np.float32], str]:
    """A split's features, mapped from a file, which is written first if it isn't there; and a line for users."""
    with suppress(OSError, ValueError, EOFError):  # missing or damaged
        return np.load(path, mmap_mode="r"), f"those of {path}"
    started = time.perf_counter()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            _write(file, features, loader, precision)
    except OSError as error:
        raise ConfigError(
            f"probe: {path} can't be written: {error.strerror}; set the environment variable XDG_CACHE_HOME to another "
            "folder, or data.index_dir"
        ) from None
    found: NDArray[np.float32] = np.load(path, mmap_mode="r")
    return found, f"{len(found):,} x {found.shape[1]}, computed in {time.perf_counter() - started:.1f} s"


def _write(file: BinaryIO, features: Features, loader: Loader, precision: Precision) -> None:
    """Compute (N, D) features of a loader's samples, in the order of the source, and write them as a .npy file."""
    count = len(loader.plan.source)
    with Meter() as meter, closing(loader):
        meter.begin("features", total=count)
        for batch in loader.epoch(0):
            with precision.autocast():
                rows = features(batch.images)[batch.valid].cpu().numpy()
            if not file.tell():
                header = {"descr": "<f4", "fortran_order": False, "shape": (count, rows.shape[1])}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(rows.astype("<f4", copy=False).tobytes())
            meter.advance(len(rows))

"""The parts of a run's memory: from its loaders, its model, one image, and, if there is time, from steps of its own."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal
from torch import nn

from effloop.assemble.resolve import num_workers
from effloop.batch import Batch
from effloop.config import Config
from effloop.data.cache.cached import CachedSource, bytes_of_masks
from effloop.data.cache.shared_memory import FOLDER
from effloop.data.loader import Loader
from effloop.data.source import Cache
from effloop.diagnose.batch_tensors import (
    device_batch,
    has_masks,
    host_batch,
    image_dtype,
    is_loaded_so,
    largest_size,
    mask_bytes_in_loss,
)
from effloop.diagnose.memory import Memory, Part, Place
from effloop.errors import DataError
from effloop.model import Probe
from effloop.optim import OptimConfig, optimizers
from effloop.parallel import Parallel
from effloop.system.hardware import available_memory
from effloop.system.memory import resident_memory
from effloop.train.trainer import Trainer

_LOGGING = {"tensorboard": 15_000_000, "matplotlib": 25_000_000}
"""Bytes of packages that are loaded where a run begins that logs to TensorBoard."""

_KERNELS = 15_000_000
"""Bytes of libraries that the first step loads."""

_HEAP = 1.5
"""What the heap takes for tensors of 1 byte that stay until the backward pass, where freed memory is kept: oneDNN's
copies of weights and images, and gaps. With `model=cnn`, small_resnet, resnet18, mobilenet_v3_small and vit_b_16 the
process grew by 0.92 to 1.08 of this estimate."""

_BUFFERS = 3
"""Tensors as large as the largest one that a backward pass has beside these: two gradients, and a copy in it."""

_SAMPLES = 8  # images that are looked at for their size


@dataclass(frozen=True)
class StepBytes:
    """What training steps take.

    Attributes:
        activations: kept from forward to backward, and the buffers of both.
        optimizer: the optimizer's state.
    """

    activations: int
    optimizer: int


def expected_memory(
    config: Config, model: nn.Module, probe: Probe, loaders: Sequence[Loader], parallel: Parallel
) -> Memory:
    """What a run is going to take, from what is known before its first step; this takes milliseconds.

    Args:
        config: of the run.
        model: on its device.
        probe: of this model.
        loaders: of the training split, and of the other splits that the run loads.
        parallel: tells the ranks.
    """
    on_gpu = parallel.device.type == "cuda"
    images = config.batch_size * largest_size(config).pixels / config.size.pixels
    spread, buffers = (1.0, 2) if on_gpu else (_HEAP, _BUFFERS)
    activations = 0 if config.probe else int(images * (spread * probe.saved_bytes + buffers * probe.largest_bytes))
    state = int(_state_ratio(config.optim) * _bytes_of(_trained(model)))
    return _memory(config, model, StepBytes(activations, state), loaders, parallel, _KERNELS)


def measured_memory(config: Config, trainer: Trainer, loaders: Sequence[Loader]) -> Memory:
    """What a run takes, from a few updates on one batch, which change the trainer: it can't be trained on afterwards.

    Args:
        config: of the run.
        trainer: of this config, that hasn't been trained.
        loaders: of the training split, and of the other splits that the run loads.

    Raises:
        DataError: a sample can't be read.
    """
    step = _measured_step(trainer, loaders[0])
    trainer.optimizer.state.clear()
    _return_freed_memory()
    return replace(_memory(config, trainer.model, step, loaders, trainer.parallel), measured=True)


_UPDATES = 4  # of resnet18 at 96 pixels, the third was the last that the process grew in


def _measured_step(trainer: Trainer, loader: Loader) -> StepBytes:
    """Of some updates on one batch; no state is left in the optimizer's tensors, but in the weights."""
    batch = next(iter(loader.epoch(0)))
    loader.close()
    trainer.model.train()
    _update(trainer, Batch(batch.images[:2], batch.targets[:2], batch.ids[:2], batch.valid[:2]))
    trainer.optimizer.state.clear()
    device, cuda = trainer.parallel.device, trainer.parallel.device.type == "cuda"
    _return_freed_memory()
    before = torch.cuda.memory_allocated(device) if cuda else resident_memory()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    most = 0
    for _ in range(_UPDATES):
        _update(trainer, batch)
        most = max(most, torch.cuda.max_memory_allocated(device) if cuda else resident_memory())
    state = sum(_bytes_of(each.values()) for each in trainer.optimizer.state.values())
    return StepBytes(max(0, most - before - _bytes_of(_trained(trainer.model)) - state), state)


def _update(trainer: Trainer, batch: Batch) -> None:
    trainer.forward_backward(batch, sync=True)
    trainer.precision.step(trainer.optimizer)
    trainer.optimizer.zero_grad()


def _return_freed_memory() -> None:
    """Give what is free in the heap back to the kernel, so that the process grows when it is taken again."""
    with suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def _bytes_of(tensors: Iterable[Any]) -> int:
    return sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))


def _state_ratio(config: OptimConfig) -> float:
    """Bytes that an optimizer keeps for each byte of a parameter, from an update of 64 zeros."""
    parameter = nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.zeros(8, 8)
    optimizer = optimizers.build(replace(config, fused=None), [parameter])
    optimizer.step()
    state = optimizer.state[parameter].values()
    return _bytes_of(each for each in state if getattr(each, "ndim", 0)) / parameter.nbytes


def _memory(
    config: Config, model: nn.Module, step: StepBytes, loaders: Sequence[Loader], parallel: Parallel, kernels: int = 0
) -> Memory:
    """All parts together; `kernels` are bytes of libraries that the first step will load."""
    device = parallel.device
    place: Place = "gpu" if device.type == "cuda" else "host"
    weights = _bytes_of(chain(model.parameters(), model.buffers()))
    batch = {"host": host_batch(loaders[0]), "device": device_batch(config, loaders[0])}
    on_device = sum(each.bytes for each in batch["device"] if not is_loaded_so(each, loaders[0]))
    in_loss = mask_bytes_in_loss(batch["device"], loaders[0])
    logs = bool(getattr(config.record, "tensorboard", False))
    later = kernels + logs * sum(size for name, size in _LOGGING.items() if name not in sys.modules)
    resident = resident_memory() - weights * (place == "host")
    parts = [
        Part("process", "host", max(0, resident), "Python, torch, libraries", there=True),
        Part("libraries", "host", later, "loaded when training begins"),
        *_loading(config, "train", loaders[0], parallel),
        *(part for loader in loaders[1:] for part in _loading(config, "val", loader, parallel)),
        Part("weights", place, weights, there=True),
        Part("gradients", place, _bytes_of(_trained(model))),
        Part("optimizer", place, step.optimizer, f"state of {config.optim.name}"),
        Part("average", place, weights * (config.optim.ema > 0), "of the weights (optim.ema)"),
        Part("activations", place, step.activations, "of one batch, and the step's buffers", by_batch=True),
        Part("inputs", place, 2 * on_device, "2 batches on the device", by_batch=True),
        Part("classes", place, in_loss, "masks in the loss, int64", by_batch=True),
    ]
    return Memory(
        parts=[part for part in parts if part.bytes],
        batch=batch,
        free=_free(device),
        page_cache=sum(loader.plan.source.fingerprint()["bytes"] for loader in loaders),
        ranks=parallel.local_world_size,
    )


def _loading(config: Config, split: str, loader: Loader, parallel: Parallel) -> list[Part]:
    """What loading a split takes on the host."""
    source, count, workers = loader.plan.source, loader.plan.order.batch_per_rank, num_workers(config, parallel)
    alone = 1 if image_dtype(loader) == "uint8" else 2  # the model still has one
    slots = config.engine.host_batches(parallel.device.type) if workers else alone
    images = _image_bytes(loader)
    own = 2 * count * max(kept for kept, _ in images) + max(1, workers) * max(decoded for _, decoded in images)
    batch = {each.name: each.bytes for each in host_batch(loader)}
    masks = batch.pop("targets") if has_masks(loader) else 0
    form = f"{slots} x {count} images of {loader.plan.augment.size} pixels, {image_dtype(loader)}"
    mask_form = f"{slots} x {count} of uint8, {decimal(masks)} a batch; int64 would be {decimal(8 * masks)}"
    parts = [
        Part(f"{split} batches", "host", slots * sum(batch.values()), form, by_batch=True),
        Part(f"{split} masks", "host", slots * masks, mask_form, by_batch=True),
        Part(f"{split} images", "host", own, "encoded and decoded" + ", with masks" * bool(masks)),
    ]
    if isinstance(source, CachedSource):
        parts.append(_cache(split, source, [decoded for _, decoded in images]))
    parts.append(Part(f"{split} workers", "host", workers * config.engine.worker_bytes, f"{workers} processes"))
    return parts


def _cache(split: str, source: CachedSource, decoded: Sequence[int]) -> Part:
    """The cache of a split; `decoded` are bytes of some images."""
    wanted = len(source) * sum(decoded) // len(decoded)
    if source.what is Cache.bytes:
        wanted = source.fingerprint()["bytes"] + bytes_of_masks(source.source, Cache.bytes)
    return Part(
        f"{split} cache",
        "host",
        source.region.num_bytes,
        f"data.cache={source.what.value}",
        there=True,
        shared=True,
        in_shm=True,
        wanted=wanted,
    )


def _image_bytes(loader: Loader) -> list[tuple[int, int]]:
    """What each of a few images, with its mask, takes: encoded, which is 0 where files are mapped, and decoded."""
    source, decoder = loader.plan.source, loader.plan.decoder
    found, here = [], source.present()
    count = len(source) if here is None else len(here)
    places = np.unique(np.linspace(0, count - 1, min(count, _SAMPLES)).astype(np.int64))
    for sample in (places if here is None else here[places]).tolist():
        with suppress(DataError):  # loading it will say so
            data = source.read(sample)
            height, width = decoder.size(data)
            masks = [source.read_mask(sample)] if has_masks(loader) else []
            kept = sum(len(each) for each in [data, *masks] if isinstance(each, bytes))
            found.append((kept, (decoder.channels + len(masks)) * height * width))
    return found or [(0, 0)]


def _free(device: torch.device) -> dict[str, int]:
    """Bytes that are free: `host`, `shm`, and `gpu` if there is one."""
    free = {"host": available_memory(), "shm": 0}
    with suppress(OSError):
        status = os.statvfs(FOLDER)
        free["shm"] = status.f_bavail * status.f_frsize
    if device.type == "cuda":
        free["gpu"] = torch.cuda.mem_get_info(device)[0]
    return free

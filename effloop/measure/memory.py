"""What a run takes of the machine's memory, part by part, and what is there for it."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from rich.filesize import decimal
from rich.table import Table
from torch import nn

from effloop.assemble.resolve import num_workers
from effloop.batch import Batch, ImageSize
from effloop.config import Config
from effloop.data.cache.cached import FOLDER
from effloop.data.loader import Loader
from effloop.data.source import Cache, Kind, Source
from effloop.errors import DataError
from effloop.model import Probe
from effloop.optim import OptimConfig, optimizers
from effloop.parallel import Parallel
from effloop.system.hardware import available_memory
from effloop.system.memory import resident_memory
from effloop.train.trainer import Trainer

Place = Literal["host", "gpu"]

_SHORT: dict[Place, tuple[str, str]] = {
    "host": ("memory", "the machine may swap or end the run"),
    "gpu": ("the GPU's memory", "the run may fail"),
}

_FULL = 0.9
"""Share of what is free that a run may take without a warning: that much the estimate may be wrong by."""


@dataclass(frozen=True)
class Tensors:
    """A part of a batch.

    Attributes:
        name: images, targets, ids or valid.
        dtype: as torch and NumPy call it, e.g. uint8.
        shape: its sizes.
        bytes: of all its numbers.
    """

    name: str
    dtype: str
    shape: list[int]
    bytes: int

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: str) -> Tensors:
        """Those of a shape; `dtype` as torch calls it."""
        size: torch.dtype = getattr(torch, dtype)
        return cls(name, dtype, [*shape], math.prod(shape) * size.itemsize)


@dataclass(frozen=True)
class Part:
    """A part of what a run takes, in each rank.

    Attributes:
        name: of the part.
        place: where it is.
        bytes: its size.
        detail: how the size comes about.
        there: whether it is allocated already.
        shared: whether all ranks of the machine share it.
        in_shm: whether it is in /dev/shm.
        by_batch: whether it grows with `batch_size`.
        wanted: bytes that it would take if there were room for more; 0 is as many as it has.
    """

    name: str
    place: Place
    bytes: int
    detail: str = ""
    there: bool = False
    shared: bool = False
    in_shm: bool = False
    by_batch: bool = False
    wanted: int = 0


@dataclass(frozen=True)
class Memory:
    """What a run takes, and what is free.

    Attributes:
        parts: all of it.
        batch: of the training split, on the `host` and on the `device`.
        free: bytes that are free now: of the `host`, of `shm` (/dev/shm, a part of the host's), and of the `gpu` if
            there is one.
        page_cache: bytes of the dataset's files, which the kernel keeps as long as nothing else needs the memory.
        ranks: of the run on this machine.
        measured: whether steps were measured; otherwise it is estimated from one image.
    """

    parts: Sequence[Part]
    batch: Mapping[str, Sequence[Tensors]]
    free: Mapping[str, int]
    page_cache: int
    ranks: int = 1
    measured: bool = False

    def total(self, place: Place) -> int:
        """Bytes of all ranks of this machine, for each GPU those of one."""
        return self._sum(place, self.parts)

    def capacity(self, place: Place) -> int:
        """Bytes that there are for the run: what is free, and what it has already."""
        return self.free.get(place, 0) + self._sum(place, [part for part in self.parts if part.there])

    def _sum(self, place: Place, parts: Sequence[Part]) -> int:
        ranks = self.ranks if place == "host" else 1
        return sum(part.bytes * (1 if part.shared else ranks) for part in parts if part.place == place)

    def line(self) -> str:
        """For the log: what the run will take of what is free."""
        found = []
        for place in self.places:
            where = " on the GPU" * (place == "gpu")
            largest = sorted(self._of(place), key=lambda part: -part.bytes)[:3]
            parts = ", ".join(f"{part.name} {decimal(part.bytes)}" for part in largest if part.bytes)
            found.append(f"about {decimal(self.total(place))} of {decimal(self.capacity(place))}{where} ({parts})")
        return f"memory {'; '.join(found)}"

    @property
    def places(self) -> list[Place]:
        """`host`, and `gpu` if the run is on one."""
        return ["host", "gpu"] if "gpu" in self.free else ["host"]

    def _of(self, place: Place) -> list[Part]:
        return [part for part in self.parts if part.place == place]

    def warnings(self, config: Config) -> Iterator[str]:
        """A line for each place that hasn't enough."""
        for part in self.parts:
            if config.data.cache_gb is None and part.bytes < _MOST_OF_IT * part.wanted:
                yield (
                    f"data.cache: {decimal(part.bytes)} are left for the {part.name}, half of what is free in memory "
                    f"and {FOLDER}, and all images need about {decimal(part.wanted)}; the rest is loaded again in "
                    f"each epoch; free some memory, or set data.cache_gb={1.1 * part.wanted / 1e9:.2g} if that is free"
                )
        for place in self.places:
            total, there = self.total(place), self.capacity(place)
            if total > _FULL * there:
                where, end = _SHORT[place]
                each = f" for {self.ranks} ranks" * (self.ranks > 1 and place == "host")
                yield (
                    f"batch_size: {config.batch_size} needs about {decimal(total)} of {where}{each}, where "
                    f"{decimal(there)} are free, and {end}; {self._fix(config, place)}"
                )

    def _fix(self, config: Config, place: Place) -> str:
        """What to set so that it fits."""
        ranks = self.ranks if place == "host" else 1
        by_batch = ranks * sum(part.bytes for part in self._of(place) if part.by_batch)
        left = _FULL * self.capacity(place) - (self.total(place) - by_batch)
        smaller = int(config.batch_size * left / by_batch) if by_batch else 0
        if smaller >= 1:
            images = config.batch_size * config.accumulate
            size = next(each for each in range(smaller, 0, -1) if images % each == 0)
            return f"set batch_size={size}, and accumulate={images // size} for updates of as many images"
        largest = max(self._of(place), key=lambda part: part.bytes)
        return f"most of it is its {largest.name}, whatever the batch; " + (
            "set data.cache=none" if any(part.in_shm for part in self._of(place)) else "choose a smaller model"
        )

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for JSON and for `memory_table`."""
        return {
            "parts": [asdict(part) for part in self.parts],
            "batch": {where: [asdict(each) for each in found] for where, found in self.batch.items()},
            "total": {place: self.total(place) for place in self.places},
            "capacity": {place: self.capacity(place) for place in self.places},
            "free": dict(self.free),
            "page_cache": self.page_cache,
            "ranks": self.ranks,
            "measured": self.measured,
        }


_MOST_OF_IT = 0.7
"""Share of the dataset in a cache from which nothing is said: the size of all images is estimated from a few."""


def memory_table(memory: Mapping[str, Any]) -> Table:
    """The table of a `Memory` as plain values: a row for each part, and what is free."""
    table = Table(title="memory" if memory["measured"] else "memory, estimated")
    for heading in ("where", "what"):
        table.add_column(heading, no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("of which")
    for place, name in (("host", "host"), ("gpu", "GPU")):
        parts = [part for part in memory["parts"] if part["place"] == place]
        for part in parts:
            where = str(FOLDER) if part["in_shm"] else name
            table.add_row(where, part["name"], decimal(part["bytes"]), part["detail"])
        if parts:
            each = f"{memory['ranks']} ranks; " * (memory["ranks"] > 1 and place == "host")
            there = decimal(memory["capacity"][place])
            table.add_row(
                name, "all", decimal(memory["total"][place]), f"{each}of {there}", style="bold", end_section=True
            )
    for where, tensors in memory["batch"].items():
        for each in tensors:
            form = f"{each['dtype']}, {' x '.join(map(str, each['shape']))}"
            table.add_row(f"batch, {where}", each["name"], decimal(each["bytes"]), form)
    table.add_section()
    table.add_row("page cache", "dataset", decimal(memory["page_cache"]), "the kernel's, while there is room")
    table.add_row(str(FOLDER), "free", decimal(memory["free"]["shm"]), "a part of the host's memory")
    return table


# The tensors of a batch, as engines load it and as the model gets it.


def host_batch(loader: Loader) -> list[Tensors]:
    """A batch as engines load it."""
    count, targets = loader.plan.order.batch_per_rank, loader.plan.source.targets
    height, width, channels = loader.plan.shape_of_image
    shape, dtype = targets.shape[1:], targets.dtype.newbyteorder("=").name
    return [
        Tensors.of("images", (count, channels, height, width), image_dtype(loader)),
        Tensors.of("targets", (count, *((height, width) if has_masks(loader) else shape)), dtype),
        Tensors.of("ids", (count,), "int64"),
        Tensors.of("valid", (count,), "bool"),
    ]


def device_batch(config: Config, loader: Loader) -> list[Tensors]:
    """A batch as the model gets it."""
    images, targets, *_ = host_batch(loader)
    count, size = images.shape[0], largest_size(config)
    shape, dtype = targets.shape, str(loader.transfer.target_dtype).removeprefix("torch.")
    if has_masks(loader):
        shape, dtype = [count, *size], targets.dtype
    elif loader.transfer.mix is not None and loader.transfer.mix.on and len(shape) == 1:
        shape, dtype = [count, len(loader.classes)], "float32"
    return [Tensors.of("images", (count, config.data.channels, *size), "float32"), Tensors.of("targets", shape, dtype)]


def has_masks(loader: Loader) -> bool:
    """Whether targets are masks."""
    return loader.plan.source.kind is Kind.masks


def image_dtype(loader: Loader) -> str:
    """The type of images as engines load them."""
    return str(loader.plan.output.dtype).removeprefix("torch.")


def largest_size(config: Config) -> ImageSize:
    """The largest images that a run's model is given."""
    return max([config.size, *config.train_sizes], key=lambda size: size.pixels)


def is_loaded_so(tensor: Tensors, loader: Loader) -> bool:
    """Whether the model gets a part of a batch in the memory that it was loaded into."""
    mixes = loader.transfer.mix is not None and loader.transfer.mix.on
    return tensor.name == "images" and tensor.dtype == image_dtype(loader) and not mixes


def mask_bytes_in_loss(batch: Sequence[Tensors], loader: Loader) -> int:
    """Bytes of a batch's masks as int64, which the loss makes of them on the device."""
    return 8 * batch[1].bytes if has_masks(loader) else 0


# The parts of a run's memory: from its loaders, its model, one image, and, if there is time, from steps of its own.

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
    if config.data.cache is not Cache.none:
        parts.append(_cache(split, source, [decoded for _, decoded in images]))
    parts.append(Part(f"{split} workers", "host", workers * config.engine.worker_bytes, f"{workers} processes"))
    return parts


def _cache(split: str, source: Source, decoded: Sequence[int]) -> Part:
    """The cache of a split; `decoded` are bytes of some images."""
    from effloop.data.cache.cached import CachedSource, bytes_of_masks

    assert isinstance(source, CachedSource)
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
    found, count = [], len(source)
    for sample in np.unique(np.linspace(0, count - 1, min(count, _SAMPLES)).astype(np.int64)).tolist():
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

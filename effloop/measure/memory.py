"""What a run takes of the machine's memory, part by part, and what is there for it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor, nn

from effloop.assemble.environment import num_workers
from effloop.config import Config
from effloop.data.engine.base import chosen_engine
from effloop.data.loader import Loader
from effloop.data.source import Cache, Kind, Source
from effloop.errors import DataError
from effloop.model import Probe
from effloop.optim import optimizers, state_ratio
from effloop.parallel import Parallel
from effloop.system import gpu
from effloop.system.hardware import available_memory
from effloop.system.memory import SHM, USABLE, Place, resident_memory, step_parts

_SHORT: dict[Place, tuple[str, str]] = {
    "host": ("memory", "the machine may swap or end the run"),
    "gpu": ("the GPU's memory", "the run may fail"),
}

_MOST_OF_IT = 0.7
"""Share of the dataset in a cache from which there is no warning: the size of all images is estimated from a few."""


@dataclass(frozen=True)
class Part:
    """A part of what a run takes, in each rank."""

    name: str  # of the part
    place: Place  # where it is
    bytes: int  # its size
    detail: str = ""  # how the size comes about
    there: bool = False  # whether it is allocated already
    in_shm: bool = False  # whether it is in /dev/shm, where all ranks of the machine share it
    by_batch: bool = False  # whether it grows with `batch_size`
    wanted: int = 0  # bytes that it would take if there were room for more; 0 is as many as it has


@dataclass(frozen=True)
class Memory:
    """What a run takes, and what is free."""

    parts: Sequence[Part]  # all of it
    # `host` and `device` -> tensors of the training split's batch there, without memory
    batch: Mapping[str, Mapping[str, Tensor]]
    # bytes that are free now: of the `host`, of `shm` (/dev/shm, a part of the host's), and of the `gpu` if there is
    # one
    free: Mapping[str, int]
    page_cache: int  # bytes of the dataset's files, which the kernel keeps as long as nothing else needs the memory
    ranks: int = 1  # of the run on this machine

    @property
    def places(self) -> list[Place]:
        """`host`, and `gpu` if the run is on one."""
        return ["host", "gpu"] if "gpu" in self.free else ["host"]

    def total(self, place: Place) -> int:
        """Bytes of all ranks of this machine, for each GPU those of one."""
        return self._sum(place, self.parts)

    def capacity(self, place: Place) -> int:
        """Bytes that there are for the run: what is free, and what it has already."""
        return self.free.get(place, 0) + self._sum(place, [part for part in self.parts if part.there])

    def _sum(self, place: Place, parts: Iterable[Part]) -> int:
        ranks = self.ranks if place == "host" else 1
        return sum(part.bytes * (1 if part.in_shm else ranks) for part in parts if part.place == place)

    def line(self) -> str:
        """For the log: what the run will take of what is free."""
        found = []
        for place in self.places:
            largest = sorted((part for part in self.parts if part.place == place), key=lambda part: -part.bytes)[:3]
            parts = ", ".join(f"{part.name} {decimal(part.bytes)}" for part in largest if part.bytes)
            of = f"{decimal(self.capacity(place))}{' on the GPU' * (place == 'gpu')}"
            found.append(f"about {decimal(self.total(place))} of {of} ({parts})")
        return f"memory {'; '.join(found)}"

    def warnings(self, config: Config) -> Iterator[str]:
        """A line for each place that hasn't enough."""
        for part in self.parts:
            if config.data.cache_gb is None and part.bytes < _MOST_OF_IT * part.wanted:
                yield (
                    f"data.cache: {decimal(part.bytes)} are left for the {part.name}, half of what is free in memory "
                    f"and {SHM}, and all images need about {decimal(part.wanted)}; the rest is loaded again in "
                    f"each epoch; free some memory, or set data.cache_gb={1.1 * part.wanted / 1e9:.2g} if that is free"
                )
        for place in self.places:
            total, there = self.total(place), self.capacity(place)
            if total > USABLE[place] * there:
                where, end = _SHORT[place]
                each = f" for {self.ranks} ranks" * (self.ranks > 1 and place == "host")
                yield (
                    f"batch_size: {config.batch_size} needs about {decimal(total)} of {where}{each}, where "
                    f"{decimal(there)} are free, and {end}; {self._fix(config, place)}"
                )

    def _fix(self, config: Config, place: Place) -> str:
        """What to set so that it fits."""
        parts = [part for part in self.parts if part.place == place]
        by_batch = self._sum(place, [part for part in parts if part.by_batch])
        left = USABLE[place] * self.capacity(place) - (self.total(place) - by_batch)
        smaller = int(config.batch_size * left / by_batch) if by_batch else 0
        if smaller >= 1:
            images, smaller = config.batch_size * config.accumulate, smaller - smaller % 8 if smaller > 8 else smaller
            size = next(each for each in range(smaller, 0, -1) if images % each == 0)
            accumulated = f", and accumulate={images // size} for updates of as many images"
            fix = f"set batch_size={size}{'' if config.global_batch or config.parallel.virtual else accumulated}"
            return f"at most {smaller} fit; {fix}"
        fix = "set data.cache=none" if any(part.in_shm for part in parts) else "choose a smaller model"
        return f"most of it is its {max(parts, key=lambda part: part.bytes).name}, whatever the batch; {fix}"

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for JSON and for `memory_table`."""
        batch = {
            place: [
                {"name": name, "dtype": _name(each.dtype), "shape": [*each.shape], "bytes": each.nbytes}
                for name, each in tensors.items()
            ]
            for place, tensors in self.batch.items()
        }
        sums = {"total": self.total, "capacity": self.capacity}
        plain = asdict(replace(self, batch={})) | {"batch": batch}
        return plain | {name: {place: of(place) for place in self.places} for name, of in sums.items()}


def memory_table(memory: Mapping[str, Any]) -> Table:
    """The table of a `Memory` as plain values: a row for each part, and what is free."""
    table = Table("where", "what", title="memory")
    table.add_column("bytes", justify="right")
    for column in table.columns:
        column.no_wrap = True
    table.add_column("of which")
    for place, name in (("host", "host"), ("gpu", "GPU")):
        parts = [part for part in memory["parts"] if part["place"] == place]
        for part in parts:
            where = str(SHM) if part["in_shm"] else name
            table.add_row(where, part["name"], decimal(part["bytes"]), part["detail"])
        if parts:
            each = f"{memory['ranks']} ranks; " * (memory["ranks"] > 1 and place == "host")
            of = f"{each}of {decimal(memory['capacity'][place])}"
            table.add_row(name, "all", decimal(memory["total"][place]), of, style="bold", end_section=True)
    for where, tensors in memory["batch"].items():
        for each in tensors:
            form = f"{each['dtype']}, {' x '.join(map(str, each['shape']))}"
            table.add_row(f"batch, {where}", each["name"], decimal(each["bytes"]), form)
    table.add_section()
    table.add_row("page cache", "dataset", decimal(memory["page_cache"]), "the kernel's, while there is room")
    table.add_row(str(SHM), "free", decimal(memory["free"]["shm"]), "a part of the host's memory")
    return table


def host_batch(loader: Loader) -> dict[str, Tensor]:
    """A batch as engines load it, without memory."""
    count, targets = loader.plan.order.batch_per_rank, loader.plan.source.targets
    height, width, channels = loader.plan.shape_of_image
    shape = (height, width) if _has_masks(loader) else targets.shape[1:]
    dtype = torch.from_numpy(np.empty(0, targets.dtype.newbyteorder("="))).dtype
    return {
        "images": torch.empty(count, channels, height, width, dtype=loader.plan.output.dtype, device="meta"),
        "targets": torch.empty(count, *shape, dtype=dtype, device="meta"),
        "ids": torch.empty(count, dtype=torch.int64, device="meta"),
        "valid": torch.empty(count, dtype=torch.bool, device="meta"),
    }


def device_batch(config: Config, loader: Loader) -> dict[str, Tensor]:
    """A batch as the model gets it, without memory."""
    targets, size = host_batch(loader)["targets"], _largest_size(config)
    count, shape, dtype = len(targets), targets.shape, loader.transfer.target_dtype
    if _has_masks(loader):
        shape, dtype = torch.Size([count, *size]), targets.dtype
    elif _mixes(loader) and len(shape) == 1:
        shape, dtype = torch.Size([count, len(loader.classes)]), torch.float32
    images = torch.empty(count, config.data.channels, *size, device="meta")
    return {"images": images, "targets": torch.empty(shape, dtype=dtype, device="meta")}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _has_masks(loader: Loader) -> bool:
    return loader.plan.source.kind is Kind.masks


def _mixes(loader: Loader) -> bool:
    return loader.transfer.mix is not None and loader.transfer.mix.on


def _largest_size(config: Config) -> Any:
    return max([config.size, *config.train_sizes], key=lambda size: size.pixels)


# The parts of a run's memory: from its loaders, its model, one image, and, if there is time, from steps of its own.

_LIBRARIES = 30_000_000  # bytes of what is loaded when training begins: TensorBoard 15 MB, and 15 by the first step

_DETAILS = {
    "average": "of the weights (optim.ema)",
    "casts": "weights in 16 bits",
    "activations": "of one batch, for the backward pass",
    "buffers": "gradients of the largest layer",
    "update": "copies of the weights",
}

_OF_TENSORS: dict[Place, tuple[float, float]] = {"host": (1.5, 3), "gpu": (1, 0.5)}
"""What the heap takes for tensors of 1 byte that stay until the backward pass, and tensors as large as the largest that
it has beside them: gradients, and copies. On a host freed memory is kept: oneDNN's copies of weights and images, and
gaps; with `model=cnn`, small_resnet, resnet18, mobilenet_v3_small and vit_b_16 the process grew by 0.92 to 1.08 of this
estimate. On an H100 steps of 52 models had a quarter of such a tensor in the median, and two at most in the others."""

_BY_BATCH = ("activations", "buffers")

_SAMPLES = 8  # images that are looked at for their size


def expected_memory(
    config: Config, model: nn.Module, probe: Probe, loaders: Sequence[Loader], parallel: Parallel
) -> Memory:
    """What a run is going to take, from what is known before its first step; this takes milliseconds.

    The first of the `loaders` is that of the training split, the others are the rest that the run loads.
    """
    images = config.batch_size * _largest_size(config).pixels / config.size.pixels
    ratio = state_ratio(partial(optimizers.build, config.optim), next(model.parameters()).device)
    train, device = loaders[0], parallel.device
    place: Place = "gpu" if device.type == "cuda" else "host"
    weights, trained = (_bytes_of(each) for each in (chain(model.parameters(), model.buffers()), _trained(model)))
    heap, tensors = _OF_TENSORS[place]
    step = step_parts(
        weights,
        trained,
        ratio,
        saved=images * heap * probe.saved_bytes,
        casts=trained / 2 if config.precision and config.precision.mixed else 0,
        buffers=images * tensors * probe.largest_bytes,
        ema=config.optim.ema > 0,
        probe=config.probe > 0,
    )
    step["gradients"] *= len(parallel.parts).bit_length()
    step["update"] *= place == "gpu"  # on a CPU torch updates one parameter after the other
    details = _DETAILS | {"optimizer": f"state of {getattr(config.optim, 'arch', config.optim.name)}"}
    batch = {"host": host_batch(train), "device": device_batch(config, train)}
    images, targets = batch["device"]["images"], batch["device"]["targets"].nbytes
    # On a CPU the model gets images of its type in the memory that they were loaded into, unless it gets mixed ones.
    inputs = 0 if images.dtype == train.plan.output.dtype and not _mixes(train) else images.nbytes
    inputs += batch["host"]["images"].nbytes if place == "gpu" else inputs
    resident = resident_memory() - weights * (place == "host")
    parts = [
        Part("process", "host", max(0, resident), "Python, torch, libraries", there=True),
        Part("libraries", "host", _LIBRARIES, "loaded when training begins"),
        *_loading(config, "train", train, parallel),
        *(part for loader in loaders[1:] for part in _loading(config, "val", loader, parallel)),
        *(
            Part(name, place, size, details.get(name, ""), name == "weights", by_batch=name in _BY_BATCH)
            for name, size in step.items()
        ),
        Part("inputs", place, inputs + 2 * targets, "a batch on the device, and the next one", by_batch=True),
        Part("classes", place, 8 * targets * _has_masks(train), "masks in the loss, int64", by_batch=True),
    ]
    free = {"host": available_memory(), "shm": 0}
    with suppress(OSError):
        status = os.statvfs(SHM)
        free["shm"] = status.f_bavail * status.f_frsize
    if device.type == "cuda":
        free["gpu"] = gpu.free_memory(device)
    page_cache = sum(loader.plan.source.fingerprint()["bytes"] for loader in loaders)
    return Memory([part for part in parts if part.bytes], batch, free, page_cache, parallel.local_world_size)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def _bytes_of(tensors: Iterable[Any]) -> int:
    return sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))


def _loading(config: Config, split: str, loader: Loader, parallel: Parallel) -> Iterator[Part]:
    count, workers = loader.plan.order.batch_per_rank, num_workers(config, parallel)
    in_loop = 1 if loader.plan.output.dtype == torch.uint8 else 2  # the model still has one
    slots = config.engine.host_batches(parallel.device.type) if workers else in_loop
    samples = _image_bytes(loader)
    own = count * max(kept for kept, _ in samples) + max(1, workers) * max(decoded for _, decoded in samples)
    batch = {name: each.nbytes for name, each in host_batch(loader).items()}
    masks = batch.pop("targets") if _has_masks(loader) else 0
    form = f"{slots} x {count} images of {loader.plan.augment.size} pixels, {_name(loader.plan.output.dtype)}"
    yield Part(f"{split} batches", "host", slots * sum(batch.values()), form, by_batch=True)
    form = f"{slots} x {count} of uint8, {decimal(masks)} a batch; int64 would be {decimal(8 * masks)}"
    yield Part(f"{split} masks", "host", slots * masks, form, by_batch=True)
    yield Part(f"{split} images", "host", own, "encoded and decoded" + ", with masks" * bool(masks))
    if config.data.cache is not Cache.none:
        yield _cache(split, loader.plan.source, [decoded for _, decoded in samples])
    yield Part(
        f"{split} workers", "host", workers * chosen_engine(config.engine, workers).worker_bytes, f"{workers} processes"
    )


def _cache(split: str, source: Source, decoded: Sequence[int]) -> Part:
    """The cache of a split; `decoded` are bytes of some images."""
    from effloop.data.cache.cached import CachedSource, bytes_of_masks

    assert isinstance(source, CachedSource)
    wanted = len(source) * sum(decoded) // len(decoded)
    if source.what is Cache.bytes:
        wanted = source.fingerprint()["bytes"] + bytes_of_masks(source.source, Cache.bytes)
    size, form = source.region.num_bytes, f"data.cache={source.what.value}"
    return Part(f"{split} cache", "host", size, form, there=True, in_shm=True, wanted=wanted)


def _image_bytes(loader: Loader) -> list[tuple[int, int]]:
    """What each of a few images, with its mask, takes: encoded, which is 0 where files are mapped, and decoded."""
    source, decoder = loader.plan.source, loader.plan.decoder
    found, count = [], len(source)
    for sample in np.unique(np.linspace(0, count - 1, min(count, _SAMPLES)).astype(np.int64)).tolist():
        with suppress(DataError):  # loading it will raise it
            data = source.read(sample)
            height, width = decoder.size(data)
            masks = [source.read_mask(sample)] if _has_masks(loader) else []
            kept = sum(len(each) for each in [data, *masks] if isinstance(each, bytes))
            found.append((kept, (decoder.channels + len(masks)) * height * width))
    return found or [(0, 0)]

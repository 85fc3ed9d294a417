"""A module or batches of somebody's own, in the place of those that a config describes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from effloop.assemble.environment import Environment
from effloop.assemble.loader import Data, build_data
from effloop.assemble.model import state_preserved
from effloop.batch import Batch
from effloop.data.image.header import Encoded
from effloop.data.loader import Loader
from effloop.data.source import Kind, Source
from effloop.data.source.splits import check_same_classes
from effloop.data.transfer import Transfer
from effloop.errors import ConfigError, DataError
from effloop.model import ModelConfig
from effloop.system import gpu
from effloop.system.cached import cached_property


class GivenSource(Source):
    """What is known of the samples in batches that were given."""

    def __init__(self, loader: GivenLoader, classes: tuple[str, ...]) -> None:
        self.loader, self.kind = loader, loader.kind
        self.classes = () if self.kind is Kind.numbers else classes

    @property
    def where(self) -> str:
        return self.loader.where

    def __len__(self) -> int:
        return len(self.loader) * self.loader.global_batch

    @cached_property
    def targets(self) -> NDArray[Any]:
        """Of all batches of all ranks, which are loaded for it: regression and balanced weights need them."""
        own = torch.cat([batch.targets[batch.valid].cpu() for batch in self.loader.epoch(0)])
        return torch.cat(self.loader.parallel.gather(own)).numpy()

    @property
    def labels(self) -> NDArray[Any]:  # type: ignore[override]
        return self.targets

    def read(self, index: int) -> Encoded:
        raise DataError("is in a batch that was given")

    def raw_key(self, index: int) -> bytes:
        return b"%d" % index

    def fingerprint(self) -> dict[str, Any]:
        return {"samples": len(self), "bytes": 0, "sha256": "of batches given to build_trainer"}


class GivenLoader:
    """Batches as `build_trainer` takes them, as a stream for the loop."""

    ledger = None

    def __init__(self, given: Any, split: str, environment: Environment) -> None:
        if hasattr(given, "__next__") or not (hasattr(given, "__iter__") and hasattr(given, "__len__")):
            what = f"a {type(given).__name__} has no length, or can't begin anew"
            raise ConfigError(f"{split}: {what}; give a DataLoader, or a list of batches")
        self.given, self.where = given, f"{split} (a {type(given).__name__})"
        self.parallel, self.data = environment.parallel, environment.config.data
        self.transfer = Transfer(self.parallel.device, self.data.mean, self.data.std, channels_last=False)
        with state_preserved(nn.Module()):  # looking at a batch draws from the loader's random numbers
            first = next(self._batches(), None)
        if first is None:
            raise DataError(f"{self.where} has no batches")
        self.first = self.transfer.normalize(first.images[:2].to(self.parallel.device))  # images
        dims, whole = first.targets.ndim, not first.targets.is_floating_point()
        several = Kind.flags if whole or environment.config.task.name == "multilabel" else Kind.numbers
        self.kind = {1: Kind.classes if whole else Kind.numbers, 2: several}.get(dims, Kind.masks)
        self.transfer.target_dtype = torch.uint8 if self.kind is Kind.masks else environment.task.target.dtype
        self.global_batch = len(first) * self.parallel.world_size
        inner, names = given, None
        while inner is not None and names is None:  # of a DataLoader's dataset, or of what a Subset is of
            names, inner = getattr(inner, "classes", None), getattr(inner, "dataset", None)
        self.source = GivenSource(self, tuple(map(str, names)) if isinstance(names, Iterable) else ())

    @property
    def classes(self) -> tuple[str, ...]:
        return self.source.classes

    def __len__(self) -> int:
        return len(self.given)

    def describe(self) -> str:
        """One line: how many batches, of what."""
        return f"{len(self):,} batches of {self.global_batch}, {self.where}"

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        """The batches on the device; those before a position are loaded and dropped."""
        if set_epoch := getattr(getattr(self.given, "sampler", None), "set_epoch", None):
            set_epoch(epoch)
        for batch in itertools.islice(self._batches(), samples_seen // self.global_batch, None):
            device, targets = self.transfer.device, batch.targets
            targets = targets[:, None] if self.kind is Kind.numbers and targets.ndim == 1 else targets
            images = self.transfer.normalize(gpu.to_device(batch.images, device))
            targets = gpu.to_device(targets.to(self.transfer.target_dtype), device)
            yield Batch(images, targets, batch.ids, gpu.to_device(batch.valid, device))

    def close(self) -> None:
        """What was given stays open."""

    def _batches(self) -> Iterator[Batch]:
        count, seen = self.data.channels, 0
        for number, given in enumerate(self.given):
            try:
                batch = given if isinstance(given, Batch) else self._batch(seen, *given)
                good = len(batch.images) == len(batch.targets) == len(batch) and batch.images.ndim == 4
            except (TypeError, ValueError, RuntimeError):
                good = False
            plain = good and batch.images.dtype == torch.uint8 and batch.images.shape[1] == count
            if not good or not (plain or batch.images.is_floating_point()):
                parts = given if isinstance(given, tuple | list) else [given]
                of = ", ".join(f"{type(each).__name__} {tuple(getattr(each, 'shape', ()))}" for each in parts)
                raise ConfigError(
                    f"{self.where}: batch {number} is {of}; give (images, targets): (N, C, H, W) floats, or "
                    f"(N, {count}, H, W) or (N, H, W, {count}) uint8, and N targets"
                )
            if hasattr(self, "source") and self.classes and self.kind is Kind.classes and not batch.targets.is_cuda:
                low, high = map(int, batch.targets.aminmax())
                if low < 0 or high >= len(self.classes):
                    got, most = f"{low} to {high}", len(self.classes) - 1
                    raise DataError(f"{self.where}: batch {number} has labels from {got}; allowed are 0 to {most}")
            seen += len(batch)
            yield batch

    def _batch(self, seen: int, images: Any, targets: Any) -> Batch:
        images, targets = torch.as_tensor(images), torch.as_tensor(targets)
        if images.dtype == torch.uint8 and images.shape[1] != self.data.channels:
            images = images.permute(0, 3, 1, 2)
        images = images.float() if images.is_floating_point() else images
        ids, valid = torch.arange(seen, seen + len(images)), torch.ones(len(images), dtype=torch.bool)
        return Batch(images, targets, ids, valid)


def build_given(environment: Environment, module: nn.Module | None, train: Any, val: Any) -> tuple[Environment, Data]:
    """What a run trains in and on, where its module, its batches or both were given to `build_trainer`."""
    config, outputs = environment.config, None
    if (train is None) != (val is None):
        raise ConfigError(f"{'val' if val is None else 'train'}: is missing; give train and val, or neither")
    if (config.probe or config.global_batch or config.parallel.virtual) and train is not None:
        raise ConfigError("probe, global_batch, parallel.virtual: need images that EffLoop loads; leave them out")
    data = build_data(environment) if train is None else None
    pair = {"train": data.train, "val": data.val} if data else {"train": train, "val": val}
    splits = {n: each if isinstance(each, Loader) else GivenLoader(each, n, environment) for n, each in pair.items()}
    first = splits["train"]
    images = first.samples([0, 0]).images if isinstance(first, Loader) else first.first
    if module is None and (has := images.shape[1]) != config.data.channels:
        raise ConfigError(f"data.channels: {config.data.channels}, but the batches have {has}; set data.channels={has}")
    changes: dict[str, Any] = {}
    if not data:
        lengths = json.dumps([[len(each), each.global_batch] for each in splits.values()])
        environment.parallel.assert_equal("the number of batches and their size", lengths)
        batch = first.global_batch // environment.parallel.world_size
        changes = {"image_size": [*images.shape[2:]], "batch_size": batch, "progressive": []}
    if module is not None:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model: is {module!r}; give a torch.nn.Module")
        with state_preserved(module), torch.no_grad():
            found = module.to(environment.parallel.device).eval()(images)
        if (dims := getattr(found, "ndim", 2)) < 2:  # (N,) outputs and (N, 1) targets would make (N, N) losses
            raise ConfigError(f"model: gives outputs of {dims} dimensions for images; let it return (N, K)")
        outputs = found.shape[1] if isinstance(found, torch.Tensor) else None
        shared = {each.name: getattr(config.model, each.name) for each in fields(ModelConfig)}
        changes["model"] = ModelConfig(**shared | {"name": type(module).__name__})
    names = next(filter(None, (each.classes for each in splits.values())), None)
    count = len(names or ()) or outputs or config.model.num_classes
    for each in splits.values():
        if isinstance(each, GivenLoader):
            if not count:
                raise ConfigError(f"model.num_classes: {each.where} doesn't say how many classes it has; set it")
            each.source = GivenSource(each, names or tuple(map(str, range(count))))
    source = first.source
    check_same_classes(source, splits["val"].source)
    if outputs not in (None, wanted := environment.task.num_outputs(source)):
        raise ConfigError(f"model: gives {outputs} outputs, and {source.where} has {wanted}; change its last layer")
    environment = replace(
        environment, module=module, config=replace(config, **changes), recorded=replace(environment.recorded, **changes)
    )
    prints = {name: each.source.fingerprint() for name, each in splits.items()}
    unused = "data, augment, engine, num_workers, batch_size and progressive"
    note = f"data   batches as they were given: {unused} are not used"
    parts: Any = {"train": first, "batches": first, "largest": first, "val": splits["val"]}
    return environment, data or Data(**parts, fingerprints=prints, notes=[note], download={})

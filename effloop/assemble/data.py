"""Both splits of a run, and what the loop asks for their batches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from effloop.assemble.environment import Environment
from effloop.assemble.loader import Use, loader_for, source_of
from effloop.data.loader import Loader, Stages
from effloop.data.source.root import remote_facts, remote_files
from effloop.data.source.splits import check_same_classes
from effloop.data.source.storage.kept import opening_once
from effloop.errors import ConfigError, warn
from effloop.train.trainer import BatchStream


@dataclass(frozen=True)
class Data:
    """Both splits of a run.

    Attributes:
        train: the training split at `image_size`.
        batches: what the loop asks for batches: `train`, or loaders of several sizes that take turns.
        largest: the loader of the training split whose batches take most memory.
        val: the validation split.
        fingerprints: {split: its fingerprint}; of the files behind a URL `remote`, too, or `remote-KEY`.
        notes: lines for users.
        download: what it took to have the files behind a URL here; empty for other data.
    """

    train: Loader
    batches: BatchStream
    largest: Loader
    val: Loader
    fingerprints: dict[str, Any]
    notes: Sequence[str]
    download: Mapping[str, float]

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of their labels; empty where targets are no classes."""
        return list(self.train.classes)

    @property
    def target_names(self) -> list[str]:
        """Names of the outputs: the classes, or of each of the numbers."""
        return list(self.train.plan.source.target_names)


@opening_once()
def build_data(environment: Environment) -> Data:
    """Open both splits, and start what loads them.

    Raises:
        ConfigError, DataError: they can't be, or ranks have different data.
    """
    config, task, parallel = environment.config, environment.task, environment.parallel
    train = loader_for(config, task, source_of(config, "train", parallel), parallel, Use("train", True))
    batches, largest = _stages(environment, train)
    val = loader_for(config, task, source_of(config, "val", parallel), parallel, Use("val", False))
    fingerprints = {"train": train.plan.source.fingerprint(), "val": val.plan.source.fingerprint()}
    fingerprints |= {name: manifest.fingerprint() for name, manifest in remote_files(config.data).items()}
    check_same_classes(train.plan.source, val.plan.source)
    parallel.assert_equal("the data", json.dumps(fingerprints, sort_keys=True))
    notes = [*dict.fromkeys(split.plan.source.note for split in (train, val) if split.plan.source.note)]
    if line := train.plan.order.describe():
        notes.append(line)
    download, lines = remote_facts(config.data)
    notes += lines
    if fingerprints["train"] == fingerprints["val"]:
        notes.append(
            f"validation uses the training images ({val.plan.source.where}): its scores say nothing about other "
            "images; set data.val_split to a split of images that aren't trained on"
        )
        parallel.on_rank0(lambda: warn(notes[-1]))
    return Data(train, batches, largest, val, fingerprints, notes, download)


def _stages(environment: Environment, train: Loader) -> tuple[BatchStream, Loader]:
    """What the loop asks for batches, and the loader whose batches take most memory.

    Raises:
        ConfigError: a recipe can't make images of a size.
    """
    config = environment.config
    if not config.progressive:
        return train, train
    loaders, sizes = {config.size: train}, config.train_sizes
    for size in sizes:
        if size not in loaders:
            try:
                sized = replace(config, image_size=list(size))
                source = source_of(sized, "train", environment.parallel)
                loaders[size] = loader_for(sized, environment.task, source, environment.parallel, Use("train", True))
                loaders[size].ledger = train.ledger
            except ConfigError as error:
                raise ConfigError(f"progressive: at {size} pixels {error}") from error
    stages = Stages(sizes, [loaders[size] for size in sizes], config.epochs)
    return stages, loaders[max(sizes, key=lambda size: size.pixels)]

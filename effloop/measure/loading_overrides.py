"""Overrides of loading that may help."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from effloop.convert.reencode import Recipe, Recode
from effloop.data.augment import augments
from effloop.data.augment.base import RecipeConfig
from effloop.data.decode import decoders
from effloop.data.remote.location import is_remote, local_name
from effloop.data.source import Cache
from effloop.errors import EffLoopError
from effloop.measure.costs import Cost, costs_of, loading_costs
from effloop.measure.measured import rate_of, serial_s
from effloop.measure.trial import IMAGES, Change, Trial
from effloop.system.hardware import available_memory

_BLOCKED = 1.5
"""Times that loading takes longer than its cores compute, as it waits for the storage, from which on more workers than
cores help."""

_SHORTEST_RUN = 4
"""Samples that a worker takes at a time, at least."""

_IN_MEMORY = Cost(2e-6, 2e-6)
"""Reading an image that is kept in memory, a view."""

_LIGHTER = 0.7
"""Share of augmenting that is left without an operation that is worth naming."""


def check_workers(trial: Trial) -> Iterator[Change]:
    """As many as there are cores; more where they wait for the storage."""
    if not trial.loading_matters:
        return
    total, cores = trial.load.loading.total, trial.found.cores
    storage = trial.load.loading.storage
    waits = 1 + max(0.0, storage.wall_s - storage.cpu_s) / max(total.cpu_s, 1e-9)
    most = 2 * -(-trial.plan.order.batch_per_rank // _SHORTEST_RUN)  # two batches are loaded at a time, run by run
    wanted = {cores} | ({min(64, most, math.ceil(cores * waits))} if waits > _BLOCKED else set())
    for count in sorted(wanted):
        if count > trial.load.workers:
            override = f"num_workers={count}"
            if not trial.found.config.engine.host_batches("cpu"):
                override = f"engine=threads {override}"
            load = replace(trial.load, workers=count, serial_s=0.0)
            if trial.found.seconds:
                alone = rate_of(trial.found.with_overrides(*override.split()), trial.found.seconds)
                load = replace(load, serial_s=serial_s(load, load.loading, alone))
            why = "workers wait for the storage, not for a core" if count > cores else "cores are idle while one loads"
            yield trial.change(override, why, load)


def check_engine(trial: Trial) -> Iterator[Change]:
    """Processes, where threads wait for each other's Python."""
    if not trial.load.serial_s or trial.found.config.engine.name == "processes":
        return
    alone = rate_of(trial.found.with_overrides("engine=processes"), trial.found.seconds)
    if alone > trial.found.loader_per_s:
        load = replace(trial.load, serial_s=min(1 / alone, trial.load.serial_s))
        why = "threads wait for each other's Python; processes don't"
        yield trial.change("engine=processes", why, load, ease=0.95)


def check_caches(trial: Trial) -> Iterator[Change]:
    """Encoded images in memory, or decoded ones."""
    if trial.found.config.data.cache is not Cache.none:
        return
    free, storage = available_memory() // 2, trial.found.storage
    if trial.matters("storage") and storage.total_bytes < free:
        load = trial.load.with_loading(storage=_IN_MEMORY)
        why = f"read once; {decimal(storage.total_bytes)} of the {decimal(free)} that it may take"
        yield trial.change("data.cache=bytes", why, load, ease=0.9)
    if trial.matters("decode"):
        pixels, images = trial.decoded
        needed = int(pixels * len(trial.plan.source))
        if needed < free:
            costs = costs_of(trial.plan, images, trial.found.seconds)
            why = f"decoded once; {decimal(needed)} of the {decimal(free)} that it may take"
            load = trial.loaded(costs).with_loading(storage=_IN_MEMORY)
            yield trial.change("data.cache=pixels", why, load, ease=0.9)


def check_decoders(trial: Trial) -> Iterator[Change]:
    """Other decoders, and what this one can leave out."""
    if not trial.matters("decode"):
        return
    config = trial.found.config
    ways = [(f"decode={name}", True) for name in decoders if name != config.decode.name]
    ways += [("decode.region=true", True)] * (not config.decode.region)
    ways += [("decode.dct_scaling=true", False)] * (not config.decode.dct_scaling)
    for override, exact in ways:
        with suppress(EffLoopError):  # not installed
            changed = trial.found.with_overrides(override)
            decoder = decoders.build_for(changed.data.channels, changed.decode)
            costs = costs_of(trial.plan, trial.encoded, trial.found.seconds, decoder)
            why = "decodes less" if "." in override else "decodes faster"
            yield trial.change(override, why, trial.loaded(trial.relative(costs)), exact=exact)


def check_conversions(trial: Trial) -> Iterator[Change]:
    """The images stored smaller, or as pixels."""
    if not trial.matters("decode"):
        return
    root = trial.found.config.data.root
    if not root:
        return
    sides = [max(info.height, info.width) for info in map(trial.plan.decoder.read_info, trial.encoded)]
    side = 2 * max(trial.plan.augment.size)
    recipes = [("payload=raw", Recipe(payload="raw"), True)]
    if max(sides) > 1.2 * 500 >= 1.2 * side:
        recipes.append(("max_side=500 quality=source", Recipe(quality="source", max_side=500), False))
    if max(sides) > 1.2 * side:
        recipes.append((f"max_side={side} quality=90", Recipe(max_side=side), False))
        recipes.append((f"max_side={side} payload=raw", Recipe(payload="raw", max_side=side), False))
    for words, recipe, exact in recipes:
        images = list(map(Recode(recipe, trial.plan.decoder), trial.encoded))
        masks = trial.masks(recipe.max_side)
        load = trial.loaded(trial.relative(costs_of(trial.plan, images, trial.found.seconds, masks=masks)))
        size = int(sum(map(len, [*images, *(masks or ())])) / len(images) * len(trial.plan.source))
        where = _copy_of(root, words)
        why = f"less to decode; {decimal(size)} on disk"
        more = {"recipe": recipe, "then": f"data.root={where}"}
        yield trial.change(f"convert {words}", why, load, exact=exact, ease=0.7, **more)


def _copy_of(root: str, words: str) -> str:
    """Where a converted dataset would go: beside the original, or for one behind a URL into the working directory."""
    path = Path(local_name(root) if is_remote(root) else root)
    tail = words.replace("max_side=", "").replace("quality=", "q").replace("payload=", "").replace(" ", "-")
    return str(path.with_name(f"{path.name}-{tail}.effloop"))


def check_operations(trial: Trial) -> Iterator[Change]:
    """The recipe without its most expensive operation, if that is most of it."""
    config = trial.found.config.augment
    if not (isinstance(config, RecipeConfig) and trial.matters("augment")):
        return
    usual, found = trial.load.loading.augment, []
    for label in config.order or list(config.ops):
        with suppress(EffLoopError, ValueError):  # the images aren't of one size without it
            changed = trial.found.with_overrides(f"augment.ops.{label}=null")
            less = augments.build_for(changed.data.channels, changed.augment, size=changed.size, train=True)
            plan = replace(trial.plan, augment=less)
            less.check(np.array([(info.height, info.width) for info in map(plan.decoder.read_info, trial.encoded)]))
            costs = loading_costs(plan, trial.found.seconds, most=trial.load.loading.images)
            found.append((costs.augment.wall_s, label, costs))
    if found and min(found)[0] < _LIGHTER * usual.wall_s:
        left, label, costs = min(found)
        why = f"the operation '{label}' takes {1 - left / usual.wall_s:.0%} of augmenting"
        yield trial.change(f"augment.ops.{label}=null", why, trial.loaded(costs), exact=False, ease=0.8)


def check_recipes(trial: Trial) -> Iterator[Change]:
    """The same recipe by a faster library, with a faster resize, or on the GPU."""
    config = trial.found.config.augment
    if not trial.matters("augment"):
        return
    ways = [("augment=native", "operations that are faster")] * (not config.name.startswith("native"))
    ways += [("augment.resize=fast", "not antialiased")] * hasattr(config, "resize")
    if trial.found.device.type == "cuda":
        ways.append(("augment.device=gpu", "whole batches at once, on the GPU"))
    for override, why in ways:
        with suppress(EffLoopError):
            changed = trial.found.with_overrides(override)
            augment = augments.build_for(changed.data.channels, changed.augment, size=changed.size, train=True)
            costs = loading_costs(replace(trial.plan, augment=augment), trial.found.seconds, most=IMAGES)
            load = trial.loaded(trial.relative(costs))
            yield trial.change(override, why, load, exact=False, ease=0.8)

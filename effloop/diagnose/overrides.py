"""Overrides that may help, and what each is predicted to bring, from measurements of a few images or steps."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal
from torch import nn

from effloop.build.autotune import trial_step
from effloop.build.race import fastest, state_preserved
from effloop.build.resolve import resolved
from effloop.convert.reencode import Recipe, Recode
from effloop.data.augment import augments
from effloop.data.augment.base import RecipeConfig
from effloop.data.decode import decoders
from effloop.data.image.header import Encoded, pnm_header
from effloop.data.source import Cache
from effloop.diagnose.forecast import Load
from effloop.diagnose.measured import Measured, rate_of, serial_s
from effloop.diagnose.pipeline import LoadingCosts, costs_of, loading_costs, sample_ids
from effloop.diagnose.timed import Cost
from effloop.errors import PROGRAM, EffLoopError
from effloop.system.hardware import available_cores, available_memory

_IMAGES = 32
"""That are re-encoded to see what another encoding would bring."""

_MATTERS = 0.05
"""Share of the loop's time below which a stage isn't looked at."""


@dataclass(frozen=True)
class Change:
    """What an override changes.

    Attributes:
        override: words for the command line, or for `convert`.
        why: a few words.
        load: what is done for each image with it.
        evaluation_s: seconds of evaluation for each epoch with it.
        exact: whether the same images are trained on, in the same precision.
        ease: from 1 (a word) down to 0; of two that bring as much the easier one is preferred.
        recipe: how the images are to be re-encoded, where it is a conversion.
        command: the command that does that.
        then: the override for the converted data.
    """

    override: str
    why: str
    load: Load
    evaluation_s: float
    exact: bool = True
    ease: float = 1.0
    recipe: Recipe | None = None
    command: str = ""
    then: str = ""


class Candidates:
    """All changes that may help a run.

    Args:
        found: the run, measured.
    """

    def __init__(self, found: Measured) -> None:
        self.found = found
        self.load, self.plan = found.load, found.loader.plan

    def __iter__(self) -> Iterator[Change]:
        known: Sequence[Callable[[], Iterator[Change]]] = (
            self._workers,
            self._caches,
            self._logging,
            self._evaluation,
        )
        tried = (self._engine, self._decoders, self._conversions, self._operations, self._recipes, self._steps)
        for check in (*known, *(tried if self.found.seconds else ())):
            with suppress(EffLoopError):  # it isn't for this run
                yield from check()

    def _change(self, override: str, why: str, load: Load, **more: Any) -> Change:
        return Change(override, why, load, self.found.evaluation_s, **more)

    def _matters(self, stage: str) -> bool:
        """Whether the run would be faster if a stage cost nothing."""
        forecast = self.found.forecast
        return forecast.without(self.load, stage) > (1 + _MATTERS) * forecast.images_per_s(self.load)

    def _loaded(self, costs: LoadingCosts) -> Load:
        """With other costs of decoding and augmenting; those of reading and batching stay."""
        return self.load.with_loading(decode=costs.decode, augment=costs.augment)

    @property
    def _loading_matters(self) -> bool:
        return any(map(self._matters, ("storage", "decode", "augment", "batch")))

    def _workers(self) -> Iterator[Change]:
        """As many as there are cores; more where they wait for the storage."""
        if not self._loading_matters:
            return
        total, cores = self.load.loading.total, available_cores()
        waits = total.wall_s / max(total.cpu_s, 1e-9)
        wanted = {cores} | ({min(64, math.ceil(cores * waits))} if waits > _BLOCKED else set())
        for count in sorted(wanted):
            if count > self.load.workers:
                override = f"num_workers={count}"
                if not self.found.config.engine.host_batches("cpu"):
                    override = f"engine=threads {override}"
                load = replace(self.load, workers=count, serial_s=0.0)
                if self.found.seconds:
                    alone = rate_of(self.found.with_overrides(*override.split()), self.found.seconds)
                    load = replace(load, serial_s=serial_s(load, load.loading, alone))
                why = (
                    "workers wait for the storage, not for a core"
                    if count > cores
                    else "cores are idle while one loads"
                )
                yield self._change(override, why, load)

    def _engine(self) -> Iterator[Change]:
        """Processes, where threads wait for each other's Python."""
        if not self.load.serial_s or self.found.config.engine.name == "processes":
            return
        alone = rate_of(self.found.with_overrides("engine=processes"), self.found.seconds)
        if alone > self.found.loader_per_s:
            load = replace(self.load, serial_s=min(1 / alone, self.load.serial_s))
            why = "threads wait for each other's Python; processes don't"
            yield self._change("engine=processes", why, load, ease=0.95)

    def _caches(self) -> Iterator[Change]:
        """Encoded images in memory, or decoded ones."""
        if self.found.config.data.cache is not Cache.none:
            return
        free, storage = available_memory() // 2, self.found.storage
        if self._matters("storage") and storage.total_bytes < free:
            load = self.load.with_loading(storage=_IN_MEMORY)
            why = f"read once; {decimal(storage.total_bytes)} of the {decimal(free)} that it may take"
            yield self._change("data.cache=bytes", why, load, ease=0.9)
        if self._matters("decode"):
            pixels, images = self._decoded
            needed = int(pixels * len(self.plan.source))
            if needed < free:
                costs = costs_of(self.plan, images, self.found.seconds)
                why = f"decoded once; {decimal(needed)} of the {decimal(free)} that it may take"
                load = self._loaded(costs).with_loading(storage=_IN_MEMORY)
                yield self._change("data.cache=pixels", why, load, ease=0.9)

    @cached_property
    def _encoded(self) -> list[Encoded]:
        """The first images of the first epoch."""
        return [bytes(self.plan.source.read(index)) for index in sample_ids(self.plan, _IMAGES).tolist()]

    @cached_property
    def _decoded(self) -> tuple[float, list[Encoded]]:
        """Their mean bytes as pixels, and these."""
        images: list[Encoded] = []
        for data in self._encoded:
            pixels = np.ascontiguousarray(self.plan.decoder.decode(data))
            images.append(pnm_header(*pixels.shape) + pixels.tobytes())
        return sum(map(len, images)) / len(images), images

    def _decoders(self) -> Iterator[Change]:
        """Other decoders, and what this one can leave out."""
        if not self._matters("decode"):
            return
        config = self.found.config
        ways = [(f"decode={name}", True) for name in decoders if name != config.decode.name]
        ways += [("decode.region=true", True)] * (not config.decode.region)
        ways += [("decode.dct_scaling=true", False)] * (not config.decode.dct_scaling)
        for override, exact in ways:
            with suppress(EffLoopError):  # not installed
                decoder = decoders.build(self.found.with_overrides(override).decode)
                costs = costs_of(self.plan, self._encoded, self.found.seconds, decoder)
                why = "decodes less" if "." in override else "decodes faster"
                yield self._change(override, why, self._loaded(self._relative(costs)), exact=exact)

    def _relative(self, costs: LoadingCosts) -> LoadingCosts:
        """Costs of the few images that were tried -> of the many that were measured."""
        tried, many = self._tried, self.load.loading

        def scaled(stage: str) -> Cost:
            now, before, all_s = getattr(costs, stage), getattr(tried, stage), getattr(many, stage)
            ratio = now.cpu_s / before.cpu_s if before.cpu_s else 1.0
            return Cost(all_s.wall_s * ratio, all_s.cpu_s * ratio)

        return replace(costs, decode=scaled("decode"), augment=scaled("augment"))

    @cached_property
    def _tried(self) -> LoadingCosts:
        """Costs of the few images as they are."""
        return costs_of(self.plan, self._encoded, self.found.seconds)

    def _conversions(self) -> Iterator[Change]:
        """The images stored smaller, or as pixels."""
        if not self._matters("decode"):
            return
        root = self.found.config.data.root
        if not root:
            return
        sides = [max(info.height, info.width) for info in map(self.plan.decoder.read_info, self._encoded)]
        side = 2 * self.plan.augment.size
        recipes = [("payload=raw", Recipe(payload="raw"), True)]
        if max(sides) > 1.2 * 500 >= 1.2 * side:
            recipes.append(("max_side=500 quality=source", Recipe(quality="source", max_side=500), False))
        if max(sides) > 1.2 * side:
            recipes.append((f"max_side={side} quality=90", Recipe(max_side=side), False))
            recipes.append((f"max_side={side} payload=raw", Recipe(payload="raw", max_side=side), False))
        for words, recipe, exact in recipes:
            images = list(map(Recode(recipe, self.plan.decoder), self._encoded))
            load = self._loaded(self._relative(costs_of(self.plan, images, self.found.seconds)))
            size = int(sum(map(len, images)) / len(images) * len(self.plan.source))
            where = _beside(root, words)
            command = f"{PROGRAM} convert data.root={shlex.quote(str(root))} to=memmap out={where} {words}"
            why = f"less to decode; {decimal(size)} on disk"
            more = {"recipe": recipe, "command": command, "then": f"data.root={where}"}
            yield self._change(f"convert {words}", why, load, exact=exact, ease=0.7, **more)

    def _operations(self) -> Iterator[Change]:
        """The recipe without its most expensive operation, if that is most of it."""
        config = self.found.config.augment
        if not (isinstance(config, RecipeConfig) and self._matters("augment")):
            return
        usual, found = self.load.loading.augment, []
        for label in config.order or list(config.ops):
            with suppress(EffLoopError, ValueError):  # the images aren't of one size without it
                less = augments.build(
                    self.found.with_overrides(f"augment.ops.{label}=null").augment,
                    size=self.found.config.image_size,
                    train=True,
                )
                plan = replace(self.plan, augment=less)
                less.check(np.array([(info.height, info.width) for info in map(plan.decoder.read_info, self._encoded)]))
                costs = loading_costs(plan, self.found.seconds, most=self.load.loading.images)
                found.append((costs.augment.wall_s, label, costs))
        if found and min(found)[0] < _LIGHTER * usual.wall_s:
            left, label, costs = min(found)
            why = f"the operation '{label}' takes {1 - left / usual.wall_s:.0%} of augmenting"
            yield self._change(f"augment.ops.{label}=null", why, self._loaded(costs), exact=False, ease=0.8)

    def _recipes(self) -> Iterator[Change]:
        """The same recipe by a faster library, with a faster resize, or on the GPU."""
        config = self.found.config.augment
        if not self._matters("augment"):
            return
        ways = [("augment=native", "operations that are faster")] * (not config.name.startswith("native"))
        ways += [("augment.resize=fast", "not antialiased")] * hasattr(config, "resize")
        if self.found.device.type == "cuda":
            ways.append(("augment.device=gpu", "whole batches at once, on the GPU"))
        for override, why in ways:
            with suppress(EffLoopError):
                changed = self.found.with_overrides(override)
                augment = augments.build(changed.augment, size=changed.image_size, train=True)
                costs = loading_costs(replace(self.plan, augment=augment), self.found.seconds, most=_IMAGES)
                load = self._loaded(self._relative(costs))
                yield self._change(override, why, load, exact=False, ease=0.8)

    def _steps(self) -> Iterator[Change]:
        """Other ways to do the step, measured beside each other."""
        if not self._matters("step"):
            return
        found, task, device = self.found, self.found.task, self.found.device
        outputs = task.num_outputs(self.plan.source)
        ways = {"": resolved(found.config)}
        for override in self._step_overrides():
            with suppress(EffLoopError):
                ways[override] = resolved(found.with_overrides(*override.split()))
        with state_preserved(nn.Module()):  # random numbers
            race = fastest(
                "step", {name: trial_step(way, task, outputs, device) for name, way in ways.items()}, rounds=5
            )
        for override in list(ways)[1:]:
            if override in race.step_s:
                ratio = race.step_s[override] / race.step_s[""]
                load = replace(self.load, step_s=self.load.step_s * ratio)
                yield self._change(override, "a faster step", load, exact="precision" not in override)

    def _step_overrides(self) -> Iterator[str]:
        """Overrides of the step that aren't set yet."""
        config = self.found.config
        assert config.precision is not None
        if not config.precision.mixed:
            yield "precision=bf16"
        if not config.channels_last:
            yield "channels_last=true"
        if config.model.checkpointing:
            yield "model.checkpointing=false"
        if config.deterministic:
            yield "deterministic=false"
        if config.optim.ema:
            yield "optim.ema=0"

    def _logging(self) -> Iterator[Change]:
        """Fewer lines of the log."""
        if self._matters("log"):
            every = 10 * self.found.config.record.log_every
            load = replace(self.load, log_s=self.load.log_s / 10)
            why = f"the recorder takes {self.found.loop.log:.0%} of the time"
            yield self._change(f"record.log_every={every}", why, load)

    def _evaluation(self) -> Iterator[Change]:
        """Fewer evaluations."""
        found = self.found
        if found.evaluation < _MUCH_EVALUATION or found.config.epochs < 2:
            return
        now = min(found.config.eval_every, found.config.epochs)
        every = min(found.config.epochs, math.ceil(now * found.evaluation_s / (_LITTLE_EVALUATION * found.epoch_s)))
        if every > now:
            why = f"evaluation takes {found.evaluation:.0%} of the time"
            yield Change(f"eval_every={every}", why, self.load, found.evaluation_s * now / every)


def _beside(root: str | None, words: str) -> str:
    """Where a converted dataset would go: beside the original."""
    name = Path(root or "data").name
    tail = words.replace("max_side=", "").replace("quality=", "q").replace("payload=", "").replace(" ", "-")
    return shlex.quote(str(Path(root or "data").with_name(f"{name}-{tail}.effloop")))


_BLOCKED = 1.5
"""Times that loading takes longer than its cores compute, from which on more workers than cores help."""

_IN_MEMORY = Cost(2e-6, 2e-6)
"""Reading an image that is kept in memory, a view."""

_LIGHTER = 0.7
"""Share of augmenting that is left without an operation that is worth naming."""

_MUCH_EVALUATION = 0.2
_LITTLE_EVALUATION = 0.1
"""Shares of evaluation: beside training, what is much, and of training, what is little."""

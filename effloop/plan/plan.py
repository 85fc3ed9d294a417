"""A run on GPUs that aren't here: what fits, how fast it trains, what binds, what it costs, and what would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal

import torch
from rich.filesize import decimal

from effloop.assemble.environment import Resolved, batches_of_update, memory_hint, resolved
from effloop.batch import ImageSize
from effloop.config import Config, with_overrides
from effloop.data.source.splits import open_split
from effloop.errors import ConfigError, EffLoopError
from effloop.optim import optimizers, state_ratio
from effloop.parallel.base import OwnSlice
from effloop.plan.cards import Card
from effloop.plan.compare import Comparison, Measure, compared
from effloop.plan.memory import gpu_memory, largest_batch
from effloop.plan.speed import Time, step_time
from effloop.plan.trace import Trace, built, trace
from effloop.task import tasks


@dataclass(frozen=True)
class Data:
    """What a run trains on."""

    images: int  # that an epoch trains on
    val_images: int  # of an evaluation; 0 where that isn't known
    outputs: int  # of the model
    where: str = ""  # what is read; empty of data that isn't on this machine


@dataclass(frozen=True)
class Loading:
    """What loading takes on this machine, as measured."""

    images_per_s: float  # by all its cores
    core_s: float  # seconds that a core computes for an image
    cores: int  # of this machine


Load = Callable[[Config], Loading]  # measures it


@dataclass(frozen=True)
class CardPlan:
    """A run on one kind of GPU. Images/s are of all its GPUs together, memory and batches of one.

    Where `batch` doesn't fit, speed, hours and cost are those of `largest_batch`; where not even one image fits, that
    is 0, and so are they, and `curve` is empty.
    """

    card: str  # its short name, such as h100
    title: str  # NVIDIA's name
    capacity: int  # bytes of its memory
    precision: str  # that it computes in: fp32, tf32, bf16 or fp16
    batch: int  # images of a GPU's batch, as configured
    accumulate: int  # batches of an update
    fits: bool  # whether that batch does
    memory: Mapping[str, int]  # part -> its bytes at that batch
    peak_bytes: int  # their sum
    peak_range: tuple[int, int]  # bytes
    largest_batch: int  # images that fit
    largest_range: tuple[int, int]  # images
    saturating_batch: int  # the smallest of `curve` whose images/s are within 5 % of the largest one's
    curve: Sequence[tuple[int, float]]  # images of a GPU's batch, images/s of the step
    images_per_s: float  # of the step
    images_per_s_range: tuple[float, float]
    step_s: Mapping[str, float]  # kind of operation -> its seconds in the step of a batch
    cores: float  # that have to load to feed these GPUs; 0 where loading wasn't measured
    binds: Literal["step", "loader"]  # what the run's speed is, with the cores of this machine
    hours: float  # of the run, with evaluations, by what binds
    hours_range: tuple[float, float]
    evaluation_hours: float  # of these
    cost: float  # of all GPUs for these hours, in the currency of the price; 0 without one


@dataclass(frozen=True)
class Advice:
    """An override that would help, and what it brings on the first card."""

    override: str  # words for the command line, or a command
    why: str  # a few words
    brings: str  # in words, such as `1.9 x images/s`
    gain: float  # images/s of the step or of loading, whichever it is about, divided by those before
    fits: bool = False  # whether it makes a batch fit that doesn't


@dataclass(frozen=True)
class Plan:
    """A run on GPUs that aren't here."""

    facts: Mapping[str, Any]  # of the config, what the figures depend on
    gpus: int  # that it is trained on
    data: Data
    loading: Loading | None  # None where the data isn't here
    cards: Sequence[CardPlan]  # in the order in which they were asked for
    advice: Sequence[Advice]  # the best first
    notes: Sequence[str]  # lines for users
    compared: Comparison | None = None  # what this machine's GPU does, and was predicted to do; None without one

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


_CPU = torch.device("cpu")
_OFF = 0.05
"""By which the peak of memory may be more or less: for 94 % of 196 of timm's models that were held out, the
largest batch on an RTX 3090 is that of a peak within it."""

_FORWARD = 1 / 3  # of a step: a backward pass has about twice the operations of a forward pass
_SATURATED = 0.95  # of the largest batch's images/s
_HELPS = 1.05  # gain below which an override isn't advised
_MOST = 5  # overrides that are advised
_BUSY = 0.6  # share of what its cores can load from which on a loader has them for itself
_UPDATES = 10  # of an epoch that a larger batch leaves
_CACHE_GB = 0.25  # of pixels, by which it is measured what loading takes without decoding
_MADE_OF = (  # docs/plan.md has what of
    "images/s: from a traced step and data sheets; 78 % within 20 % on an RTX 3090, 73 % on an H100",
    "memory: from what the traced step keeps; 53 of 59 peaks on an H100 within 2 %",
)


def data_of(config: Config, images: int | None = None, classes: int | None = None) -> Data:
    """The data of a run, which is opened unless both are given: its training images, and the outputs of its model."""
    if images and classes:
        return Data(images, 0, classes)
    if images or classes:
        given, missing = ("images", "classes") if images else ("classes", "images")
        raise ConfigError(f"{given}: is of data that isn't on this machine, which takes {missing}=N, too; set both")
    train, val = (open_split(config.data, split) for split in ("train", "val"))
    return Data(len(train), len(val), tasks.build(config.task).num_outputs(train), train.where)


def plan(
    config: Config,
    cards: Sequence[Card],
    data: Data,
    *,
    gpus: int = 1,
    prices: Sequence[float] = (),
    load: Load | None = None,
    own: Card | None = None,
    measure: Measure | None = None,
) -> Plan:
    """Plan a run for each of some cards, and find what would help on the first of them.

    Args:
        config: of the run.
        cards: that it may be trained on; none of them is needed here.
        data: of the run, by `data_of`.
        gpus: that the run has, of one kind.
        prices: of an hour of one GPU, for each of `cards`; none are unknown.
        load: measures what loading takes on this machine with a config; None where the data isn't here.
        own: this machine's GPU, by which predictions are corrected; None is none.
        measure: measures a step on it.

    Raises:
        ConfigError: the run can't be planned, or not even one image fits on any of the cards.
    """
    if config.probe:
        raise ConfigError("probe: a probe trains one layer on features in memory; set probe=0 to plan the whole model")
    for card in cards:
        precision_on(config, card)  # before anything takes time
    batch, _ = batches_of_update(config, gpus)
    planner, comparison, notes = _Planner(data), None, list[str]()
    if own and measure:
        comparison, note = compared(config, batch, data.outputs, partial(planner.planned, card=own), measure)
        notes.append(note)
        planner.faster = comparison.factor if comparison else 1.0
    planner.gpus = gpus
    if not any(planner.planned(config, card).largest_batch for card in cards):
        best, least = max(cards, key=lambda each: each.memory), replace(config, batch_size=1, global_batch=None)
        needed = planner.planned(least, best)
        part, size = max(needed.memory.items(), key=itemgetter(1))
        raise ConfigError(
            f"gpu: not even one image fits into {best.name}, as it takes {decimal(needed.peak_bytes)} of its "
            f"{decimal(best.memory)}, of which {part} {decimal(size)}; {memory_hint(least)}"
        )
    planner.loading = load(config) if load else None
    found = [planner.planned(config, *each) for each in zip(cards, prices or [0.0] * len(cards), strict=True)]
    advice = [*_of_the_step(planner, config, cards[0], found[0])] if found[0].largest_batch else []
    if load and planner.loading and found[0].binds == "loader":
        advice += _of_loading(config, found[0], planner.loading, load)
    advice.sort(key=lambda each: (not each.fits, -each.gain))
    notes += _notes(config, gpus, data, planner.loading)
    return Plan(_facts(config, gpus), gpus, data, planner.loading, found, advice[:_MOST], notes, comparison)


def _notes(config: Config, gpus: int, data: Data, loading: Loading | None) -> Iterator[str]:
    """What figures don't say."""
    if config.compile is True:
        yield "compile=true isn't predicted; figures are of false"
    if config.parallel.name == "fsdp" and gpus > 1:
        yield "what parallel=fsdp sends of the weights isn't counted"
    if (update := math.prod(batches_of_update(config, gpus)) * gpus) > data.images:
        yield f"an update has {update:,} images, more than the {data.images:,} of an epoch"
    if not data.val_images:
        yield "evaluation isn't counted, as the number of its images isn't known"
    if loading and (share := loading.images_per_s * loading.core_s / loading.cores) < _BUSY:
        yield f"the loader came to {share:.0%} of what {loading.cores} cores can load: it waits, or they do other work"
    yield from _MADE_OF


def _facts(config: Config, gpus: int) -> dict[str, Any]:
    """What figures depend on, by the names of keys."""
    parts = {key: getattr(config, key) for key in ("task", "model", "precision", "optim", "parallel")}
    keys = ("batch_size", "accumulate", "epochs", "channels_last")
    values = {key: getattr(each, "arch", each.name) for key, each in parts.items()}
    if gpus > 1 and config.parallel.name == "none":
        values["parallel"] = "ddp"
    values |= {"optim.ema": config.optim.ema, "model.checkpointing": config.model.checkpointing}
    sizes = ",".join(size.word for size in config.train_sizes)
    return values | {key: getattr(config, key) for key in keys} | {"image_size": sizes}


def precision_on(config: Config, card: Card) -> str:
    """The precision on a card, fp32, tf32, bf16 or fp16; a ConfigError if the card lacks it."""
    assert config.precision is not None  # `compose` decided it
    newer = card.capability >= (8, 0)
    has = ["fp32", "fp16", *["bf16", "tf32"] * newer]
    name = {"amp": "bf16" if newer else "fp16"}.get(config.precision.name, config.precision.name)
    if name not in has:
        what = f"{card.title}, of compute capability {'.'.join(map(str, card.capability))}, which has {', '.join(has)}"
        raise ConfigError(f"precision: '{name}' can't be planned for {what}; set precision=amp, or another gpu")
    return name


class _Planner:
    """Plans a config for a card, with one trace of a model in so many bytes, whatever the card."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.gpus = 1
        self.loading: Loading | None = None
        self.faster = 1.0  # than a step is predicted to be, as measured
        self._traces = dict[str, Trace]()

    def planned(self, config: Config, card: Card, price: float = 0.0) -> CardPlan:
        """The run on a card that costs so much an hour."""
        run, precision = resolved(config, OwnSlice(0, self.gpus, self.gpus, _CPU)), precision_on(config, card)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        kept, ratio = self._trace(run, half=dtype is not None), state_ratio(partial(optimizers.build, run.optim), _CPU)
        memory = gpu_memory(kept, run, run.batch_size, ratio, self.gpus)
        room = (card.memory, card.memory / (1 + _OFF), card.memory / (1 - _OFF))
        most, fewest, at_most = (largest_batch(kept, run, int(each), ratio, self.gpus) for each in room)
        # An update reads weights, gradients and state, and writes all but gradients; an average is read and written.
        moved = (3 + 2 * ratio) * kept.trained + 3 * kept.weights * (run.optim.ema > 0) / run.optim.ema_every
        pixels = fmean(size.pixels for size in run.train_sizes) / run.size.pixels

        def step(batch: int) -> Time:
            options: Any = {"tf32": precision == "tf32", "channels_last": run.channels_last, "optimizer_bytes": moved}
            options |= {"accumulate": run.accumulate, "gpus": self.gpus}
            return step_time(kept, batch * pixels, card, dtype, **options) / self.faster

        peak = sum(memory.values())
        if fits := peak <= card.memory:  # `most` is a multiple of 8, which the batch needn't be
            most, at_most = max(most, run.batch_size), max(at_most, run.batch_size)
        batch = min(run.batch_size, most)
        time = step(max(1, batch))
        speed, low, high = (float(self.gpus * batch / each) for each in (time.seconds, time.high, time.low))
        sizes = sorted({size * 2**power for power in range(most.bit_length()) for size in (1, 3)} | {most, batch})
        curve = [(size, float(self.gpus * size / step(size).seconds)) for size in sizes if 0 < size <= most]
        hours, slow, fast = (self._hours(run, each, pixels) for each in (speed, low, high))
        return CardPlan(
            card=card.name,
            title=card.title,
            capacity=card.memory,
            precision=precision,
            batch=run.batch_size,
            accumulate=run.accumulate,
            fits=fits,
            memory=memory,
            peak_bytes=peak,
            peak_range=(int(peak * (1 - _OFF)), int(peak * (1 + _OFF))),
            largest_batch=most,
            largest_range=(fewest, at_most),
            saturating_batch=next((size for size, rate in curve if rate >= _SATURATED * curve[-1][1]), 0),
            curve=curve,
            images_per_s=speed,
            images_per_s_range=(low, high),
            step_s={name: float(seconds) for name, seconds in time.parts.items()},
            cores=speed * self.loading.core_s if self.loading else 0.0,
            binds="loader" if self.loading and self.loading.images_per_s < speed else "step",
            hours=sum(hours),
            hours_range=(sum(fast), sum(slow)),
            evaluation_hours=hours[1],
            cost=price * self.gpus * sum(hours),
        )

    def _trace(self, run: Resolved, *, half: bool) -> Trace:
        key = repr((run.model, run.image_size, run.channels_last, half))
        if key not in self._traces:
            task = tasks.build(run.task).for_outputs(self.data.outputs)
            self._traces[key] = trace(run, task, self.data.outputs, torch.float16 if half else None)
        return self._traces[key]

    def _hours(self, run: Resolved, speed: float, pixels: float) -> tuple[float, float]:
        """Of training and of its evaluations, for so many images/s of the step."""
        if not speed:
            return 0.0, 0.0
        loading = 1 / self.loading.images_per_s if self.loading else 0.0
        evaluated = math.ceil(run.epochs / run.eval_every) * self.data.val_images
        training = run.epochs * self.data.images * max(1 / speed, loading)
        return training / 3600, evaluated * max(_FORWARD / pixels / speed, loading) / 3600


def _of_the_step(planner: _Planner, config: Config, card: Card, base: CardPlan) -> Iterator[Advice]:
    """What makes the step faster on a card, or its batch fit, each by planning with it."""
    for override, why in _candidates(planner, config, card, base):
        try:
            changed = with_overrides(config, *override.split())
            then = planner.planned(changed, card)
            gain, fits = then.images_per_s / base.images_per_s, then.fits and not base.fits
            if not fits and (gain < _HELPS or base.binds == "loader"):  # which a faster step would wait for
                continue
            if changed.train_sizes != config.train_sizes:  # which many models can't take
                built(resolved(changed), planner.data.outputs)
        except EffLoopError:  # this model can't
            continue
        brings = ["the batch fits"] * fits + [f"{gain:.2f} x images/s of the step"]
        brings += [f"up to {then.largest_batch:,} images"] * (then.largest_batch >= _HELPS * base.largest_batch)
        yield Advice(override, why, "; ".join(brings), gain, fits)


def _candidates(planner: _Planner, config: Config, card: Card, base: CardPlan) -> Iterator[tuple[str, str]]:
    """Overrides that may help, and why."""
    assert config.precision is not None
    if not config.precision.mixed and card.capability >= (7, 0):
        yield "amp=true", "tensor cores, and half the bytes"
    grouped = "grouped convolutions" in base.step_s  # which may be slower then; of float32 it isn't known
    if config.precision.mixed and not (config.channels_last or grouped):
        yield "channels_last=true", "convolutions needn't copy their images"
    if not base.fits and not config.model.checkpointing:
        yield "model.checkpointing=true", "computes again what it would keep for the backward pass"
    if not (config.global_batch or config.parallel.virtual):
        images = base.batch * base.accumulate
        most = min(base.largest_batch, images)
        size = next((each for each in range(most, most // 2, -1) if images % each == 0), most)
        count = max(1, round(images / size))
        if (size, count) != (base.batch, base.accumulate):
            yield f"batch_size={size} accumulate={count}", f"updates of {size * count:,} images"
        if base.batch < (
            size := min(base.saturating_batch, planner.data.images // (_UPDATES * planner.gpus * base.accumulate))
        ):
            yield f"batch_size={size}", "larger batches bring little; the learning rate has to fit"
    if not config.progressive and config.epochs > 1 and min(config.size) >= 64:
        half = ImageSize(*(side // 2 for side in config.size)).word
        yield f"progressive=[{half},{config.size.word}]", "half of the epochs at half the size; scores may differ"


def _of_loading(config: Config, base: CardPlan, before: Loading, load: Load) -> Iterator[Advice]:
    """What feeds the GPUs where this machine doesn't."""
    if (cores := math.ceil(base.cores)) > before.cores:
        gain = base.images_per_s / before.images_per_s
        yield Advice(f"{cores:,} cores", f"there are {before.cores}", "they feed the GPUs", gain)
    with suppress(EffLoopError):  # there is a cache, or no room for one
        then = load(with_overrides(config, "data.cache=pixels", f"data.cache_gb={_CACHE_GB}"))
        gain, cores = before.core_s / then.core_s, math.ceil(base.images_per_s * then.core_s)
        if gain >= _HELPS:
            word = "effloop convert payload=raw" if config.data.root else "data.cache=pixels"
            brings = f"{gain:.2f} x images/s of loading; {cores:,} core{'s' * (cores > 1)} feed the GPUs"
            yield Advice(word, "pixels needn't be decoded", brings, gain)

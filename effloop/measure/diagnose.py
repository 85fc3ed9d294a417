"""What holds a run back, and which overrides help: by measuring and trying, or by a short look at its end."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, redirect_stdout, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.filesize import decimal

from effloop.batch import ImageSize
from effloop.config import Config, with_overrides
from effloop.config.overrides import key_of
from effloop.data.augment import augments
from effloop.data.augment.base import RecipeConfig
from effloop.data.engine.base import chosen_engine
from effloop.data.loader import Loader
from effloop.data.remote.location import is_remote, local_name
from effloop.data.source import Cache, DataConfig
from effloop.data.source.splits import open_split
from effloop.data.source.storage.kept import opening_once
from effloop.data.source.view import View
from effloop.errors import PROGRAM, EffLoopError, InterruptedRunError, warn
from effloop.measure.loops import Loop, facts, per_s, process_state_restored
from effloop.measure.measured import (
    LOADING,
    Measured,
    Progress,
    loading_costs,
    measured,
    sample_ids,
    stages,
    verdict,
    workers_of,
)
from effloop.measure.turns import Turn, in_turns, run_command, scratch_folder
from effloop.record.efficiency import Efficiency, Override, Stage, Verdict
from effloop.registry import plugin_words
from effloop.runs.environment import effloop_version
from effloop.system import gpu
from effloop.system.hardware import available_cores, available_memory
from effloop.train.trainer import Trainer

_MOST_WORKERS = 64
_SHORTEST_RUN = 4  # samples that a worker takes at a time, at least, unless engine.run_length is set

_SERIAL = 1.4  # times that workers are slower than their stages, from which on they wait for each other's Python
_LIGHTER = 0.7  # share of augmenting that is left without an operation that is worth naming
_IMAGES = 256  # of a dataset, at least, by which a cache or a conversion is tried
_BUILDING_S = 10.0  # that building both sides of a trial may take, with a copy of the data
_LIMIT = 4  # times the seconds of a trial's turns after which no other begins, as each may take long
_COPY_S, _COPY_BYTES = 5.0, 500_000_000  # that filling a cache, or converting, for a trial may take
_HELPS = 1.03  # gain below which an override isn't listed
_LITTLE_EVALUATION = 0.1  # of training's time, which fewer evaluations should come to


@dataclass(frozen=True)
class Proposal:
    """An override that may help."""

    override: str  # words for the command line, or for `convert`
    why: str  # a few words
    exact: bool = True  # whether the same images are trained on, in the same precision
    copied: int = 0  # bytes of an image in a cache or a conversion, which are made before it is tried
    recipe: Mapping[str, Any] | None = None  # options of `convert`, where it is a conversion
    then: str = ""  # the override for the converted data
    tried: bool = True  # whether it is about the training loop, in which it can be tried


def proposals(found: Measured, bound: str, seconds: float = 0.0) -> Iterator[Proposal]:
    """What may help a run, the most promising first, by its verdict.

    Measurements of its own take so many `seconds` each; 0 leaves out what needs one.
    """
    with suppress(EffLoopError):  # it isn't for this run
        if bound == "evaluation":
            yield from _fewer_evaluations(found)
            if found.starved:  # it loads images, too
                yield from proposals(found, found.slowest, seconds)
        elif bound == "logging":
            every = 10 * found.config.record.log_every
            yield Proposal(f"record.log_every={every}", f"the recorder takes {found.log_s * found.images_per_s:.0%}")
        elif bound in LOADING:
            yield from _more_workers(found)
            yield from _caches(found, bound)
            if bound == "decode":
                yield from _less_decoding(found)
            if bound == "augment":
                yield from _less_augmenting(found, seconds)
            yield from _fewer_threads(found)
        elif bound != "start":
            yield from _faster_steps(found)


def _fewer_evaluations(found: Measured) -> Iterator[Proposal]:
    now = min(found.config.eval_every, found.config.epochs)
    wanted = math.ceil(now * found.evaluation_s / (_LITTLE_EVALUATION * found.epoch_s))
    if (every := min(found.config.epochs, wanted)) > now:
        yield Proposal(f"eval_every={every}", f"evaluation takes {found.evaluation:.0%} of the time", tried=False)


def _more_workers(found: Measured) -> Iterator[Proposal]:
    """As many as there are cores; more where they wait, for a disk, a network or anything else but a core."""
    total, batch = found.loading.total, found.loader.plan.order.batch_per_rank
    engine = "" if found.config.engine.host_batches("cpu") else "engine=threads "
    if found.waits:
        wanted = math.ceil(min(_MOST_WORKERS, found.cores * found.loading.wall_s / max(total.cpu_s, 1e-9)))
        at_once = 2 * -(-batch // _SHORTEST_RUN)  # two batches are loaded at a time, run by run
        why = "loading waits, and not for a core"
        if wanted > at_once and hasattr(found.config.engine, "run_length"):
            yield Proposal(f"{engine}num_workers={min(wanted, 2 * batch)} engine.run_length=1", why)
        if (count := min(wanted, at_once)) > found.workers:
            yield Proposal(f"{engine}num_workers={count}", why)
    elif found.workers < found.cores:
        yield Proposal(f"{engine}num_workers={found.cores}", "cores are idle while images are loaded")
    ideal = max(total.wall_s / max(1, found.workers), total.cpu_s / found.cores)
    threads = chosen_engine(found.config.engine, found.workers).name == "threads"
    if threads and found.workers > 1 and 1 / found.loader_per_s > _SERIAL * ideal:
        yield Proposal("engine=processes", "threads wait for each other's Python; processes don't")


def _caches(found: Measured, bound: str) -> Iterator[Proposal]:
    source, free = found.loader.plan.source, available_memory() // 2
    if found.config.data.cache is not Cache.none or bound not in ("storage", "decode"):
        return
    if bound == "storage":
        what, read, each = "bytes", "read", int(source.fingerprint()["bytes"]) // len(source)
    else:
        what, read, each = "pixels", "decoded", _pixel_bytes(found)
    if (needed := each * len(source)) < free:
        why = f"{read} once; {decimal(needed)} of the {decimal(free)} that it may take"
        yield Proposal(f"data.cache={what}", why, copied=each)


def _pixel_bytes(found: Measured) -> int:
    """Of a decoded image, on average."""
    sizes = _sizes(found)
    return 3 * sum(height * width for height, width in sizes) // len(sizes)


def _sizes(found: Measured) -> list[tuple[int, int]]:
    """Height and width of some images."""
    plan = found.loader.plan
    return [plan.decoder.size(plan.source.read(index)) for index in sample_ids(plan, 32).tolist()]


def _less_decoding(found: Measured) -> Iterator[Proposal]:
    """The images stored smaller, or as pixels; another decoder, and what this one can leave out."""
    config, root = found.config, found.config.data.root
    if root:
        longest, side = max(map(max, _sizes(found))), 2 * max(found.loader.plan.augment.size)
        recipes: dict[str, dict[str, Any]] = {"raw": {"payload": "raw"}}
        if longest > 1.2 * side:
            recipes[f"{side}-q90"] = {"max_side": (side,), "quality": 90}
        for tail, recipe in recipes.items():
            path = Path(local_name(root) if is_remote(root) else root)
            words = " ".join(f"{key}={value[0] if key == 'max_side' else value}" for key, value in recipe.items())
            copy = path.with_name(f"{path.name}-{tail}.effloop")
            then = f"data.root={copy if os.access(path.parent, os.W_OK) else copy.name}"
            each, exact = _pixel_bytes(found), tail == "raw"
            yield Proposal(f"convert {words}", "less to decode", exact, copied=each, recipe=recipe, then=then)
    if config.decode.name in ("pillow", "opencv"):
        yield Proposal("decode=auto", "decodes faster")
    if not config.decode.region:
        yield Proposal("decode.region=true", "decodes what the crop needs")
    if not config.decode.dct_scaling:
        yield Proposal("decode.dct_scaling=true", "decodes at a smaller size", exact=False)


def _less_augmenting(found: Measured, seconds: float) -> Iterator[Proposal]:
    """The recipe without its most expensive operation, by a faster library, or on the GPU."""
    config, cost = found.config.augment, found.loading.augment
    if found.waits:
        return  # more workers wait at the same time
    if isinstance(config, RecipeConfig) and seconds:
        plan, left = found.loader.plan, []
        sizes = np.array(_sizes(found))
        for label in config.order or list(config.ops):
            with suppress(EffLoopError, ValueError):  # the images aren't of one size without it
                changed = with_overrides(found.config, f"augment.ops.{label}=null")
                less = augments.build_for(changed.data.channels, changed.augment, size=changed.size, train=True)
                less.check(sizes)
                costs = loading_costs(replace(plan, augment=less), seconds, most=found.loading.images)
                left.append((costs.augment.wall_s, label))
        if left and min(left)[0] < _LIGHTER * cost.wall_s:
            rest, label = min(left)
            why = f"the operation '{label}' takes {1 - rest / cost.wall_s:.0%} of augmenting"
            yield Proposal(f"augment.ops.{label}=null", why, exact=False)
    if not config.name.startswith("native"):
        yield Proposal("augment=native", "operations that are faster", exact=False)
    if config.name == "native" and found.device.type == "cuda":
        yield Proposal("augment.device=gpu", "whole batches at once, on the GPU", exact=False)


def _fewer_threads(found: Measured) -> Iterator[Proposal]:
    """Of torch, where they take cores from those that load: an operation waits for the slowest of its own threads."""
    cores = available_cores()
    crowded = found.workers and not found.waits and torch.get_num_threads() >= cores > 1
    if found.device.type == "cpu" and crowded:
        yield Proposal(f"threads={max(1, cores // 2)}", "leaves cores to those that load")


def _faster_steps(found: Measured) -> Iterator[Proposal]:
    config = found.config
    assert config.precision is not None
    if config.model.checkpointing:
        yield Proposal("model.checkpointing=false", "keeps what it computes")
    if not config.precision.mixed:
        yield Proposal("precision=bf16", "a faster step", exact=False)
    if min(config.size) >= 64 and config.epochs > 1:
        half = ImageSize(*(max(1, side // 2) for side in config.size)).word
        progressive = f"progressive=[{half},{config.size.word}]"
        yield Proposal(progressive, "half of the epochs at half the size", exact=False)
    if not config.channels_last:
        yield Proposal("channels_last=true", "a faster step")
    if config.deterministic:
        yield Proposal("deterministic=false", "a faster step")
    if config.optim.ema:
        yield Proposal("optim.ema=0", "no average of the weights", exact=False)
    yield from _fewer_threads(found)


def tried(
    found: Measured,
    offered: Sequence[Proposal],
    command: Sequence[str],
    rounds: int,
    seconds: float,
    progress: Progress,
) -> tuple[list[Override], list[str]]:
    """What helps, the best first: each trains in turns with the run as it is, in this process.

    `rounds` turns of so many `seconds`, after one to warm up, or as many as there is time for where updates take long;
    what can't be tried is left out, and what there was no time for is returned beside.
    """
    rows, late = [], list[str]()
    end = time.perf_counter() + len(offered) * (_BUILDING_S + _LIMIT * (rounds + 1) * seconds)
    with scratch_folder("") as scratch, process_state_restored(), ExitStack() as stack:
        usual: dict[int | None, Loop] = {}
        for each in offered:
            row = Override(each.override, each.why, each.exact, commands=commands(each, command))
            if not each.tried:
                rows.append(row)
                continue
            if time.perf_counter() > end:
                late.append(each.override)
                continue
            progress(f"trying {each.override}")
            images = _images(found, each)
            try:
                if images not in usual:
                    usual[images] = stack.enter_context(closing(Loop(found.config, scratch, images=images)))
                before, rate = _rates(found, each, usual[images], images, scratch, rounds, seconds)
            except InterruptedRunError:
                raise
            except EffLoopError:  # a package is missing, a size is too small
                continue
            if rate >= _HELPS * before:
                why = each.why + f"; tried on {images} of the images" * bool(images)
                rows.append(replace(row, why=why, before=before, images_per_s=rate, gain=rate / before))
    return sorted(rows, key=lambda row: -(row.gain or math.inf)), late


def _images(found: Measured, each: Proposal) -> int | None:
    """How many images a proposal is tried on; None is all of them."""
    if not each.copied:
        return None
    most = min(_COPY_S * found.loader_per_s, _COPY_BYTES / each.copied)
    images = max(_IMAGES, 4 * found.config.batch_size, int(most))
    return images if images < found.loader.plan.order.num_samples else None


_SPLITS = ("val", "folds", "fold", "group", "exclude")


def _rates(
    found: Measured, each: Proposal, usual: Loop, images: int | None, scratch: Path, rounds: int, seconds: float
) -> tuple[float, float]:
    """Images/s without and with a proposal."""
    words = shlex.split(each.override)
    if each.recipe:
        copy = Path(mkdtemp(dir=scratch)) / "converted.effloop"
        _convert(found.config, each.recipe, usual, copy, images)
        words = ["data=auto", f"data.root={copy}", "data.val_split=val"]
        words += [f"data.{key}=null" for key in _SPLITS]  # it has both
        images = None
    fast = found.step_s * found.config.batch_size * found.config.accumulate < seconds  # else an update says it all
    with closing(Loop(with_overrides(found.config, *words), scratch, images=images)) as changed:
        sides, end = (partial(usual.turn, seconds), partial(changed.turn, seconds)), time.perf_counter()
        end += _LIMIT * (rounds + 1) * seconds

        def over(turns: Mapping[str, list[Turn]]) -> bool:
            return len(turns["with"]) >= rounds or time.perf_counter() > end

        turns = in_turns({"without": sides[0], "with": sides[1]}, over, warm_up=int(fast))
    return median(per_s(turns["without"])), median(per_s(turns["with"]))


def _convert(config: Config, recipe: Mapping[str, Any], usual: Loop, out: Path, images: int | None) -> None:
    """Write the first images of both splits, re-encoded; what `convert` prints is left out."""
    from effloop.convert.convert import ConvertOptions, convert

    opened = {split: open_split(config.data, split) for split in ("train", "val")}
    splits = {split: View(source, np.arange(len(source))[:images]) for split, source in opened.items()}
    with redirect_stdout(StringIO()):
        options = ConvertOptions("memmap", out, **recipe)
        convert(options, splits, usual.loader.plan.decoder, available_cores())


def commands(proposal: Proposal, words: Sequence[str]) -> list[str]:
    """What to type for a proposal."""
    if not proposal.then:
        return [run_command(words, shlex.split(proposal.override))]
    of_any = {field.name for field in fields(DataConfig)} - {*_SPLITS, "root", "train_split", "val_split"}
    data = [word for word in words if key_of(word).partition(".")[0] == "data"]  # holds for the original data
    rest = [word for word in words if word not in data or key_of(word).partition(".")[2] in of_any]
    decode = [word for word in words if key_of(word).partition(".")[0] == "decode"]
    out = f"out={proposal.then.partition('=')[2]}"
    convert = shlex.join(["convert", *data, *decode, *plugin_words(), "to=memmap", out])
    return [
        f"{PROGRAM} {convert} {proposal.override.removeprefix('convert ')}",
        run_command(rest, ["data=auto", proposal.then]),
    ]


_BUSY = 0.1  # share of loading in which other programs have the cores from which the figures are doubtful

_STAGES = ("storage", "decode", "augment", "batch", "step", "loop")  # what is known of a run at its end

_WAITS = 0.10  # share of waiting from which loading is what holds a run back, and an override is named


def review(config: Config, trainer: Trainer, efficiency: Efficiency) -> Mapping[str, Any]:
    """`stages`, `verdict` and `override` of a run that has ended.

    Loading is measured on some images, now that the machine is free; for so short a time that it doesn't count.
    """
    loader = trainer.train
    # An engine that isn't exact has decoders of its own, which can't be measured apart.
    if not isinstance(loader, Loader) or not efficiency.steady_images_per_s or not loader.engine.exact:
        return {}
    try:
        found = _measured_at_end(config, trainer, loader, efficiency)
        held, best = verdict(found), None
        if efficiency.wait > _WAITS or held.bound == "evaluation":
            helps = next((each for each in proposals(found, held.bound) if each.exact), None)
            best = helps and Override(helps.override, helps.why)
        known = [each for each in stages(found) if each.name in _STAGES]
        return {"stages": known, "verdict": held, "override": best}
    except KeyboardInterrupt:  # the run is done, and its summary is still to be written: also below
        return {}
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        warn(f"what held the run back is unknown: {type(error).__name__}: {reason}; its results are complete")
        return {}


def _measured_at_end(config: Config, trainer: Trainer, loader: Loader, efficiency: Efficiency) -> Measured:
    seconds = min(2.0, 0.005 * sum(efficiency.seconds.values()))
    costs = loading_costs(loader.plan, seconds, at_once=4)
    ranks, workers = trainer.parallel.world_size, workers_of(config, loader)
    cores = max(1, available_cores() // trainer.parallel.sharing)
    rate = efficiency.steady_images_per_s / ranks
    ideal_s = max(costs.total.wall_s / max(1, workers), costs.total.cpu_s / cores)
    val_samples = len(trainer.val.plan.source) if isinstance(trainer.val, Loader) else 0
    evaluations = -(-trainer.progress.epoch // config.eval_every)
    evaluation_s = efficiency.seconds["evaluation"]
    return Measured(
        config=config,
        loader=loader,
        device=trainer.parallel.device,
        ranks=ranks,
        cores=cores,
        workers=workers,
        samples=len(loader) * loader.plan.order.batch_per_rank,
        val_samples=val_samples,
        loading=costs,
        loader_per_s=1 / ideal_s,
        step_s=(1 - efficiency.wait) / rate,
        images_per_s=rate,
        wait=efficiency.wait,
        starved=efficiency.wait > _WAITS,
        evaluation_per_s=val_samples * evaluations / evaluation_s if evaluation_s else 0.0,
    )


def _findings(found: Measured, config: Config, bound: str, late: Sequence[str] = ()) -> list[str]:
    """Lines about what an override doesn't help with."""
    lines = []
    if (busy := found.loading.queued_s / max(found.loading.total.wall_s, 1e-9)) > _BUSY:
        lines.append(
            f"loading waited for a core for {busy:.0%} of its time, as other programs used them: all figures are of a "
            "busy machine; end them and measure again"
        )
    for (file, line, function, what), count in found.syncs.items():
        times = f"{count} times" if count > 1 else "once"
        lines.append(
            f"{os.path.relpath(file)}:{line} ({function}) waits for the device {times} in each update, by {what}: "
            "on a GPU until all its work is done; keep values on the device, read them every few updates, and copy to "
            "it from pinned memory with non_blocking=True"
        )
    if bound == "compute" and not found.config.compile:
        lines.append(f"compile=true may make the step faster: {PROGRAM} bench what=step knobs=compile measures it")
    if config.parallel.name != "none":
        lines.append(f"measured without parallel={config.parallel.name}, in one process: ranks share cores and storage")
    if len(config.progressive) > 1:
        lines.append(f"measured at image_size={config.size.word} throughout, without progressive")
    if late:
        seconds = found.config.batch_size * found.config.accumulate / found.images_per_s
        lines.append(f"there was no time to try {', '.join(late)}: an update takes {seconds:.1f} s")
    return lines


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result, as `diagnosis.json` has it."""

    version: str  # of EffLoop
    date: str
    command: str  # as it was typed
    machine: Mapping[str, Any]  # what the figures depend on
    data: str
    run: Mapping[str, Any]
    images_per_s: float  # this and the next four as of `Measured`
    wait: float
    stages: Sequence[Stage]
    evaluation: float
    verdict: Verdict
    findings: Sequence[str]  # lines about what an override doesn't help with
    overrides: Sequence[Override]  # what helps, tried, the best first
    memory: Mapping[str, Any]  # what the run takes, as `Memory.to_plain` has it

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"what": "diagnosis", **asdict(self)}


@opening_once()
def diagnose(config: Config, command: Sequence[str], seconds: float, *, top: int, rounds: int) -> Diagnosis:
    """Measure a run for about so many seconds, find what holds it back, and try the `top` overrides that may help."""
    with Console(stderr=True).status("") as status:

        def progress(what: str) -> None:
            status.update(f"measuring: {what}")

        with measured(config, seconds, progress) as found:
            held = verdict(found)
            progress("what may help")
            offered = list(proposals(found, held.bound, seconds / 50))[:top]
            found.loader.close()  # its workers would take turns with those that are tried
            overrides, late = tried(found, offered, command, rounds, min(1.0, max(0.2, seconds / 10)), progress)
        precision = found.config.precision
        assert precision is not None
        return Diagnosis(
            version=effloop_version(),
            date=time.strftime("%Y-%m-%d %H:%M"),
            command=f"{PROGRAM} {shlex.join(['diagnose', *command, *plugin_words()])}",
            machine={"cores": found.cores, "device": gpu.name(found.device)},
            data=found.loader.describe(),
            run=facts(found.config) | {"num_workers": found.workers, "precision": precision.name},
            images_per_s=found.images_per_s,
            wait=found.wait,
            stages=stages(found),
            evaluation=found.evaluation,
            verdict=held,
            findings=_findings(found, config, held.bound, late),
            overrides=overrides,
            memory=found.memory,
        )

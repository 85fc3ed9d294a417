"""Advice before a run starts: one line for each setting that costs speed, memory or accuracy without need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from effloop.config import Config
from effloop.data.loader import Loader
from effloop.data.source import Tail
from effloop.measure.memory import Memory, expected_memory
from effloop.model import Probe
from effloop.model.probe import takes_statistics
from effloop.parallel import Parallel
from effloop.precision import Precision
from effloop.system.hardware import available_cores

_TILE = 8
"""16-bit numbers in 16 bytes, of which NVIDIA wants the dimensions of a matrix product to be multiples. Since cuBLAS 11
and cuDNN 7.6.3 other sizes run on tensor cores, too, but are padded or take slower kernels."""

_MIN_NORM_IMAGES = 16
"""Images that BatchNorm's statistics should be computed from, at least. ResNet-50's error on ImageNet was 23.6 %
with 32 on a GPU, 23.7 with 16, 24.8 with 8 and 27.3 with 4 (Wu and He, "Group Normalization", 2018)."""

_MIN_TAIL = 0.05
"""Share of the samples, or of the batches, from which a tail is worth a line. Each epoch drops different ones, and
almost every data set has a tail: 11 of the 1,515 embedded photographs, in batches of 32."""

_FEW_UPDATES, _MANY_UPDATES = 25, 100
"""Updates of a whole run that are worth a line if there are fewer, and how many that line leads to. Fine-tuned on 200
photographs of 10 classes by AdamW, model=efficientnet_lite0 had a top-1 of 33 % after 13 updates, 54 after 26, 66 after
39 and 67 after 65; from random weights it takes more. The EMA is no reason: its decay grows with the updates, and after
10 of them it holds 0.001 % of the first weights."""

_MAX_NAMES = 5  # layers or parameters that a line names, at most

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known about a run beside its config."""

    device: str  # type of the device: cpu or cuda
    mixed: bool  # whether matrix products are computed in 16 bits
    cores: int  # that this rank may use
    sharing: int  # ranks that share them, this one included
    torch_threads: int  # threads of one torch operation, in each rank
    world_size: int
    probe: Probe  # what a forward and backward pass has shown of the model
    parameters: int  # of the model, frozen ones included
    batch_norms: int  # layers that normalise by statistics of the batch
    samples: int  # of the training split
    memory: Memory


def facts_of(
    config: Config, model: nn.Module, probe: Probe, loaders: Sequence[Loader], parallel: Parallel, precision: Precision
) -> RunFacts:
    """The facts of a run whose parts are built; the first loader is that of the training split."""
    norms = (each for each in model.modules() if isinstance(each, _BATCH_NORMS) and takes_statistics(each))
    return RunFacts(
        device=parallel.device.type,
        mixed=precision.dtype is not None,
        cores=available_cores(),
        sharing=parallel.sharing,
        torch_threads=torch.get_num_threads(),
        world_size=parallel.world_size,
        probe=probe,
        parameters=sum(each.numel() for each in model.parameters()),
        batch_norms=sum(1 for _ in norms),
        samples=loaders[0].plan.order.num_samples,
        memory=expected_memory(config, model, probe, loaders, parallel),
    )


def advise(config: Config, *parts: Any) -> list[str]:
    """What memory a run whose parts are built will take, and advice; arguments as of `facts_of`."""
    facts = facts_of(config, *parts)
    return [facts.memory.line(), *advice(config, facts)]


def advice(config: Config, facts: RunFacts) -> list[str]:
    """Lines with what, got and what to set; none where all is well."""
    return [line for check in CHECKS for line in check(config, facts)]


def _check_gpu(config: Config, facts: RunFacts) -> Iterator[str]:
    """Sizes that leave tensor cores partly idle, and what determinism costs.

    `image_size` isn't one: a convolution's product has N x H x W rows, a multiple of 8 for every H and W if N is one.
    """
    if facts.device != "cuda":
        return
    if config.deterministic:
        yield (
            "deterministic: true keeps cuDNN from benchmarking its algorithms, and from some of the fastest; "
            "set deterministic=false unless results must be bit-identical"
        )
    if not facts.mixed or config.precision is None:
        return
    why = f"a multiple of {_TILE}, as tensor cores need it under precision={config.precision.name}"
    if config.batch_size % _TILE:
        yield f"batch_size: {config.batch_size} is not {why}; set batch_size={_round_to_tile(config.batch_size)}"
    odd = facts.probe.odd_widths
    if odd:
        width = getattr(config.model, "width", _TILE)
        fix = f"set model.width={_round_to_tile(width)}" if width % _TILE else "choose a model of such widths"
        yield f"model: {_count_and_names(odd, 3, 'layer has', 'layers have')} a width that is not {why}; {fix}"


def _round_to_tile(size: int) -> int:
    """The nearest multiple of 8; the larger one of two."""
    return max(_TILE, (size + _TILE // 2) // _TILE * _TILE)


def _check_model(config: Config, facts: RunFacts) -> Iterator[str]:
    """Parameters without effect, unused or frozen."""
    biases, unused, frozen = facts.probe.biases_before_norm, facts.probe.unused, facts.probe.frozen
    if biases and not hasattr(config.model, "arch"):  # a library's model is as it is
        yield (
            f"model: {_count_and_names(biases, _MAX_NAMES, 'layer has', 'layers have')} a bias that the norm after it "
            "cancels; with bias=False the model learns the same, without a sum over all pixels for the bias's gradient"
        )
    if unused:
        cost = ", and parallel=ddp searches for them in every step" if facts.world_size > 1 else ""
        names = f"[{','.join(unused)}]" if len(unused) <= _MAX_NAMES else "their names"
        yield (
            f"model: {_count_and_names(unused, _MAX_NAMES, 'parameter is', 'parameters are')} not used by the model, "
            f"so they aren't trained{cost}; remove them, or set model.freeze to {names}"
        )
    if frozen and not config.probe:
        fix = "; set model.freeze=[] to train them" if config.model.freeze else ", as the model was built"
        share = f"{100 * frozen / facts.parameters:.1f} %"
        yield f"model: {frozen:,} of {facts.parameters:,} parameters ({share}) are frozen and stay as they are{fix}"


def _check_tail(config: Config, facts: RunFacts) -> Iterator[str]:
    """Samples of an epoch that aren't trained on; updates in the whole run, too few to learn much."""
    virtual, samples = config.parallel.virtual, facts.samples
    ranks, group = (virtual, 1) if virtual else (facts.world_size, config.accumulate)
    size = config.batch_size * ranks
    tail = samples % size
    if config.data.tail is Tail.drop and tail >= _MIN_TAIL * samples:
        step = 1 if config.batch_size % _TILE else _TILE  # keep a size that suits tensor cores
        near = range(-(-config.batch_size * 3 // 4 // step) * step, config.batch_size * 5 // 4 + 1, step)
        whole = [each for each in near if each and samples % (each * ranks) == 0]
        nearest = sorted(whole, key=lambda each: abs(each - config.batch_size))[: not config.global_batch]
        yield (
            f"data.tail: drop skips {tail} of {samples:,} images ({100 * tail / samples:.1f} %) each epoch "
            f"(a different subset each time); set data.tail=wrap, which takes {size - tail} images twice"
            + "".join(f", or batch_size={other}" for other in nearest)
        )
    batches = samples // size if config.data.tail is Tail.drop else -(-samples // size)
    rest = batches % group
    if rest >= _MIN_TAIL * batches:
        most = max(number for number in range(1, config.accumulate) if batches % number == 0)
        yield (
            f"accumulate: {config.accumulate} leaves the last {rest} of {batches} batches of each epoch without an "
            f"update; set {f'global_batch={most * size}' if config.global_batch else f'accumulate={most}'}, or another "
            "batch_size"
        )
    each = max(1, batches // group * max(1, config.probe))
    if (updates := each * config.epochs) < _FEW_UPDATES:
        wanted = -(-_MANY_UPDATES // each)
        epochs = next(number for number in (5, 10, 20, 50, 100) if number >= wanted)
        yield (
            f"epochs: {updates} update{'s' * (updates > 1)} of the weights in all, {each} an epoch, are too few to "
            f"learn much; set epochs={epochs} or more"
        )


def _check_threads(config: Config, facts: RunFacts) -> Iterator[str]:
    """More threads than cores: they take turns, and an operation waits for the slowest of its threads."""
    cores, ranks = facts.cores, facts.sharing
    there = f"{cores} core{'s' * (cores > 1)} that this run may use"
    each, share = f" in each of {ranks} ranks" * (ranks > 1), max(1, cores // ranks)
    if ranks > cores:
        yield f"parallel: {ranks} ranks on {cores} cores take turns; start {cores} at most (parallel.processes={cores})"
        return
    chosen = isinstance(config.num_workers, str) or getattr(config, "tuned", False)
    workers = config.num_workers if isinstance(config.num_workers, int) and not chosen else 0
    if workers * ranks > cores:
        yield (
            f"num_workers: {workers}{each} are more than the {there}, which helps only where loading waits, for a disk "
            f"or a network; else set num_workers={share}, or auto"
        )
    if facts.device == "cpu" and facts.torch_threads * ranks > cores:
        yield (
            f"threads: torch computes on {facts.torch_threads} threads{each}, more than the {there}, "
            f"and they wait for each other; set threads={share}"
        )


def _check_batch_norm(config: Config, facts: RunFacts) -> Iterator[str]:
    """BatchNorm's statistics of few images, or of fewer than an update has."""
    if not facts.batch_norms:
        return
    synced = config.parallel.syncs_batch_norm
    images = config.batch_size * (facts.world_size if synced else 1)
    if facts.world_size > 1 and images < _MIN_NORM_IMAGES:
        cost = (
            ""
            if synced or config.parallel.virtual
            else "parallel.sync_batchnorm=true, which waits for all ranks in each of its layers, or "
        )
        size = -(-_MIN_NORM_IMAGES // (facts.world_size if synced else 1))
        yield f"batch_size: BatchNorm's statistics are of {images} images only; set {cost}batch_size={size}"
    if config.accumulate > 1 and not config.parallel.virtual:
        yield (
            f"accumulate: BatchNorm's statistics are of {images} images, fewer than an update has, so training "
            f"differs from batch_size={config.batch_size * config.accumulate}"
            f"{'' if config.global_batch else ' accumulate=1'}; prefer that where it fits"
        )


def _count_and_names(names: Sequence[str], most: int, one: str, several: str) -> str:
    """`2 layers have (a, b)`, with three dots for names that are left out."""
    some = [*names[:most], *["..."] * (len(names) > most)]
    return f"{len(names)} {one if len(names) == 1 else several} ({', '.join(some)})"


CHECKS = (
    _check_gpu,
    _check_model,
    _check_tail,
    _check_threads,
    lambda config, facts: facts.memory.warnings(config),
    _check_batch_norm,
)

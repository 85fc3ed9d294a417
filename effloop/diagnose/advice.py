"""What somebody who knows such runs would say of this one before it starts: one line each, only where it is true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.filesize import decimal
from torch import nn

from effloop.config import Config
from effloop.data.loader import Loader
from effloop.data.source import Tail
from effloop.model import Probe
from effloop.model.probe import takes_statistics
from effloop.parallel import Parallel
from effloop.precision import Precision
from effloop.system.hardware import available_cores, available_memory

_TILE = 8
"""Numbers of 16 bits in the 16 bytes that NVIDIA asks a product's dimensions to be multiples of. Since cuBLAS 11 and
cuDNN 7.6.3 others run on tensor cores, too, but pad or take slower kernels."""

_FEW = 16
"""Images that BatchNorm's statistics should be of, at least. ResNet-50's error on ImageNet was 23.6 % with 32 on a
GPU, 23.7 with 16, 24.8 with 8 and 27.3 with 4 (Wu and He, "Group Normalization", 2018)."""

_TAIL = 0.01
"""Share of the samples from which on a tail is worth a line. It is of other samples in every epoch, and almost every
set has one: 11 of the 1,515 photographs that ship with EffLoop, in batches of 32."""

_NAMES = 5
"""Layers or parameters that a line names, at most."""

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run beside its config.

    Attributes:
        device: type of the device: cpu or cuda.
        mixed: whether products are computed in 16 bits.
        cores: what this rank may use, together with those that share them.
        sharing: ranks that do, itself included.
        torch_threads: on how many threads torch computes one operation, in each rank.
        world_size, local_world_size: ranks, and ranks on this machine.
        probe: of the model.
        parameters: numbers in the model, frozen or not.
        batch_norms: layers whose statistics are those of the batch.
        samples: of the training split.
        slot_bytes: of one batch on the host in each split's ring, together.
        free_memory: bytes that this machine has for all of it.
    """

    device: str
    mixed: bool
    cores: int
    sharing: int
    torch_threads: int
    world_size: int
    local_world_size: int
    probe: Probe
    parameters: int
    batch_norms: int
    samples: int
    slot_bytes: int
    free_memory: int

    @classmethod
    def of(
        cls, model: nn.Module, probe: Probe, loaders: Sequence[Loader], parallel: Parallel, precision: Precision
    ) -> Facts:
        """What is known once the parts are built.

        Args:
            model: frozen where it is to be.
            probe: of this model.
            loaders: of the training split, and of the others that load in the same run.
            parallel: how many ranks there are.
            precision: of the training step.
        """
        return cls(
            device=parallel.device.type,
            mixed=precision.dtype is not None,
            cores=available_cores(),
            sharing=parallel.sharing,
            torch_threads=torch.get_num_threads(),
            world_size=parallel.world_size,
            local_world_size=parallel.local_world_size,
            probe=probe,
            parameters=sum(each.numel() for each in model.parameters()),
            batch_norms=sum(
                isinstance(module, _BATCH_NORMS) and takes_statistics(module) for module in model.modules()
            ),
            samples=loaders[0].plan.order.num_samples,
            # Of what the host makes: with augment.device=gpu it may be larger than image_size.
            slot_bytes=sum(each.plan.order.batch_per_rank * each.plan.augment.size**2 * 3 for each in loaders),
            free_memory=available_memory(),
        )


def advise(
    config: Config,
    model: nn.Module,
    probe: Probe,
    loaders: Sequence[Loader],
    parallel: Parallel,
    precision: Precision,
) -> list[str]:
    """What `hints` says of a run whose parts are built; arguments as of `Facts.of`."""
    return hints(config, Facts.of(model, probe, loaders, parallel, precision))


def hints(config: Config, facts: Facts) -> list[str]:
    """Lines for people, each of what, got and advice; none where all is well."""
    return [line for look in _LOOKS for line in look(config, facts)]


def _sizes(config: Config, facts: Facts) -> Iterator[str]:
    """Sizes that tensor cores can't fill.

    Not of `image_size`: a convolution's product has N x H x W rows, a multiple of 8 for every H and W if N is one.
    """
    if facts.device != "cuda" or not facts.mixed or config.precision is None:
        return
    why = f"a multiple of {_TILE}, as tensor cores like it under precision={config.precision.name}"
    if config.batch_size % _TILE:
        yield f"batch_size: {config.batch_size} is not {why}; set batch_size={_whole(config.batch_size)}"
    odd = facts.probe.odd_widths
    if odd:
        width = getattr(config.model, "width", _TILE)
        advice = f"set model.width={_whole(width)}" if width % _TILE else "choose a model of such widths"
        yield f"model: {_counted(odd, 3, 'layer has', 'layers have')} a width that is not {why}; {advice}"


def _whole(size: int) -> int:
    """The multiple of 8 next to a size; the larger one of two."""
    return max(_TILE, (size + _TILE // 2) // _TILE * _TILE)


def _model(config: Config, facts: Facts) -> Iterator[str]:
    """Parameters that do nothing."""
    biases, unused, frozen = facts.probe.biases_before_norm, facts.probe.unused, facts.probe.frozen
    if biases:
        yield (
            f"model: {_counted(biases, _NAMES, 'layer has', 'layers have')} a bias that the norm behind takes away "
            "again; with bias=False the model learns the same, without a sum over all pixels for the bias's gradient"
        )
    if unused:
        cost = ", and parallel=ddp looks for such ones in every step" if facts.world_size > 1 else ""
        names = f"[{','.join(unused)}]" if len(unused) <= _NAMES else "their names"
        yield (
            f"model: {_counted(unused, _NAMES, 'parameter is', 'parameters are')} not used by the model, so nothing "
            f"trains them{cost}; take them out of it, or set model.freeze to {names}"
        )
    if frozen:
        advice = "; set model.freeze=[] to train them" if config.model.freeze else ", as the model was made"
        share = f"{100 * frozen / facts.parameters:.1f} %"
        yield f"model: {frozen:,} of {facts.parameters:,} parameters ({share}) are frozen and stay as they are{advice}"


def _tail(config: Config, facts: Facts) -> Iterator[str]:
    """Samples of an epoch that train nothing."""
    size, samples = config.batch_size * facts.world_size, facts.samples
    tail = samples % size
    if config.data.tail is Tail.drop and tail >= _TAIL * samples:
        yield (
            f"data.tail: drop leaves {tail} of {samples:,} images ({100 * tail / samples:.1f} %) out of each epoch, "
            f"others every time; set data.tail=wrap, which takes {size - tail} images twice"
            + "".join(f", or batch_size={other}" for other in _without_tail(config.batch_size, samples, facts))
        )
    batches = samples // size if config.data.tail is Tail.drop else -(-samples // size)
    rest = batches % config.accumulate
    if rest >= _TAIL * batches:
        whole = max(number for number in range(1, config.accumulate) if batches % number == 0)
        yield (
            f"accumulate: {config.accumulate} leaves the last {rest} of {batches} batches of each epoch without an "
            f"update, computed for nothing; set accumulate={whole}, or another batch_size"
        )


def _without_tail(batch_size: int, samples: int, facts: Facts) -> list[int]:
    """The next batch size, if there is one within a quarter, that goes into an epoch without a rest."""
    step = 1 if batch_size % _TILE else _TILE  # a size that suits tensor cores stays one
    near = range(-(-batch_size * 3 // 4 // step) * step, batch_size * 5 // 4 + 1, step)
    whole = [size for size in near if size and samples % (size * facts.world_size) == 0]
    return sorted(whole, key=lambda size: abs(size - batch_size))[:1]


def _threads(config: Config, facts: Facts) -> Iterator[str]:
    """More threads than cores: they take turns, and those of one operation wait for the last of them."""
    cores, ranks = facts.cores, facts.sharing
    each, share = f" in each of {ranks} ranks" * (ranks > 1), max(1, cores // ranks)
    if ranks > cores:
        yield f"parallel: {ranks} ranks on {cores} cores take turns; start {cores} at most (parallel.processes={cores})"
        return
    workers = 0 if isinstance(config.num_workers, str) else config.num_workers  # auto takes as many as there are cores
    if workers * ranks > cores:
        yield f"num_workers: {workers}{each} are more than the {_cores(cores)}; set num_workers={share}, or auto"
    if facts.device == "cpu" and facts.torch_threads * ranks > cores:
        yield (
            f"OMP_NUM_THREADS: torch computes on {facts.torch_threads} threads{each}, more than the {_cores(cores)}, "
            f"and they wait for each other; set OMP_NUM_THREADS={share} in the environment"
        )


def _cores(count: int) -> str:
    return f"{count} core{'s' * (count > 1)} that this run may use"


def _ring(config: Config, facts: Facts) -> Iterator[str]:
    """Batches under way that the memory can't hold beside all else.

    An engine has `prefetch` slots filled or being filled, the loop has one, and one is on its way to the device.
    """
    gpu_decodes = config.engine.name == "dali" and facts.device == "cuda"  # and keeps its batches there
    if config.engine.name == "inline" or config.num_workers == 0 or gpu_decodes:
        return  # nothing is filled ahead
    slots, ranks, half = config.engine.prefetch + 2, facts.local_world_size, facts.free_memory // 2
    needed = slots * facts.slot_bytes * ranks
    if needed <= half:
        return
    shorter = " or engine.prefetch=1" * (3 * needed <= slots * half)
    each = f" in each of {ranks} ranks" * (ranks > 1)
    yield (
        f"batch_size: {config.batch_size} makes a ring of {slots} batches for each split{each}, {decimal(needed)} of "
        f"the {decimal(facts.free_memory)} that are free, and the machine may swap or end the run; "
        f"set batch_size={max(1, config.batch_size * half // needed)}{shorter}"
    )


def _batch_norm(config: Config, facts: Facts) -> Iterator[str]:
    """Statistics of fewer images than an update has."""
    if not facts.batch_norms:
        return
    synced = getattr(config.parallel, "sync_batchnorm", False)
    images = config.batch_size * (facts.world_size if synced else 1)
    if facts.world_size > 1 and images < _FEW:
        cost = "" if synced else "parallel.sync_batchnorm=true, which waits for all ranks in each of its layers, or "
        size = -(-_FEW // (facts.world_size if synced else 1))
        yield f"batch_size: BatchNorm's statistics are of {images} images only; set {cost}batch_size={size}"
    if config.accumulate > 1:
        yield (
            f"accumulate: BatchNorm's statistics are of {images} images, fewer than an update has, so this trains "
            f"otherwise than batch_size={config.batch_size * config.accumulate} accumulate=1; take that where it fits"
        )


def _deterministic(config: Config, facts: Facts) -> Iterator[str]:
    """What the same bits every time cost; on a CPU nothing that could be measured."""
    if config.deterministic and facts.device == "cuda":
        yield (
            "deterministic: true keeps cuDNN from trying its algorithms, and from some of its fastest; "
            "set deterministic=false if other bits will do"
        )


def _counted(names: Sequence[str], most: int, one: str, several: str) -> str:
    """`2 layers have (a, b)`, and three dots for what is left out."""
    some = [*names[:most], *["..."] * (len(names) > most)]
    return f"{len(names)} {one if len(names) == 1 else several} ({', '.join(some)})"


_LOOKS = (_sizes, _model, _tail, _threads, _ring, _batch_norm, _deterministic)

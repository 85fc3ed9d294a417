"""The base class of parallel strategies, which is one process on one device; and a process's slice of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from effloop.batch import Batch
from effloop.parallel.rank_env import detect_launcher
from effloop.registry import PartConfig, Registry

T = TypeVar("T")

parallels: Registry[Parallel] = Registry("parallel", {"ddp": "effloop.parallel.ddp", "dp": "effloop.parallel.dp"})


@dataclass
class ParallelConfig(PartConfig):
    """The base class of strategies' fields; there are no common ones.

    Attributes:
        of_ranks: whether it runs in several processes, which have to be started first.
        replicates: whether it copies the model in every step, which isn't possible for a compiled one.
    """

    of_ranks: ClassVar[bool] = False
    replicates: ClassVar[bool] = False

    @property
    def syncs_batch_norm(self) -> bool:
        """Whether BatchNorm's statistics are computed over the images of all ranks."""
        return False


@parallels.register("none", ParallelConfig)
class Parallel:
    """One process on one device.

    Strategies are subclasses: which rank this process is, and the operations that ranks do together.

    Attributes:
        rank, world_size: this rank's number, counted from 0, and the number of ranks.
        local_world_size: number of ranks on this machine.
        device: this rank's device.
    """

    rank = 0
    world_size = 1
    local_world_size = 1

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        del config
        self.device = device

    @property
    def sharing(self) -> int:
        """Number of ranks that share this rank's cores, itself included: all local ones, unless they are bound."""
        return self.local_world_size

    def wrap(self, model: nn.Module) -> nn.Module:
        """Prepare a model that has its initial weights; optimizer, EMA, training step and checkpoints get the result.

        A strategy may replace modules and parameters here, as `fully_shard` does. Names have to stay as they are, and
        so has what `state_dict` returns, on every rank.
        """
        return model

    def wrap_step(self, step: nn.Module, *, find_unused: bool) -> nn.Module:
        """Wrap a training step around the model that `wrap` has returned.

        Args:
            step: (images, targets, valid) -> (loss (), sums (M,)), as `Step` does.
            find_unused: whether some parameters get no gradient.
        """
        del find_unused
        return step

    def gradients(self, step: nn.Module, *, sync: bool) -> AbstractContextManager[None]:
        """Context of forward and backward; with `sync` False gradients aren't averaged over ranks."""
        del step, sync
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum of `values` over all ranks, on every rank; `values` isn't changed."""
        return values

    def average_buffers(self, model: nn.Module) -> None:
        """Replace floating-point buffers, such as BatchNorm's statistics, by their mean over all ranks."""

    def gather(self, value: T) -> list[T]:
        """Every rank's value (tensors and plain values), by rank, on every rank."""
        return [value]

    def on_rank0(self, call: Callable[[], T]) -> T:
        """Call a function on rank 0 only, and return its result (plain values) on every rank.

        Raises:
            EffLoopError: `call` raised it; it is raised on every rank.
        """
        return call()

    def assert_equal(self, what: str, value: str) -> None:
        """Check that all ranks have the same value.

        Raises:
            ConfigError: they differ; the line has `what`, and the values by rank and machine.
        """

    def agree(self, bits: int) -> int:
        """The bitwise-or of all ranks' `bits` (0 to 255) in the call before this one; of a single rank at once.

        All ranks call it equally often, such as once an update. It waits for no rank and no device: the flags travel
        while the ranks compute what comes next.
        """
        return bits

    def monitored(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches, counted for the watchdog, which finds ranks that hang."""
        return iter(batches)

    def close(self) -> None:
        """Leave the group of ranks."""


@dataclass(frozen=True)
class OwnSlice:
    """A rank's slice of the data, without its strategy; attributes as those of `Parallel`."""

    rank: int
    world_size: int
    sharing: int
    device: torch.device


Slice: TypeAlias = Parallel | OwnSlice  # what loading asks for: `rank`, `world_size`, `sharing`, `device`


def own_slice(device: torch.device) -> OwnSlice:
    """The slice of this process: of its process group, if it has joined one, else as torchrun or Slurm started it.

    Args:
        device: what was asked for; `cuda` becomes the rank's own GPU.

    Raises:
        ConfigError: the launcher's environment variables contradict each other, or one is missing.
    """
    env = detect_launcher()
    rank, world_size = (env.rank, env.world_size) if env else (0, 1)
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    if device.type == "cuda" and device.index is None and world_size > 1:
        local_rank = env.local_rank if env else torch.cuda.current_device()
        device = torch.device("cuda", local_rank % torch.cuda.device_count())  # Slurm may show each rank only its own
    return OwnSlice(rank, world_size, env.local_world_size if env else world_size, device)

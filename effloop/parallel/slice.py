"""This process's slice of the data, as torch.distributed or the launcher has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from effloop.parallel.rank_env import detect_launcher


class Slice(Protocol):
    """What loading asks of a rank; every `Parallel` is one.

    Attributes:
        rank, world_size: its number, counted from 0, and the number of ranks.
        sharing: number of ranks that share this rank's cores, itself included.
        device: of its batches.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def sharing(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True)
class OwnSlice:
    """A slice that needs nothing from other ranks; see `Slice`."""

    rank: int
    world_size: int
    sharing: int
    device: torch.device


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

"""Parallel strategies: one process, DataParallel, or DistributedDataParallel over ranks."""

from effloop.parallel import ddp, dp, single
from effloop.parallel.base import Parallel, ParallelConfig, parallels

__all__ = ["Parallel", "ParallelConfig", "ddp", "dp", "parallels", "single"]

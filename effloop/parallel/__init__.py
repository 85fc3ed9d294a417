"""Parallel strategies: one process, DataParallel, or DistributedDataParallel over ranks."""

from effloop.parallel import ddp, dp
from effloop.parallel import dp as single
from effloop.parallel.base import Parallel, ParallelConfig, parallels
from effloop.parallel.slice import OwnSlice, Slice, own_slice

__all__ = ["OwnSlice", "Parallel", "ParallelConfig", "Slice", "ddp", "dp", "own_slice", "parallels", "single"]

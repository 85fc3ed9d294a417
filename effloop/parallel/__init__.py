"""Parallel strategies: one process, DataParallel, or DistributedDataParallel over ranks."""

from effloop.parallel.base import Parallel, ParallelConfig, parallels
from effloop.parallel.slice import OwnSlice, Slice, own_slice

__all__ = ["OwnSlice", "Parallel", "ParallelConfig", "Slice", "own_slice", "parallels"]

"""Parallel strategies: one process, DataParallel, or DistributedDataParallel over ranks."""

from effloop.parallel.base import OwnSlice, Parallel, ParallelConfig, Slice, own_slice, parallels

__all__ = ["OwnSlice", "Parallel", "ParallelConfig", "Slice", "own_slice", "parallels"]

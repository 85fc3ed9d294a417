"""Memory of batches shared between processes, and its reuse."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from effloop.data.engine.base import Ring, Shape
from effloop.errors import ConfigError
from effloop.lazy import torch
from effloop.system import gpu
from effloop.system.hardware import available_memory

_CELLS = 4096  # numbers in the first 32 KiB


class SharedSlots:
    """Slots of images, (B, H, W, bytes of a pixel) uint8, in an anonymous file, behind a number for each worker.

    The file disappears with the last process that has it open or mapped, however that ends, and isn't limited by the
    size of /dev/shm. Forks share it.
    """

    def __init__(self, shape: Shape) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("engine: processes needs Linux, for memory that processes share; set engine=threads")
        self.shape = shape
        self.num_bytes = math.prod(shape)
        self._stride = _rounded(self.num_bytes)
        self._begin = _rounded(8 * _CELLS)
        self._fd = os.memfd_create("effloop-batches")
        self.close = weakref.finalize(self, os.close, self._fd)
        try:
            os.posix_fallocate(self._fd, 0, self._begin)
        except OSError as error:
            raise self._refused(0, error) from None

    def make(self, number: int) -> NDArray[np.uint8]:
        """Allocate a new slot, and map it."""
        try:  # up front: writing to a page that can't be allocated kills the process
            if self._stride > available_memory():
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            os.posix_fallocate(self._fd, self._begin + number * self._stride, self._stride)
            return self.map(number)
        except OSError as error:
            raise self._refused(number, error) from None

    def _refused(self, number: int, error: OSError) -> ConfigError:
        return ConfigError(
            f"engine: {decimal(self.num_bytes)} of shared memory for a batch can't be allocated, beside {number} "
            f"others: {error.strerror}; set batch_size or engine.prefetch lower, or keep fewer batches"
        )

    def cells(self) -> NDArray[np.int64]:
        """(4096,) int64, shared by all processes: a place for what each worker is loading."""
        region = _mapped(self._fd, 0, self._begin)
        return np.frombuffer(memoryview(region), np.int64, _CELLS)

    def map(self, number: int) -> NDArray[np.uint8]:
        """Map an existing slot, for as long as this array or a view of it exists."""
        region = _mapped(self._fd, self._begin + number * self._stride, self._stride)
        return np.frombuffer(memoryview(region), np.uint8, self.num_bytes).reshape(self.shape)


def _rounded(num_bytes: int) -> int:
    """Up to what a map may begin at."""
    return -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _mapped(fd: int, offset: int, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Map bytes of a file, shared. Before Python 3.13 `mmap.mmap` keeps a file open for each, of 1,024 at most."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    at = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if at == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    region = (ctypes.c_ubyte * size).from_address(at)
    weakref.finalize(region, libc.munmap, at, size).atexit = False  # a tensor may still use it then
    return region


class SharedRing(Ring):
    """`Ring` with shared slots, all of one shape."""

    def __init__(self, slots: SharedSlots, device: torch.device) -> None:
        super().__init__(device)
        self.slots = slots

    def make(self, shape: Shape, number: int) -> NDArray[np.uint8]:
        made = self.slots.make(number)
        if self.device.type == "cuda":
            gpu.page_lock(made, self.device)  # until before it is unmapped
        return made

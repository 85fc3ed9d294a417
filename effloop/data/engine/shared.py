"""Memory of batches that several processes have mapped, and the ring that lends it out."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.filesize import decimal
from torch import Tensor

from effloop.data.engine.ring import unheld
from effloop.errors import ConfigError
from effloop.system.hardware import available_memory

Shape = tuple[int, int, int, int]


class SharedSlots:
    """Slots of pixels, (B, S, S, 3) uint8, one after the other in a file without a name.

    The file is gone when the last process that has it open or mapped has ended, however it ended, and
    /dev/shm's size is no limit to it. May be given to a process that is started, by any method.

    Args:
        shape: of a slot.
        fd: of the file; None makes one.

    Raises:
        ConfigError: this system has no such files.
    """

    def __init__(self, shape: Shape, fd: int | None = None) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("engine: processes needs Linux, for memory that processes share; set engine=threads")
        self.shape = shape
        self.num_bytes = math.prod(shape)
        self._stride = -(-self.num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._fd = os.memfd_create("effloop-batches") if fd is None else fd
        self.close = weakref.finalize(self, os.close, self._fd)

    def __reduce__(self) -> tuple[Callable[[Shape, Any], SharedSlots], tuple[Shape, Any]]:
        return _joined, (self.shape, reduction.DupFd(self._fd))

    def make(self, number: int) -> NDArray[np.uint8]:
        """Take the memory of a new slot, and map it.

        Raises:
            ConfigError: there is too little.
        """
        try:  # all at once: a page that isn't there when it is written to kills the process
            if self._stride > available_memory():
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            os.posix_fallocate(self._fd, number * self._stride, self._stride)
            return self.map(number)
        except OSError as error:
            raise ConfigError(
                f"engine: {decimal(self.num_bytes)} of shared memory for a batch can't be had, beside {number} others: "
                f"{error.strerror}; set batch_size or engine.prefetch lower, or keep fewer batches"
            ) from None

    def map(self, number: int) -> NDArray[np.uint8]:
        """A slot that was made; it stays while this array, or what is a view of it, does."""
        place = _mapped(self._fd, number * self._stride, self._stride)
        return np.frombuffer(memoryview(place), np.uint8, self.num_bytes).reshape(self.shape)


def _mapped(fd: int, offset: int, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Bytes of a file, shared. Before Python 3.13 `mmap.mmap` keeps a file open for each: 1,000 kept batches fail."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    at = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if at == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    place = (ctypes.c_ubyte * size).from_address(at)
    weakref.finalize(place, libc.munmap, at, size).atexit = False  # then there may be a tensor over it still
    return place


def _joined(shape: Shape, duplicate: Any) -> SharedSlots:
    return SharedSlots(shape, duplicate.detach())


class SharedRing:
    """`Ring` in shared slots: a slot is lent again when nobody holds a tensor over it any more.

    Args:
        slots: where they lie.
        pin_memory: page-lock them, for copies to a GPU that need nobody to wait.
    """

    def __init__(self, slots: SharedSlots, *, pin_memory: bool = False) -> None:
        self.slots = slots
        self.pin_memory = pin_memory
        self._mapped: list[NDArray[np.uint8]] = []

    def take(self) -> tuple[int, Tensor]:
        """A slot's number and its memory, (B, S, S, 3) uint8; what is in it is left over.

        Raises:
            ConfigError: all are held, and there is no memory for another.
        """
        number = next(unheld(self._mapped), len(self._mapped))
        if number == len(self._mapped):
            self._mapped.append(self.slots.make(number))
            if self.pin_memory:
                _page_lock(self._mapped[number])
        return number, torch.from_numpy(self._mapped[number])

    def __len__(self) -> int:
        """Slots, free or not."""
        return len(self._mapped)


def _page_lock(slot: NDArray[np.uint8]) -> None:
    """Page-lock a slot for as long as it is mapped. Needs a GPU."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    at = slot.ctypes.data
    torch.cuda.check_error(cuda.cudaHostRegister(at, slot.nbytes, 0))
    weakref.finalize(slot, cuda.cudaHostUnregister, at)  # called before the memory that the array refers to goes

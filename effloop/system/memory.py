"""What a process holds in memory, what the kernel holds of files, autograd of tensors, and a training step of both."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from effloop.lazy import Tensor, torch

Place = Literal["host", "gpu"]

SHM = Path("/dev/shm")  # noqa: S108  a folder in memory
_FIELDS = {
    **{"Rss": "rss", "Pss": "pss", "Private_Clean": "private", "Private_Dirty": "private", "Anonymous": "own"},
    **{"Pss_Anon": "held", "Pss_Shmem": "held"},
}


def memory_of(pid: int | str = "self") -> dict[str, int]:
    """Bytes of a process's memory, from `/proc/PID/smaps_rollup`.

    Returns:
        `rss`, all pages it has mapped; `pss`, each of them divided by how many processes share it;
        `private`, those that no other process has mapped just now, pages of files among them; `own`,
        those that are of no file: what the kernel can't take back; `held`, these and shared memory, each
        divided by how many processes share it.
    """
    found = dict.fromkeys(_FIELDS.values(), 0)
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        if name in _FIELDS:
            found[_FIELDS[name]] += int(value.split()[0]) * 1024
    return found


def resident_memory() -> int:
    """Bytes of this process that are in memory, pages of files among them, but no shared memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


def files_in(*roots: Path) -> list[Path]:
    """Every file below some folders; a root that is a file counts as one."""
    return [
        path
        for root in roots
        for path in ([root] if root.is_file() else sorted(root.rglob("*")))
        if path.is_file() and not path.is_symlink()
    ]


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Let the kernel forget the files' pages. Those that a process has mapped stay, and so do names and inodes."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)  # a page that isn't written yet can't be dropped
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def share_in_cache(paths: Iterable[Path]) -> float:
    """How much of the files is in the page cache, from 0 to 1, by `mincore`."""
    resident = pages = 0
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            states = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
            start = np.frombuffer(mapped, np.uint8)
            failed = mincore(start.ctypes.data, size, states.ctypes.data)
            del start  # a map can't be closed while it is looked at
            if failed:
                raise OSError(ctypes.get_errno(), f"mincore of {path}: {os.strerror(ctypes.get_errno())}")
        resident += int((states & 1).sum())
        pages += len(states)
    return resident / pages if pages else 0.0


class SavedForBackward:
    """Counts the memory of tensors that autograd saves inside the block; tensors that share memory count once.

    Args:
        besides: tensors that don't count, such as a model's parameters and buffers, nor their copies in 16 bits.
    """

    def __init__(self, besides: Iterable[Tensor]) -> None:
        self._besides, self._numbers = set[tuple[int, int]](), set[int]()
        for each in besides:
            self._besides.add(_storage(each))
            self._numbers.add(each.numel())
        self._saved = set[tuple[int, int]]()
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)

    def _save(self, tensor: Tensor) -> Tensor:
        cast = tensor.dtype in (torch.float16, torch.bfloat16) and tensor.numel() in self._numbers  # by autocast
        if not cast:
            self._saved.add(_storage(tensor))
        return tensor

    def __enter__(self) -> SavedForBackward:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(size for _, size in self._saved - self._besides)

    @property
    def largest(self) -> int:
        """Bytes of the largest one; 0 if there is none."""
        return max((size for _, size in self._saved - self._besides), default=0)


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Address and size of a tensor's memory."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


# A training step, in the memory of the host or of a GPU.

USABLE: dict[Place, float] = {"host": 0.9, "gpu": 0.97}
"""Share of what is free that the parts of a run get. The rest of a host's is what an estimate may be wrong by, of a
GPU's the gaps between torch's blocks: fitted to half of timm's largest batches on an RTX 3090."""


def step_parts(
    weights: int, trained: int, ratio: float, *, saved: float, casts: float, buffers: float, ema: bool, probe: bool
) -> dict[str, int]:
    """Bytes of the parts of a training step when most is in use: in its backward pass, or in the update.

    Args:
        weights: bytes of parameters and buffers.
        trained: bytes of the parameters that are trained.
        ratio: bytes that the optimizer keeps for each of these, as of `effloop.optim.state_ratio`.
        saved: bytes that a batch's forward pass keeps for the backward pass.
        casts: bytes that it keeps whatever the batch: weights in 16 bits, by autocast.
        buffers: bytes of the backward pass beside these.
        ema: whether there is an average of the weights.
        probe: whether only the head is trained, on features.
    """
    if probe:
        trained, saved, casts = 0, 0.0, 0.0
    return {
        "weights": weights,
        "gradients": trained,
        "optimizer": round(ratio * trained),
        "average": weights * ema,
        "casts": round(casts),
        "activations": round(saved),
        "buffers": round(buffers),
        "update": max(0, round(trained - casts - saved - buffers)),  # torch's for all at once have a copy of them
    }

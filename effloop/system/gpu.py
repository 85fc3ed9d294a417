"""GPUs: streams, events, copies, page-locked memory, the current device, and what is known of each.

The rest of the package asks a GPU for nothing else, but for NVTX ranges (`profile.tools`), DALI (`data.engine.dali`),
and the switches of cuDNN and TF32. The current device is that of a thread, so devices are passed, and `use` is called
as well wherever one is chosen.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.errors import ConfigError
from effloop.lazy import Tensor, torch


def count() -> int:
    """Number of visible GPUs."""
    return torch.cuda.device_count()


def find_device(name: str) -> torch.device:
    """The device for `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: another name, or a device that doesn't exist.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: '{name}' is not a device that EffLoop uses; set auto, cpu, cuda or cuda:N")
    found = count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= found:
        raise ConfigError(f"device: '{name}' is not there, this machine shows {found} CUDA devices; set device=cpu")
    return device if device.type == "cuda" else torch.device("cpu")  # cpu:0 is no number of a GPU


def use(device: torch.device) -> torch.device:
    """Make a GPU this thread's current one, for what names no device; returns it with its number, a CPU as it is."""
    if device.type != "cuda":
        return device
    if device.index is None:
        return torch.device("cuda", torch.accelerator.current_device_index())
    torch.accelerator.set_device_index(device)
    return device


def new_stream(device: torch.device) -> torch.Stream:
    """A stream beside the current one, which `with` makes current."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that this thread's operations on a GPU are queued on."""
    return torch.accelerator.current_stream(device)


def record(stream: torch.Stream, *, timing: bool = False) -> torch.Event:
    """An event that passes when the stream has done what it was given so far; with `timing` it notes when."""
    event = torch.Event(enable_timing=timing)
    event.record(stream)
    return event


def wait(work: torch.Event | torch.Stream) -> None:
    """Let the host wait until an event has passed, or a stream has nothing left to do."""
    work.synchronize()  # not inline, as a hung rank is known by the module in which it waits


def wait_for_all() -> None:
    """Return once the current GPU has done all it was given; at once where none is in use."""
    # Otherwise nothing is queued, and asking would initialise CUDA, which takes half a gigabyte of GPU memory.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.accelerator.synchronize()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host, on a GPU's current stream and without waiting for it.

    Memory that isn't page-locked is copied to some that is first, as a copy from it would wait for all on the stream.
    """
    pinned = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
    return pinned.to(device, non_blocking=True)


def to_host(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy to the host, from a GPU without waiting: the result isn't there before its current stream has got so far.

    `out`: for the result, page-locked if the tensor is on a GPU; None is new memory.
    """
    if out is None:
        out = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return out.copy_(tensor, non_blocking=tensor.is_cuda)


def page_lock(array: NDArray[np.uint8], device: torch.device) -> None:
    """Page-lock memory for as long as this array exists, in the process that asks for it."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.accelerator.device_index(device.index):  # a context is made where the thread's current device has none
        torch.cuda.check_error(cuda.cudaHostRegister(array.ctypes.data, array.nbytes, 0))
    unlock = weakref.finalize(array, _unlock, cuda.cudaHostUnregister, array.ctypes.data, os.getpid())
    unlock.atexit = False  # a copy may still use it then


def _unlock(unregister: Callable[[int], object], at: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has the array, too, but can't use CUDA
        unregister(at)


def name(device: torch.device) -> str:
    """NVIDIA's name of a GPU, such as NVIDIA H100; else `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def uuid(number: int) -> str:
    """What tells a GPU from all others, of other machines, too; empty if there aren't so many."""
    return str(torch.cuda.get_device_properties(number).uuid) if number < count() else ""


def is_ampere(device: torch.device) -> bool:
    """Whether it is a GPU with bfloat16 and TensorFloat-32 (NVIDIA's Ampere and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that are free."""
    return torch.accelerator.get_memory_info(device)[0]


def peak_memory() -> int:
    """Bytes of tensors that this process had at most on one GPU; 0 without."""
    gpus = range(count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]
    return max(map(torch.accelerator.max_memory_allocated, gpus), default=0)


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that a call takes on a GPU at most, beside what is there before it."""
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    call()
    return torch.accelerator.max_memory_allocated(device) - before


def rng_states() -> list[Tensor]:
    """The state of each GPU's generator; none where CUDA isn't in use, which asking would initialise."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def set_rng_states(states: list[Tensor]) -> None:
    """Set each GPU's generator, as far as there are both."""
    for number, state in zip(range(count()), states, strict=False):
        torch.cuda.set_rng_state(state, number)

"""What this process may use of the machine."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch

from effloop.errors import ConfigError


def available_cores() -> int:
    """Cores this process may use: its affinity, cut by its groups' CPU quotas; at least 1.

    Half a core over counts for nothing: a thread for it would wait for the others.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_cores_of_groups()]))


def set_reproducible(*, deterministic: bool, cudnn_benchmark: bool) -> None:
    """Say, for the whole process, whether operations must give the same bits each time, and whether cuDNN may try out.

    Both are set whatever they were, as a process may hold one trainer after another. It is to be called before the
    first work on a GPU: cuBLAS reads how much memory it may take when it starts.

    Args:
        deterministic: only operations that give the same bits each time; one that can't raises a RuntimeError that
            names it when it is reached.
        cudnn_benchmark: time cuDNN's ways to do a convolution at each new shape, and keep the fastest; which it
            finds differs from run to run, and with it the last bits.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # one of the two that NVIDIA promises it for
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = cudnn_benchmark


@contextmanager
def determinism_explained() -> Iterator[None]:
    """Around a step: an operation that `deterministic` rules out is one line.

    Raises:
        ConfigError: the line names the operation.
    """
    try:
        yield
    except RuntimeError as error:
        name, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise ConfigError(
            f"deterministic: {name} gives other bits each time; set deterministic=false, or another model"
        ) from error


def set_own_threads(count: int) -> int:
    """Have torch run its operations for this thread, and no other, on `count` threads; says how many they were.

    0.4 µs where that changes the number. `torch.set_num_threads` is no slower, but also sets what threads that start
    later begin with. Where torch isn't built on OpenMP, nothing changes.
    """
    before = torch.get_num_threads()  # a thread's first call takes torch's own number, which would undo this one
    if before != count:
        _openmp()(count)
    return before


@functools.cache
def _openmp() -> Callable[[int], Any]:
    """The function behind it, of the library that torch computes with."""
    try:
        own = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError):
        return lambda count: None
    own.argtypes, own.restype = [ctypes.c_int], None
    return cast("Callable[[int], Any]", own)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's <malloc.h>
_NEVER = 2**30  # bytes; a block or a free top of the heap of less than this stays with the process


def keep_freed_memory() -> bool:
    """Let glibc keep memory that is freed, for the next step to take; whether it could be told.

    By default it may hand a step's activations back to the kernel and fetch them again as zeroed
    pages in the next: 4,600 to 6,500 page faults a step of `model=cnn` at batch 32, and 18-22 % of
    its time on 2 cores. Whether it does so depends on the process's history, so runs differ.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER) and mallopt(_M_MMAP_THRESHOLD, _NEVER))


def find_device(name: str) -> torch.device:
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N` as a device that is there.

    Raises:
        ConfigError: not such a name, or no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: '{name}' is not a device; set auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: '{name}' is not supported; set auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"device: '{name}' is not there, this machine shows {count} CUDA devices; set device=cpu")
    return device


_OTHER_FILES = 256  # what the rest of a training keeps open: libraries, workers' pipes, logs


def allow_open_files(count: int) -> None:
    """Make sure that this process may keep `count` files open beside its own.

    Raises:
        ConfigError: more than the system allows; the line has both numbers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"data.root: its {count:,} files need {needed:,} open files, this process may open {hard:,}; "
            f"raise the limit (ulimit -n {needed}) or convert to larger shards"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


MOUNTS = Path("/proc/self/mountinfo")
"""What is mounted where, as in proc_pid_mountinfo(5)."""


def file_system(path: Path) -> str:
    """What `path` is on, as Linux calls it: ext4, nfs4, fuse.sshfs, ...; empty where no list of mounts says it."""
    try:
        lines = MOUNTS.read_bytes().splitlines()
    except OSError:
        return ""
    place, longest, kind = os.fsencode(os.path.realpath(path)) + b"/", 0, b""
    for line in lines:
        mount, _, source = line.partition(b" - ")
        point = re.sub(rb"\\([0-3][0-7]{2})", lambda octal: bytes([int(octal[1], 8)]), mount.split()[4])
        if place.startswith(point.rstrip(b"/") + b"/") and len(point) >= longest:  # the later one hides the earlier
            longest, kind = len(point), source.split()[0]
    return kind.decode()


MEMINFO, CGROUPS, CGROUP_ROOT = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""What the machine has free, which groups this process is in (cgroups(7)), and where their files are."""


def available_memory() -> int:
    """Bytes that this process could still take: what the machine has free, cut by its groups' limits.

    A container, a batch system's job and a systemd slice are all groups, and all above a group count, too.
    """
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            break
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([free, *_free_in_groups()])


def _cores_of_groups() -> Iterator[int]:
    """Whole cores that the quota of each group of this process comes to, where it has one."""
    for version, group in _groups("cpu"):
        with suppress(OSError, ValueError):  # ValueError: `max`, which is none
            if version == 2:
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # -1 is none, too
                yield int(quota) // int(period)


def _free_in_groups() -> Iterator[int]:
    """Bytes below the limit of each group of this process that has one."""
    for version, group in _groups("memory"):
        if version == 2:
            yield from _free_in(group, "memory.max", "memory.current", "inactive_file")
        else:
            yield from _free_in(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _groups(controller: str) -> Iterator[tuple[int, Path]]:
    """The groups of this process and all above them that may limit it: version of cgroups, folder of their files."""
    try:
        lines = CGROUPS.read_text().splitlines()
    except OSError:
        return  # no groups here: no limit
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            version, root = 2, CGROUP_ROOT
        elif controller in controllers.split(","):
            version, root = 1, CGROUP_ROOT / controller
        else:
            continue
        group = Path(os.path.normpath("/" + path.lstrip("/")))  # outside of a container's view it begins with /..
        for place in (group, *group.parents):  # in a container it may be shown as the root itself
            yield version, root / place.relative_to("/")


def _free_in(group: Path, limit: str, used: str, given_back: str) -> Iterator[int]:
    """Bytes below this group's limit, if it is there and has one."""
    with suppress(OSError, ValueError, KeyError):  # ValueError: `max`, which is none
        most = int((group / limit).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield max(0, most - int((group / used).read_text()) + int(counts[given_back]))

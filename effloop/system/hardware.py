"""The hardware that this process may use: cores and the threads on them, devices, memory, open files."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
import resource
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from rich.filesize import decimal

from effloop.errors import ConfigError, OutOfMemoryError
from effloop.lazy import torch

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 4  # calls that `in_threads` has under way for each thread


def available_cores() -> int:
    """Number of cores this process may use: its affinity, limited by the CPU quotas of its cgroups; at least 1.

    A quota is rounded down: a thread on half a core would delay the others.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_cgroup_cores()]))


def set_reproducible(*, deterministic: bool, cudnn_benchmark: bool) -> None:
    """Set, for the whole process, whether operations are deterministic, and whether cuDNN benchmarks its algorithms.

    Both are always set, as a process may run several trainers in turn. Call it before the first work on a GPU: cuBLAS
    reads its workspace size when it starts.

    Args:
        deterministic: operations that don't give the same bits each time raise a RuntimeError with their name.
        cudnn_benchmark: time the algorithms for each new shape, and keep the fastest, which differs from run to run.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # one of two that NVIDIA documents as deterministic
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = cudnn_benchmark


@contextmanager
def determinism_explained() -> Iterator[None]:
    """Raise a ConfigError that names the operation where one has no deterministic implementation."""
    try:
        yield
    except RuntimeError as error:
        name, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise ConfigError(
            f"deterministic: {name} has no deterministic implementation; set deterministic=false, or another model"
        ) from error


def set_threads(count: int | str) -> None:
    """Set the threads that one operation of torch computes on, for the whole process.

    Args:
        count: a number; `auto` is what torch takes by itself, but no more than `available_cores`, unless
            OMP_NUM_THREADS says otherwise: torch knows nothing of CPU quotas.
    """
    if isinstance(count, int):
        torch.set_num_threads(count)
    elif "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > available_cores():
        torch.set_num_threads(available_cores())


def set_own_threads(count: int) -> int:
    """Set torch's intra-op threads for the calling thread alone; returns the previous number.

    It takes 0.4 µs if the number changes. `torch.set_num_threads` is no slower, but also changes the number for
    threads that start later. Has no effect if torch isn't built with OpenMP.
    """
    before = torch.get_num_threads()  # a thread's first call sets torch's own number, which would undo ours
    if before != count:
        _openmp()(count)
    return before


@functools.cache
def _openmp() -> Callable[[int], Any]:
    """`omp_set_num_threads` of the OpenMP library that torch uses."""
    try:
        own = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError):
        return lambda count: None
    own.argtypes, own.restype = [ctypes.c_int], None
    return cast("Callable[[int], Any]", own)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's <malloc.h>
_NEVER = 2**30  # bytes; smaller blocks, or a smaller free top of the heap, are kept


def in_threads(call: Callable[[T], R], items: Iterable[T], num_threads: int) -> Iterator[R]:
    """`map` by threads, 0 meaning one, with a few calls of each under way; items are taken in the caller's thread.

    What a call raises ends the iteration.
    """
    pool = ThreadPoolExecutor(max(1, num_threads), thread_name_prefix="effloop")
    begun: deque[Future[R]] = deque()
    try:
        for item in items:
            begun.append(pool.submit(call, item))
            if len(begun) > _AHEAD * num_threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next step; returns whether that was possible.

    By default glibc may return a step's activations to the kernel and get them back as zeroed pages
    in the next: 4,600 to 6,500 page faults per step of `model=cnn` at batch 32, and 18-22 % of its
    time on 2 cores. Whether it does so depends on the process's history, so runs differ.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER) and mallopt(_M_MMAP_THRESHOLD, _NEVER))


CPUINFO = Path("/proc/cpuinfo")  # what Linux tells about the cores


def has_vnni() -> bool:
    """Whether the CPU sums products of bytes in 32 bits at once. An x86 CPU without these instructions sums pairs of
    them in 16 bits, which overflow unless weights have 7 bits; other CPUs don't.
    """
    with suppress(OSError):
        if flags := re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE):
            return bool({*flags[1].split()} & {"avx512_vnni", "avx_vnni"})
    return True  # no x86


def allow_open_files(count: int, what: str, fix: str, spare: int = 256) -> None:
    """Raise this process's limit of open files, if necessary, to `count` and some to spare, as for libraries and logs,
    and for the sockets by which gloo connects each rank with all others.

    Raises:
        ConfigError: the hard limit is lower; the line begins with `what` needs them, and ends with another `fix`.
    """
    needed = count + spare + int(os.environ.get("WORLD_SIZE") or 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{what} {needed:,} open files, this process may open {hard:,}; raise the limit (ulimit -n {needed}){fix}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


MOUNTS = Path("/proc/self/mountinfo")  # the list of mounts, see proc_pid_mountinfo(5)


def file_system(path: Path) -> str:
    """Linux's name of the file system of `path`: ext4, nfs4, fuse.sshfs, ...; empty if it isn't known."""
    real, longest, kind = os.fsencode(os.path.realpath(path)) + b"/", 0, b""
    with suppress(OSError):
        for line in MOUNTS.read_bytes().splitlines():
            mount, _, source = line.partition(b" - ")
            point = re.sub(rb"\\([0-3][0-7]{2})", lambda octal: bytes([int(octal[1], 8)]), mount.split()[4])
            if real.startswith(point.rstrip(b"/") + b"/") and len(point) >= longest:  # a later mount hides another
                longest, kind = len(point), source.split()[0]
    return kind.decode()


MEMINFO, CGROUPS, CGROUP_ROOT = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""The machine's free memory, the cgroups of this process (see cgroups(7)), and the folder of their files."""


def available_memory() -> int:
    """Bytes that this process can still allocate: the machine's free memory, limited by the process's cgroups.

    A container, a job of a batch system and a systemd slice are all cgroups, and the limits of parents count, too.
    """
    found = re.search(r"^MemAvailable:\s*(\d+)", MEMINFO.read_text(), re.MULTILINE)
    free = int(found[1]) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([free, *_cgroup_memory()])


def _cgroup_cores() -> Iterator[int]:
    """The CPU quota, in whole cores, of each cgroup of this process that has one."""
    for version, group in _cgroups("cpu"):
        with suppress(OSError, ValueError):  # ValueError: `max`, no quota
            if version == 2:
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # -1: no quota
                yield int(quota) // int(period)


def _cgroup_memory() -> Iterator[int]:
    """Bytes left below the memory limit of each cgroup of this process that has one."""
    for version, group in _cgroups("memory"):
        limit, used, reclaimable = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        with suppress(OSError, ValueError, KeyError):  # ValueError: `max`, no limit
            most = int((group / limit).read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield max(0, most - int((group / used).read_text()) + int(counts[reclaimable]))


def _cgroups(controller: str) -> Iterator[tuple[int, Path]]:
    """Version and folder of each cgroup that may limit this process: its own and their parents."""
    try:
        lines = CGROUPS.read_text().splitlines()
    except OSError:
        return  # no cgroups, no limit
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            version, root = 2, CGROUP_ROOT
        elif controller in controllers.split(","):
            version, root = 1, CGROUP_ROOT / controller
        else:
            continue
        group = Path(os.path.normpath("/" + path.lstrip("/")))  # it begins with /.. outside of a container's view
        for folder in (group, *group.parents):  # in a container the group may be shown as the root itself
            yield version, root / folder.relative_to("/")


# Too little of what a machine has: memory, processes, open files; as one line each.

_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "cudnn_status_alloc_failed", "bad_alloc")
_FILES, _FILES_PER_WORKER = 32, 6
"""Open files of a run, and of each worker process of its two splits: 30 with one worker, 48 with 4, 96 with 12."""
_WORKERS_PER_CORE, _WORKERS, _MOST_WORKERS = 32, 256, 4096  # the engine of processes has a table of so many


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated, on the host or a GPU, by an error of Python, torch or the system."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


@contextmanager
def memory_explained(memory_hint: str, ended: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Raise an OutOfMemoryError, whose line ends with `memory_hint`, where memory can't be allocated.

    `ended` is given the line, too.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        why = (" ".join(str(error).split())[:160] or type(error).__name__).rstrip(".")
        on_gpu = isinstance(error, torch.OutOfMemoryError)
        where = f"the GPU ({why})" if on_gpu else f"this machine ({why}); {decimal(available_memory())} are free"
        line = f"out of memory on {where}; {memory_hint}"
        ended(line)
        raise OutOfMemoryError(line) from None


def check_workers(count: int, ranks: int) -> None:
    """Refuse more workers of a rank than a machine whose cores so many ranks share has a use for: a ConfigError."""
    most = min(_MOST_WORKERS, max(_WORKERS, _WORKERS_PER_CORE * available_cores() // ranks))
    if count > most:
        raise ConfigError(
            f"num_workers: {count} is not allowed: {available_cores()} cores are here, and at most {most} workers; "
            "set num_workers=auto"
        )


def check_open_files(processes: int) -> None:
    """Raise this process's limit of open files to what so many worker processes need, or a ConfigError."""
    workers = f" with {processes} worker processes" if processes else ""
    less = ", or set engine=threads" if processes else ""
    allow_open_files(_FILES_PER_WORKER * processes, f"open files: a run{workers} needs", less, _FILES)


def check_batch_memory(batch_size: int, bytes_of_image: int) -> None:
    """Refuse a batch whose images alone are larger than this machine's memory."""
    needed, free = batch_size * bytes_of_image, available_memory()
    if needed > free:
        raise ConfigError(
            f"batch_size: {batch_size} images need {decimal(needed)} of memory for one batch, {decimal(free)} are "
            f"free; set batch_size={max(1, free // bytes_of_image // 8)} or less"
        )

"""A CUDA device without a GPU: torch's CUDA build runs on a driver and kernels of our own, in a process of its own.

`call` runs a function there, `run` a command. What the host doesn't wait for hasn't happened: see `driver.c`, and
`kernels.py` for what computes.
"""

import functools
import hashlib
import importlib.util
import inspect
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCHEDULES = ("latest", "eager", "ahead", "random")
_EMPTY = "__host__ __device__ __cudart_builtin__ __align__(x) __builtin_align__(x) CUDARTAPI CUDARTAPI_CDECL"
_EMPTY += " __device_builtin__ __device_builtin_texture_type__ __device_builtin_surface_type__"


@functools.cache
def library() -> Path:
    """The driver, compiled once; skips the test, with the reason, where that can't be done or torch can't use it."""
    import pytest  # not in the emulated process

    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        pytest.skip("this torch is not built for CUDA")
    headers = sorted((torch.parent / "nvidia").glob("cu*/include/cuda_runtime_api.h"))
    if not headers:
        pytest.skip("this torch's package brings no headers of CUDA's runtime")
    command = ["cc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *(f"-D{each}=" for each in _EMPTY.split())]
    command += [f"-I{headers[0].parent}"]
    source = (HERE / "driver.c").read_bytes()
    name = hashlib.sha256(source + repr(command).encode()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"effloop-emulator-{os.getuid()}" / name / "libcuda.so.1"
    if not target.exists():
        (target.parent / "crt").mkdir(parents=True, exist_ok=True)
        (target.parent / "crt" / "host_defines.h").touch()  # of the compiler for CUDA: what is defined empty above
        partial = target.with_name(f"{os.getpid()}.so")
        try:
            made = subprocess.run(
                [*command, f"-I{target.parent}", "-o", partial, HERE / "driver.c", "-ldl", "-lpthread"],
                capture_output=True,
                text=True,
            )
        except FileNotFoundError:
            pytest.skip("no C compiler (cc) on this machine")
        assert not made.returncode, made.stderr
        partial.replace(target)
    return target


def active() -> bool:
    """Whether this process runs on it."""
    return "EMULATOR_SCHEDULE" in os.environ


def environment(
    schedule: str = "latest", seed: int = 0, *, devices: int = 2, log: Path | None = None
) -> dict[str, str]:
    """Variables of a process that runs on the emulator, and of its children.

    Schedules: `latest`: queued work runs when something has to wait for it; `eager`: at once; `ahead`: copies at once
    and the rest as late as possible, if copies have a stream of their own; `random`: at any time, by the seed.
    """
    path = [str(HERE / "site"), str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    found = {
        **os.environ,
        "LD_PRELOAD": str(library()),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",
        "EMULATOR_SCHEDULE": f"{SCHEDULES.index(schedule)}{seed}",
        "EMULATOR_DEVICES": str(devices),
    }
    return found if log is None else {**found, "EMULATOR_LOG": str(log)}


def run(
    *words: str | Path, timeout_s: float = 600, cwd: Path | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`python WORDS` on the emulator; for the options see `environment`."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, env=environment(**options), capture_output=True, text=True, timeout=timeout_s, cwd=cwd
    )


def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A function of a module of tests, called in a process on the emulator: what it returns, or an AssertionError."""
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "given", Path(folder) / "result"
        given.write_bytes(pickle.dumps((inspect.getfile(function), function.__name__, args)))
        done = run("-m", "emulator.child", given, result, **options)
        if done.returncode:
            raise AssertionError(f"on the emulator, exit code {done.returncode}:\n{done.stdout}{done.stderr}")
        return pickle.loads(result.read_bytes())


def contexts(log: Path) -> set[int]:
    """The devices on which any process made a context."""
    return {int(number) for number in re.findall(r"cuda:(\d) context", log.read_text())}


def errors(log: Path) -> list[str]:
    """What the driver refused, or saw go wrong."""
    return re.findall(r"^\d+ (cuda:\d error .*)$", log.read_text(), re.MULTILINE)

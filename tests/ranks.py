"""Several ranks on this machine, for tests."""

import contextlib
import os
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forks import Forked
from runs import once

import effloop

ROOT = str(Path(effloop.__file__).parents[1])


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        **os.environ,
        "PYTHONPATH": ROOT,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_script(script: str, cwd: Path, world_size: int = 2) -> list[tuple[int, str, str]]:
    """Run a script as so many ranks; exit code, standard output and standard error of each."""
    path = cwd / "script.py"
    path.write_text(textwrap.dedent(script))
    port = free_port()
    processes = [
        Forked(
            [str(path)],
            cwd=cwd,
            env=environment(rank, world_size, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    return [(process.returncode, *said) for process in processes for said in [process.communicate(timeout=120)]]


def started(args: list[str], cwd: Path, **env: str) -> subprocess.Popen[str]:
    """A process and group of its own that may start ranks; their scratch folder comes to be in `cwd`.

    `effloop ...` is forked, and so are its ranks; `effloop ...` is started.
    """
    env = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "TMPDIR": str(cwd), **env}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if args[0] == "effloop":
        return Forked(once(*args), cwd=cwd, env=env, **pipes)
    return subprocess.Popen(once(*args), cwd=cwd, env=env, start_new_session=True, **pipes)


def done(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a process that comes to its end."""
    with process:
        out, err = process.communicate(timeout=180)
    return process.returncode, out, err


def pids(cwd: Path, start: int = 0) -> dict[int, int]:
    """{rank: pid} of the ranks that a launch in `cwd` has started."""
    return {
        int(path.name.rpartition("-")[2]): int(path.read_text())
        for path in cwd.glob(f"effloop-ranks-*/pid-{start}-*")
        if path.read_text()
    }


def group(leader: int) -> list[int]:
    """Processes of a group that haven't ended."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, number = path.read_text().rpartition(")")[2].split()[:3]
            if int(number) == leader and state != "Z":
                members.append(int(path.parent.name))
    return members


def wait_until(what: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Wait for something that a process does."""
    until = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def all_gone(leader: int, seconds: float = 120) -> bool:
    """Whether all processes of a group end within some seconds."""
    until = time.monotonic() + seconds
    while group(leader) and time.monotonic() < until:
        time.sleep(0.05)
    return not group(leader)

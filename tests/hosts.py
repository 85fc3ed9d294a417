"""Several machines on this one: hosts with an address, a name and processes of their own, on a network with faults.

A host is a process in namespaces of its own (network, name, PIDs, mounts), so that nothing is left of it when it ends,
which it does with the tests' process. Its network device is a TAP, and what connects the hosts is a thread of this
process that passes frames on: `tc netem` isn't in every kernel, and cutting a link is one variable here.
"""

import ctypes
import fcntl
import heapq
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Any

_TUN = Path("/dev/net/tun")
_TUNSETIFF, _TAP, _NO_INFO = 0x400454CA, 0x0002, 0x1000
_SPACES = ("uts", "net", "pid", "mnt")  # the last one after the others have been opened
WHY_NOT = (
    "needs root" * (os.geteuid() != 0)
    or next((f"needs {tool}" for tool in ("ip", "setpriv", "unshare", "mount") if not which(tool)), "")
    or f"needs {_TUN}" * (not _TUN.exists())
)
"""Why there can't be hosts on this machine; empty if there can."""


ROOT = str(Path(__file__).parents[1])
_LOOK_S = 0.1
NAMES = "".join(f"10.77.0.{number} host{number}\n" for number in range(1, 9))


@dataclass
class Link:
    """Of a host to the network, in both directions."""

    fd: int = -1
    cut: bool = False
    delay_s: float = 0.0
    loss: float = 0.0  # probability of a frame


@dataclass
class Host:
    """A machine: `10.77.0.N`, with N from 1, named `hostN`; `names` are the lines of its /etc/hosts."""

    number: int
    names: str
    link: Link = field(default_factory=Link)
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    pid: int = 0  # of the first process in its PID namespace

    def boot(self) -> None:
        """Begin, or begin again after `stop`."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = ["setpriv", "--pdeathsig", "KILL"]  # they end with this process, even if it is killed
            command += ["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
            command += [sys.executable, "-S", __file__, "", str(self.number), self.names, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL)
            theirs.close()
            (fd,) = socket.recv_fds(ours, 1, 1)[1]
        if self.link.fd >= 0:
            os.dup2(fd, self.link.fd)
            os.close(fd)
        else:
            self.link.fd = fd
        self.link.cut = False
        self.pid = int(Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text())

    def start(self, *args: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
        """`effloop ARGS`, `MODULE ARGS` or `SCRIPT.py ARGS` on this host, forked as by `Forked`."""
        from forks import Forked  # here, as a host's first process runs this file as well

        env = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "TMPDIR": str(cwd), **env}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = Forked([__file__, str(self.pid), *args], cwd=cwd, env=env, **pipes)
        self.started.append(process)
        return process

    def stop(self) -> None:
        """As if its power were cut: all of its processes end, and nobody is told."""
        self.link.cut = True
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # the kernel ends all others of its PID namespace
            self._process.wait()
        self.pid = 0

    def running(self) -> list[str]:
        """Command lines of its processes, without the first one."""
        space, found = os.readlink(f"/proc/{self.pid}/ns/pid"), []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(path / "ns/pid") == space and path.name != str(self.pid):
                    found.append((path / "cmdline").read_text().replace("\0", " "))
        return found


@contextmanager
def hosts(count: int = 2, names: str = NAMES) -> Iterator[list[Host]]:
    """So many hosts in one network."""
    made = [Host(number, names) for number in range(1, count + 1)]
    ended = threading.Event()
    network = threading.Thread(target=_network, args=(made, ended), daemon=True)
    try:
        for host in made:
            host.boot()
        network.start()
        yield made
    finally:
        ended.set()
        if network.is_alive():
            network.join()
        for host in made:
            host.stop()
            if host.link.fd >= 0:
                os.close(host.link.fd)
            for process in host.started:
                with process:
                    process.kill()


def _network(made: list[Host], ended: threading.Event) -> None:
    """Pass each frame on to all other hosts, as a hub does."""
    waiting: list[tuple[float, int, int, bytes]] = []
    chance, number = random.Random(0), 0
    links = {host.link.fd: host.link for host in made}
    while not ended.is_set():
        pause = waiting[0][0] - time.monotonic() if waiting else _LOOK_S
        for fd in select.select(links, [], [], max(0.0, min(pause, _LOOK_S)))[0]:
            with suppress(OSError):  # the host has ended
                frame = os.read(fd, 1 << 16)
                for link in links.values():
                    both = (link, links[fd])
                    if link.fd != fd and not any(each.cut or chance.random() < each.loss for each in both):
                        number += 1
                        at = time.monotonic() + sum(each.delay_s for each in both)
                        heapq.heappush(waiting, (at, number, link.fd, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            with suppress(OSError):
                os.write(waiting[0][2], waiting[0][3])
            heapq.heappop(waiting)


def _be(number: str, names: str, parent: str) -> None:
    """What a host's first process does: it makes the host, and takes what other processes leave behind."""
    tap = os.open(_TUN, os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP | _NO_INFO))
    socket.sethostname(f"host{number}")
    with tempfile.NamedTemporaryFile("w") as table:
        table.write(f"127.0.0.1 localhost\n{names}")
        table.flush()
        up = f"ip link set eth0 address 02:00:00:00:00:{int(number):02x}"
        up += f" && ip addr add 10.77.0.{number}/24 dev eth0 && ip link set eth0 up && ip link set lo up"
        subprocess.run(f"{up} && mount --bind {table.name} /etc/hosts", shell=True, check=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    socket.send_fds(socket.socket(fileno=int(parent)), [b"0"], [tap])
    while True:
        signal.sigwait([signal.SIGCHLD])
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _enter(host: str, *args: str) -> None:
    """Go on as `args` in a process of a host; this one waits for its end."""
    where = os.getcwd()
    for space in [os.open(f"/proc/{host}/ns/{name}", os.O_RDONLY) for name in _SPACES]:
        if ctypes.CDLL(None, use_errno=True).setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)
    os.chdir(where)
    if child := os.fork():
        for number in range(3):
            os.close(number)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    sys.argv = [*args]
    if args[0].endswith(".py"):
        runpy.run_path(args[0], run_name="__main__")
    else:
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    (_enter if sys.argv[1] else _be)(*sys.argv[1 if sys.argv[1] else 2 :])

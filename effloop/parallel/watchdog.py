"""The watchdog of the ranks: it finds the one that the others wait for."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from effloop.batch import Batch
from effloop.errors import RankError

_WAITING = ("torch.autograd.graph", "torch.distributed", "torch.cuda")
"""Parts of torch that wait for other ranks: in backward, in collectives, or for the GPU that does them."""
_JOIN_S = 5.0
"""For the thread to end; where the store has gone it may be in the middle of asking."""


@dataclass(frozen=True)
class Heartbeat:
    """The state of a rank, published about once a second.

    Attributes:
        number: of the heartbeat.
        steps: progress: one for each batch asked for, one for each that came, one for each end of an epoch or
            evaluation, and two for each collective.
        at: the same, for messages.
        host, pid: where the rank runs.
        space: the PID namespace that `pid` belongs to.
        waits: whether the loop is inside torch's backward or a collective, which wait for the other ranks.
        collective: what that collective is for, for messages; empty outside of one.
    """

    number: int
    steps: int
    at: str
    host: str
    pid: int
    space: str
    waits: bool = False
    collective: str = ""


@dataclass(frozen=True)
class Stall:
    """Why the ranks make no progress.

    Attributes:
        line: for the terminal.
        beat: of the stalled rank; None if it isn't known.
    """

    line: str
    beat: Heartbeat | None


def find_stalled_rank(
    earlier: Sequence[Heartbeat | None], later: Sequence[Heartbeat | None], timeout_s: float
) -> Stall:
    """Which rank the others wait for.

    Args:
        earlier: the last heartbeat of each rank; None where a rank has had none.
        later: the same, some heartbeats after that.
        timeout_s: how long there has been no progress.
    """
    seconds = f"{timeout_s:g} s"
    beats = [beat for beat in later if beat]
    meeting = next((f", {beat.collective}" for beat in beats if beat.collective), "")
    for rank, (before, now) in enumerate(zip(earlier, later, strict=True)):
        if now is None:
            return Stall(f"rank {rank} has not come for {seconds}: the others wait for it{meeting}", None)
        if before == now:
            return Stall(_line(rank, now, seconds, meeting, "it has stopped, or its machine is gone"), now)
    rank, behind = min(enumerate(beats), key=lambda pair: (pair[1].steps, pair[1].waits))
    if all((beat.steps, beat.waits) == (behind.steps, behind.waits) for beat in beats):
        return Stall(
            f"no rank has gone on for {seconds}: all {len(beats)} are {behind.at}{meeting}; "
            "look at the network between them, or raise parallel.timeout_s",
            None,
        )
    return Stall(_line(rank, behind, seconds, meeting, "raise parallel.timeout_s if it needs longer"), behind)


def _line(rank: int, beat: Heartbeat, seconds: str, meeting: str, hint: str) -> str:
    return (
        f"rank {rank} on {beat.host} (pid {beat.pid}) has not answered for {seconds}: "
        f"the others wait for it {beat.at}{meeting}; {hint}"
    )


class Watchdog:
    """Counts this rank's steps, publishes them as heartbeats, and compares the ranks' when this one is stuck.

    Its clock runs in batches, in collectives and wherever else torch waits for other ranks. What a rank does by itself
    in between, such as building a model or writing a checkpoint, may take as long as no other rank waits for it.

    Args:
        store: which all ranks share; the watchdog has a connection of its own to it.
        rank, world_size: this one's number and how many there are.
        timeout_s: how long a rank may take for a step, or be waited for.
        end: called with the stall when it took longer.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout_s: float, end: Callable[[Stall], None]
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s, self._end = timeout_s, end
        self._every_s = min(1.0, timeout_s / 5)
        self._steps, self._batch, self._asks = 0, 0, False
        self._doing, self._collective, self._idle = "", "", "before the first batch"
        self._number, self._loop = 0, threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="effloop-watch")

    def start(self) -> None:
        """Begin to watch the calling thread."""
        self._loop = threading.get_ident()
        self._publish(self._store)  # so that the others know its pid
        atexit.register(self.close)  # where it isn't called: a thread inside the store would disturb the process's end
        self._thread.start()

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, counted."""
        self._loop = threading.get_ident()
        self._batch, self._doing = 0, "training" if torch.is_grad_enabled() else "evaluating"
        iterator = iter(batches)
        try:
            while True:
                self._asks = True
                self._steps += 1
                batch = next(iterator, None)
                if batch is None:
                    return
                self._batch, self._asks = self._batch + 1, False
                self._steps += 1
                yield batch
        finally:
            self._idle = f"after {self._doing} batch {self._batch}"
            self._doing, self._asks = "", False
            self._steps += 1

    @contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """Around a collective, which ends when all ranks have come to it; all of them have to use this alike.

        Args:
            collective: what it is for: "for a sum".
        """
        self._collective = collective
        self._steps += 1
        try:
            yield
        finally:
            self._collective = ""
            self._steps += 1

    def close(self) -> None:
        """Stop watching; other ranks may have ended by now."""
        atexit.unregister(self.close)
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _publish(self, store: Store) -> None:
        store.set(f"beat/{self._rank}", json.dumps(asdict(self._beat())))

    def _beat(self) -> Heartbeat:
        self._number += 1
        at = f"in {self._doing} batch {self._batch}" if self._doing else self._idle
        if self._asks:
            at = f"before {self._doing} batch {self._batch + 1}, for whose data it waits"
        waits, collective = self._waits(), self._collective
        return Heartbeat(
            self._number, self._steps, at, socket.gethostname(), os.getpid(), pid_space(), waits, collective
        )

    def _waits(self) -> bool:
        frame = sys._current_frames().get(self._loop)
        inside = frame is not None and str(frame.f_globals.get("__name__")).startswith(_WAITING)
        return inside or bool(self._collective)

    def _run(self) -> None:
        try:
            store = self._store.clone()  # here, as it takes 5 s where a machine's names can't be looked up
        except RuntimeError:  # the store has gone, which is reported elsewhere
            return
        store.set_timeout(timedelta(seconds=max(2.0, 2 * self._every_s)))
        steps, since = -1, time.monotonic()
        before = since
        while not self._over.wait(self._every_s):
            now = time.monotonic()
            counts = bool(self._doing) or self._waits()
            if self._steps != steps or not counts or now - before > 3 * self._every_s + 1:
                steps, since = self._steps, now  # it goes on; or the whole process, or machine, has been asleep
            before = now
            with suppress(RuntimeError):  # the store has gone, which is reported elsewhere
                self._publish(store)
            if now - since >= self._timeout_s:
                stall = self._find_stall(store)
                if self._steps == steps and not self._over.is_set():
                    self._end(stall)
                    return
                before = time.monotonic()

    def _find_stall(self, store: Store) -> Stall:
        """Read all heartbeats twice; this rank's own goes on in between."""
        try:
            earlier = self._read(store)
            for _ in range(3):
                self._over.wait(self._every_s)
                self._publish(store)
            return find_stalled_rank(earlier, self._read(store), self._timeout_s)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:120]
            return Stall(
                f"rank {self._rank} on {socket.gethostname()}: nothing has gone on for {self._timeout_s:g} s, and "
                f"the store of the ranks doesn't answer ({reason}); check the machine of rank 0",
                None,
            )

    def _read(self, store: Store) -> list[Heartbeat | None]:
        keys = [f"beat/{rank}" for rank in range(self._world_size)]
        return [Heartbeat(**json.loads(store.get(key))) if store.check([key]) else None for key in keys]


def pid_space() -> str:
    """The PID namespace of this process: equal texts mean that a PID means the same process."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return f"unknown to {os.getpid()}"


def end_all(report: Callable[[str], None], stall: Stall) -> None:
    """Report a stall, kill the stalled rank if it is on this machine, and end this process."""
    report(stall.line)
    beat = stall.beat
    if beat and beat.space == pid_space() and beat.pid != os.getpid():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(beat.pid, signal.SIGKILL)  # it may be stopped, and then handles no other signal
    sys.stdout.flush()
    os._exit(RankError.exit_code)  # the loop's thread waits for a rank that won't come

"""A watchdog that finds the rank that the others wait for."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import statistics
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
from effloop.errors import RankError, warn

# Finds a rank that is much slower than the others, which all wait for it in every step.

_FACTOR, _SHARE = 2.5, 0.25
_LEAST = 10  # batches in a window
_WINDOWS = 2  # in a row, so that a moment's load is no reason


@dataclass(frozen=True)
class Pace:
    """What a rank has done so far.

    Attributes:
        batches: that it has trained on.
        own_s: seconds of that in which it didn't wait for others: it loaded, computed, or slept.
        all_s: seconds of that.
    """

    batches: int = 0
    own_s: float = 0.0
    all_s: float = 0.0

    def since(self, other: Pace) -> Pace:
        """What was done after `other`."""
        return Pace(self.batches - other.batches, self.own_s - other.own_s, self.all_s - other.all_s)


def find_straggler(paces: Sequence[Pace]) -> tuple[int, float, float] | None:
    """The rank that holds the others up.

    A slow rank is busy where the others wait for it. Backward passes count as waiting, as nobody can tell there; a rank
    that is slow throughout is as much slower outside of them.

    Args:
        paces: of each rank, over the same time.

    Returns:
        Its number, how much longer it takes than the median of the others, and the share of the time that they lose;
        None if no rank stands out.
    """
    if len(paces) < 2 or any(pace.batches < _LEAST or pace.all_s <= 0 for pace in paces):
        return None
    own = [pace.own_s / pace.batches for pace in paces]
    slowest = max(range(len(own)), key=own.__getitem__)
    others = statistics.median(value for rank, value in enumerate(own) if rank != slowest)
    lost = (own[slowest] - others) / (paces[slowest].all_s / paces[slowest].batches)
    if own[slowest] < _FACTOR * others or lost < _SHARE:
        return None
    return slowest, own[slowest] / max(others, 1e-4), lost


class Stragglers:
    """Compares the ranks' paces window by window, and warns once of each that stands out in two in a row.

    Args:
        warn: is given the line.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._before: list[Pace] = []
        self._suspect, self._times = -1, 0
        self._said: set[int] = set()

    def window(self, paces: Sequence[Pace], names: Sequence[str]) -> None:
        """A window has passed.

        Args:
            paces: of each rank since it started.
            names: host and process of each.
        """
        before, self._before = self._before, list(paces)
        if len(before) != len(paces):
            return
        found = find_straggler([now.since(then) for now, then in zip(paces, before, strict=True)])
        rank = found[0] if found else -1
        self._times = self._times + 1 if rank == self._suspect else 1
        self._suspect = rank
        if found and self._times >= _WINDOWS and rank not in self._said:
            self._said.add(rank)
            self._warn(
                f"rank {rank} on {names[rank]} holds the others up: it takes {min(found[1], 99):.1f} times as long as "
                f"they do for its own part of a step, and they wait {found[2]:.0%} of the time; look at its machine, "
                "GPU and data"
            )


_WAITING = ("torch.autograd.graph", "torch.distributed", "torch.cuda", "effloop.parallel.ddp")
"""Modules that wait for other ranks: in backward, in collectives, or for a GPU that runs them."""
_TRAINING = "training"
_SAMPLE_S = 0.05
_WINDOW_S = 10.0
"""After which the ranks' paces are compared."""
_JOIN_S = 5.0
"""For the thread to end; it may be waiting for a store that has ended."""


@dataclass(frozen=True)
class Heartbeat:
    """The state of a rank, published about once a second.

    Attributes:
        number: of the heartbeat.
        steps: progress: one for each batch requested, one for each received, one for each end of an epoch or
            evaluation, and two for each collective.
        at: the progress, for messages.
        host, pid: of the rank.
        space: the PID namespace of `pid`.
        waits: whether the loop is inside torch's backward or a collective, which wait for the other ranks.
        collective: purpose of the current collective, for messages; empty outside of one.
        batches, own_s, all_s: see `Pace`.
    """

    number: int
    steps: int
    at: str
    host: str
    pid: int
    space: str
    waits: bool = False
    collective: str = ""
    batches: int = 0
    own_s: float = 0.0
    all_s: float = 0.0

    @property
    def pace(self) -> Pace:
        """What the rank has done so far."""
        return Pace(self.batches, self.own_s, self.all_s)


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
    """Find the rank that the others wait for.

    Args:
        earlier: the last heartbeat of each rank; None if it has sent none.
        later: the same, some heartbeats later.
        timeout_s: how long there has been no progress.
    """
    seconds = f"{timeout_s:g} s"
    beats = [beat for beat in later if beat]
    purpose = next((f", {beat.collective}" for beat in beats if beat.collective), "")
    for rank, (before, now) in enumerate(zip(earlier, later, strict=True)):
        if now is None:
            return Stall(f"rank {rank} has sent no heartbeat for {seconds}: the others wait for it{purpose}", None)
        if before == now:
            return Stall(_line(rank, now, seconds, purpose, "it has stopped, or its machine is gone"), now)
    rank, behind = min(enumerate(beats), key=lambda pair: (pair[1].steps, pair[1].waits))
    if all((beat.steps, beat.waits) == (behind.steps, behind.waits) for beat in beats):
        return Stall(
            f"no rank has made progress for {seconds}: all {len(beats)} are {behind.at}{purpose}; "
            "check the network between them, or raise parallel.timeout_s",
            None,
        )
    return Stall(_line(rank, behind, seconds, purpose, "raise parallel.timeout_s if it needs longer"), behind)


def _line(rank: int, beat: Heartbeat, seconds: str, purpose: str, hint: str) -> str:
    return (
        f"rank {rank} on {beat.host} (pid {beat.pid}) has not answered for {seconds}: "
        f"the others wait for it {beat.at}{purpose}; {hint}"
    )


class Watchdog:
    """Counts this rank's steps, publishes them as heartbeats, and compares all ranks' when this one makes no progress.

    The timeout counts in batches, in collectives and wherever else torch waits for other ranks. Between them, while it
    builds a model or writes a checkpoint, a rank has no timeout of its own, but those that wait for it have one.

    Args:
        store: shared by all ranks; the watchdog opens its own connection to it.
        rank, world_size: this rank's number and the number of ranks.
        timeout_s: for a step, and for waiting for another rank.
        end: called with the stall after the timeout.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout_s: float, end: Callable[[Stall], None]
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s, self._end, self._every_s = timeout_s, end, min(1.0, timeout_s / 5)
        self._steps, self._batch, self._loading = 0, 0, False
        self._phase, self._collective, self._idle = "", "", "before the first batch"
        self._number, self._loop, self._closed = 0, threading.get_ident(), threading.Event()
        self._trained, self._own_s, self._all_s = 0, 0.0, 0.0
        self._stragglers = Stragglers(warn)
        self._thread = threading.Thread(target=self._run, daemon=True, name="effloop-watch")

    def start(self) -> None:
        """Start to watch the calling thread."""
        self._loop = threading.get_ident()
        self._publish(self._store)  # so that the others know its pid
        atexit.register(self.close)  # a process must not end while the thread uses the store
        self._thread.start()

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches, and count them."""
        self._loop = threading.get_ident()
        self._batch, self._phase = 0, _TRAINING if torch.is_grad_enabled() else "evaluating"
        iterator = iter(batches)
        try:
            while True:
                self._loading = True
                self._steps += 1
                batch = next(iterator, None)
                if batch is None:
                    return
                self._batch, self._loading = self._batch + 1, False
                self._trained += self._phase == _TRAINING
                self._steps += 1
                yield batch
        finally:
            self._idle = f"after {self._phase} batch {self._batch}"
            self._phase, self._loading = "", False
            self._steps += 1

    @contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """Context of a collective, which waits for all ranks; every rank has to use it for the same ones.

        Args:
            collective: its purpose, for messages: "for a sum".
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
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _publish(self, store: Store) -> None:
        store.set(f"beat/{self._rank}", json.dumps(asdict(self._beat())))

    def _beat(self) -> Heartbeat:
        self._number += 1
        at = f"in {self._phase} batch {self._batch}" if self._phase else self._idle
        if self._loading:
            at = f"before {self._phase} batch {self._batch + 1}, waiting for its data"
        waits, collective, host = self._waits(), self._collective, socket.gethostname()
        pace = (self._trained, self._own_s, self._all_s)
        return Heartbeat(self._number, self._steps, at, host, os.getpid(), pid_space(), waits, collective, *pace)

    def _waits(self) -> bool:
        frame = sys._current_frames().get(self._loop)
        inside = frame is not None and str(frame.f_globals.get("__name__")).startswith(_WAITING)
        return inside or bool(self._collective)

    def _run(self) -> None:
        try:
            store = self._store.clone()  # in this thread, as it takes 5 s if hostnames can't be resolved
        except RuntimeError:  # the store has ended, which is reported elsewhere
            return
        store.set_timeout(timedelta(seconds=max(2.0, 2 * self._every_s)))
        steps, since = -1, time.monotonic()
        before = compared = since
        while not self._sampled():
            now = time.monotonic()
            watched = bool(self._phase) or self._waits()
            if self._steps != steps or not watched or now - before > 3 * self._every_s + 1:
                steps, since = self._steps, now  # progress; or the whole process, or machine, was suspended
            before = now
            with suppress(RuntimeError):  # the store has ended, which is reported elsewhere
                self._publish(store)
                if not self._rank and now - compared >= _WINDOW_S:
                    compared = now
                    self._compare(store)
            if now - since >= self._timeout_s:
                stall = self._find_stall(store)
                if self._steps == steps and not self._closed.is_set():
                    self._end(stall)
                    return
                before = time.monotonic()

    def _sampled(self) -> bool:
        """Look some times, until the next heartbeat, whether the loop waits for others; True if the watchdog is closed.

        For what a collective of every step would tell at the price of one.
        """
        until = before = time.monotonic()
        until += self._every_s
        while before < until:
            if self._closed.wait(min(_SAMPLE_S, self._every_s)):
                return True
            now = time.monotonic()
            if self._phase == _TRAINING:
                self._all_s += now - before
                self._own_s += (now - before) * (self._loading or not self._waits())
            before = now
        return False

    def _compare(self, store: Store) -> None:
        beats = self._read(store)
        if all(beats):
            found = [beat for beat in beats if beat]
            self._stragglers.window([beat.pace for beat in found], [f"{beat.host} (pid {beat.pid})" for beat in found])

    def _find_stall(self, store: Store) -> Stall:
        """Read all heartbeats twice, and publish this rank's own in between."""
        try:
            earlier = self._read(store)
            for _ in range(3):
                self._closed.wait(self._every_s)
                self._publish(store)
            return find_stalled_rank(earlier, self._read(store), self._timeout_s)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:120]
            return Stall(
                f"rank {self._rank} on {socket.gethostname()} has made no progress for {self._timeout_s:g} s, and "
                f"the ranks' store doesn't answer ({reason}); check the machine of rank 0",
                None,
            )

    def _read(self, store: Store) -> list[Heartbeat | None]:
        keys = [f"beat/{rank}" for rank in range(self._world_size)]
        return [Heartbeat(**json.loads(store.get(key))) if store.check([key]) else None for key in keys]


def pid_space() -> str:
    """The PID namespace of this process: if two are equal, equal PIDs are the same process."""
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
            os.kill(beat.pid, signal.SIGKILL)  # a stopped process handles no other signal
    sys.stdout.flush()
    os._exit(RankError.exit_code)  # the training thread still waits for the stalled rank

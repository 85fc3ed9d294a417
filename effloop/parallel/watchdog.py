"""A watchdog that finds the rank that the others wait for."""

from __future__ import annotations

import atexit
import json
import math
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
from functools import partial
from typing import TypeAlias, cast

from effloop.batch import Batch
from effloop.errors import RankError, warn
from effloop.lazy import Store, dist, torch
from effloop.parallel.rendezvous import RankGroup, within
from effloop.system.processes import this_system

_WAITING = (
    "torch.accelerator",
    "torch.autograd.graph",
    "torch.cuda",
    "torch.distributed",
    "effloop.parallel.ddp",
    "effloop.system.gpu",
)
"""Modules that wait for other ranks: in backward, in collectives, or for a GPU that runs them."""
_TRAINING = "training"
_SAMPLE_S = 0.05
_WINDOW_S = 10.0  # after which the ranks' paces are compared
_JOIN_S = 5.0  # for a thread to end; it may be waiting for a store that has ended
_GONE_S = 10.0  # for a rank to say itself that another one has ended, and the store with it
_ANSWER_S = 5.0

# A straggler takes so many times as long as the median, and costs the others this share of their time, in windows of so
# many batches, twice in a row: a moment's load is no reason.
_FACTOR, _SHARE, _LEAST_BATCHES = 2.5, 0.25, 10


@dataclass(frozen=True)
class Heartbeat:
    """The state of a rank, published about once a second."""

    number: int  # of the heartbeat
    # progress: one for each batch requested, one for each received, one for each end of an epoch or evaluation, and two
    # for each collective
    steps: int
    at: str  # the progress, for messages
    host: str  # of the rank
    pid: int
    # the PID namespace of `pid`, see `this_system`: if two are equal, equal PIDs are the same process
    space: Sequence[str]
    waits: bool = False  # whether the loop is inside torch's backward or a collective, which wait for the other ranks
    collective: str = ""  # purpose of the current collective, for messages; empty outside of one
    batches: int = 0  # that it has trained on
    own_s: float = 0.0  # seconds of that in which it didn't wait for others: it loaded, computed, or slept
    all_s: float = 0.0  # seconds of that


def find_straggler(before: Sequence[Heartbeat], now: Sequence[Heartbeat]) -> tuple[int, float, float] | None:
    """The rank that the others wait for in every step, between two heartbeats of each rank.

    A slow rank is busy where the others wait for it. Backward passes count as waiting, as nobody can tell there; a rank
    that is slow throughout is as much slower outside of them.

    Returns:
        Its number, how much longer it takes than the median of the others, and the share of the time that they lose;
        None if no rank stands out.
    """
    batches = [new.batches - old.batches for old, new in zip(before, now, strict=True)]
    all_s = [new.all_s - old.all_s for old, new in zip(before, now, strict=True)]
    if len(now) < 2 or min(batches) < _LEAST_BATCHES or min(all_s) <= 0:
        return None
    own = [(new.own_s - old.own_s) / count for old, new, count in zip(before, now, batches, strict=True)]
    slowest = max(range(len(own)), key=own.__getitem__)
    others = statistics.median(value for rank, value in enumerate(own) if rank != slowest)
    lost = (own[slowest] - others) / (all_s[slowest] / batches[slowest])
    if own[slowest] < _FACTOR * others or lost < _SHARE:
        return None
    return slowest, own[slowest] / max(others, 1e-4), lost


class Stragglers:
    """Compares the ranks window by window, and warns once of each that stands out in two in a row."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._before: Sequence[Heartbeat] = ()
        self._suspect = -1
        self._warned: set[int] = set()

    def window(self, now: Sequence[Heartbeat]) -> None:
        """A window has passed; `now` has each rank's last heartbeat."""
        found = find_straggler(self._before, now) if self._before else None
        rank, factor, lost = found or (-1, 0.0, 0.0)
        if found and rank == self._suspect and rank not in self._warned:
            self._warned.add(rank)
            self._warn(
                f"rank {rank} on {now[rank].host} (pid {now[rank].pid}) holds the others up: it takes "
                f"{min(factor, 99):.1f} times as long as they do for its own part of a step, and they wait {lost:.0%} "
                "of the time; look at its machine, GPU and data"
            )
        self._before, self._suspect = now, rank


Stall: TypeAlias = tuple[str, Heartbeat | None]
"""Why the ranks make no progress: a line, and the last heartbeat of the stalled rank, if that is known."""


def find_stalled_rank(
    earlier: Sequence[Heartbeat | None], later: Sequence[Heartbeat | None], timeout_s: float
) -> Stall:
    """Find the rank that the others wait for, by a heartbeat of each, None if it has sent none, and a later one."""
    beats = [beat for beat in later if beat]
    purpose = next((f", {beat.collective}" for beat in beats if beat.collective), "")

    def unanswered(rank: int, beat: Heartbeat, hint: str) -> Stall:
        who = f"rank {rank} on {beat.host} (pid {beat.pid}) has not answered for {timeout_s:g} s"
        return f"{who}: the others wait for it {beat.at}{purpose}; {hint}", beat

    for rank, (before, now) in enumerate(zip(earlier, later, strict=True)):
        if now is None:
            return f"rank {rank} has sent no heartbeat for {timeout_s:g} s: the others wait for it{purpose}", None
        if before == now:
            return unanswered(rank, now, "it has stopped, or its machine is gone")
    rank, behind = min(enumerate(beats), key=lambda pair: (pair[1].steps, pair[1].waits))
    if all((beat.steps, beat.waits) == (behind.steps, behind.waits) for beat in beats):
        return (
            f"no rank has made progress for {timeout_s:g} s: all {len(beats)} are {behind.at}{purpose}; "
            "check the network between them, or raise parallel.timeout_s"
        ), None
    return unanswered(rank, behind, "raise parallel.timeout_s if it needs longer")


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
        self._gone = False  # the store, with the process that serves it
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._run, self._beat)]

    def start(self) -> None:
        """Start to watch the calling thread."""
        self._loop = threading.get_ident()
        self._publish(self._store)  # so that the others know its pid
        atexit.register(self.close)  # a process must not end while the thread uses the store
        for thread in self._threads:
            thread.start()

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
        """Context of a collective, which waits for all ranks; `collective` is its purpose, as in "for a sum"."""
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
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_JOIN_S)

    def _publish(self, store: Store) -> None:
        self._number += 1
        at = f"in {self._phase} batch {self._batch}" if self._phase else self._idle
        if self._loading:
            at = f"before {self._phase} batch {self._batch + 1}, waiting for its data"
        process = socket.gethostname(), os.getpid(), this_system()
        pace = self._trained, self._own_s, self._all_s
        beat = Heartbeat(self._number, self._steps, at, *process, self._waits(), self._collective, *pace)
        store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def _waits(self) -> bool:
        frame = sys._current_frames().get(self._loop)
        inside = frame is not None and str(frame.f_globals.get("__name__")).startswith(_WAITING)
        return inside or bool(self._collective)

    def _beat(self) -> None:
        """Publish heartbeats, in a thread of its own: a store whose machine is gone holds whoever asks it."""
        with suppress(RuntimeError):  # the store has ended
            self._store = store = self._store.clone()  # here, as it takes 5 s if hostnames can't be resolved
            store.set_timeout(timedelta(seconds=max(2.0, 2 * self._every_s)))
            compared = time.monotonic()
            while not self._closed.wait(self._every_s):
                with suppress(dist.DistStoreError):  # it is slow, not gone
                    self._publish(store)
                    if not self._rank and time.monotonic() - compared >= _WINDOW_S:
                        compared = time.monotonic()
                        if all(beats := self._read(store)):
                            self._stragglers.window(cast("list[Heartbeat]", beats))
        self._gone = not self._closed.is_set()

    def _run(self) -> None:
        steps, since = -1, time.monotonic()
        before = since
        while not self._sampled():
            now = time.monotonic()
            watched = bool(self._phase) or self._waits()
            if self._steps != steps or not watched or now - before > 3 * self._every_s + 1:
                steps, since = self._steps, now  # progress; or the whole process, or machine, was suspended
            before = now
            if now - since >= min(self._timeout_s, _GONE_S if self._gone else math.inf):
                stall = self._find_stall()
                if self._steps == steps and not self._closed.is_set():
                    self._end(stall)
                    return
                before = time.monotonic()

    def _sampled(self) -> bool:
        """Until the next heartbeat, sample whether the loop waits for others; True if the watchdog is closed."""
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

    def _find_stall(self) -> Stall:
        """Read all heartbeats twice, with so much time in between that each rank has published another."""
        pause_s = 3 * self._every_s

        def look(store: Store) -> Stall:
            earlier = self._read(store)
            self._closed.wait(pause_s)
            return find_stalled_rank(earlier, self._read(store), self._timeout_s)

        try:
            return within(pause_s + _ANSWER_S, partial(look, self._store))
        except (RuntimeError, TimeoutError):
            host = f" on {RankGroup.current.peers[0].host}" if RankGroup.current else ""
            return (
                f"rank 0{host}, whose machine has the ranks' store, has not answered rank {self._rank} on "
                f"{socket.gethostname()}; it has ended, or its machine or network is gone"
            ), None

    def _read(self, store: Store) -> list[Heartbeat | None]:
        keys = [f"beat/{rank}" for rank in range(self._world_size)]
        if store.check(keys):  # all of them in one request: each of 512 ranks may ask at the same time
            return [Heartbeat(**json.loads(beat)) for beat in store.multi_get(keys)]
        return [Heartbeat(**json.loads(store.get(key))) if store.check([key]) else None for key in keys]


def end_all(report: Callable[[str], None], stall: Stall) -> None:
    """Report a stall, kill the stalled rank if it is on this machine, and end this process."""
    line, beat = stall
    report(line)
    if beat and all(beat.space) and tuple(beat.space) == this_system() and beat.pid != os.getpid():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(beat.pid, signal.SIGKILL)  # a stopped process handles no other signal
    sys.stdout.flush()
    os._exit(RankError.exit_code)  # the training thread still waits for the stalled rank

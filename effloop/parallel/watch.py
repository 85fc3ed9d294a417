"""Who watches over the ranks: it finds the one that the others wait for."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from effloop.batch import Batch

_EXIT_CODE = 2
_WAITING = ("torch.autograd.graph", "torch.distributed")


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself, about once a second.

    Attributes:
        number: of the beat.
        steps: how far the rank is: one for each batch asked for, one for each that came, one for each end.
        at: the same for people.
        host, pid: where it is.
        space: of process numbers, which a pid belongs to.
        waits: whether the loop is inside torch's backward or a collective, which wait for the other ranks.
    """

    number: int
    steps: int
    at: str
    host: str
    pid: int
    space: str
    waits: bool = False


@dataclass(frozen=True)
class Verdict:
    """Why the ranks don't go on.

    Attributes:
        line: what people are to read.
        beat: of the rank that is to blame; None if it can't be said.
    """

    line: str
    beat: Beat | None


def verdict(earlier: Sequence[Beat | None], later: Sequence[Beat | None], timeout_s: float) -> Verdict:
    """Which rank the others wait for.

    Args:
        earlier: the ranks' beats; None where a rank has had none.
        later: the same, some beats after that.
        timeout_s: how long nothing has gone on.
    """
    seconds = f"{timeout_s:g} s"
    for rank, (before, now) in enumerate(zip(earlier, later, strict=True)):
        if now is None:
            return Verdict(f"rank {rank} has not come for {seconds}: the others wait for it", None)
        if before == now:
            return Verdict(_line(rank, now, seconds, "it has stopped, or its machine is gone"), now)
    beats = [beat for beat in later if beat]
    rank, behind = min(enumerate(beats), key=lambda pair: (pair[1].steps, pair[1].waits))
    if all((beat.steps, beat.waits) == (behind.steps, behind.waits) for beat in beats):
        return Verdict(
            f"no rank has gone on for {seconds}: all {len(beats)} are {behind.at}; "
            "look at the network between them, or raise parallel.timeout_s",
            None,
        )
    return Verdict(_line(rank, behind, seconds, "raise parallel.timeout_s if it needs longer"), behind)


def _line(rank: int, beat: Beat, seconds: str, hint: str) -> str:
    return (
        f"rank {rank} on {beat.host} (pid {beat.pid}) has not answered for {seconds}: "
        f"the others wait for it {beat.at}; {hint}"
    )


class Watch:
    """Counts what this rank does, says so to the others, and looks at them when it doesn't go on itself.

    Args:
        store: which all ranks share; the watch has a connection of its own to it.
        rank, world_size: this one's number and how many there are.
        timeout_s: how long a rank may take for a step.
        end: called with the verdict when it took longer.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout_s: float, end: Callable[[Verdict], None]
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s, self._end = timeout_s, end
        self._every_s = min(1.0, timeout_s / 5)
        self._steps, self._batch, self._doing = 0, 0, ""
        self._number, self._loop = 0, threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="effloop-watch")

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, counted: two numbers are set for each."""
        self._loop = threading.get_ident()
        self._doing = "training" if torch.is_grad_enabled() else "evaluating"
        if self._thread.ident is None and not self._over.is_set():
            self._store.set(f"beat/{self._rank}", json.dumps(asdict(self._beat())))  # so that others know its pid
            self._thread.start()
        iterator = iter(batches)
        self._batch = 0
        try:
            while True:
                self._steps += 1  # odd: it waits
                batch = next(iterator, None)
                if batch is None:
                    return
                self._batch += 1
                self._steps += 1
                yield batch
        finally:
            self._steps += self._steps % 2
            self._doing = ""

    def close(self) -> None:
        """Stop watching; other ranks may have ended by now."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _beat(self) -> Beat:
        self._number += 1
        at = "between epochs"
        if self._doing:
            at = f"in {self._doing} batch {self._batch}"
            if self._steps % 2:
                at = f"before {self._doing} batch {self._batch + 1}, for whose data it waits"
        return Beat(self._number, self._steps, at, socket.gethostname(), os.getpid(), pid_space(), self._waits())

    def _waits(self) -> bool:
        frame = sys._current_frames().get(self._loop)
        return frame is not None and str(frame.f_globals.get("__name__")).startswith(_WAITING)

    def _run(self) -> None:
        store = self._store.clone()
        store.set_timeout(timedelta(seconds=max(2.0, 2 * self._every_s)))
        steps, since = -1, time.monotonic()
        before = since
        while not self._over.wait(self._every_s):
            now = time.monotonic()
            if self._steps != steps or not self._doing or now - before > 3 * self._every_s + 1:
                steps, since = self._steps, now  # it goes on; or the whole process, or machine, has been asleep
            before = now
            with suppress(RuntimeError):  # the store has gone, which says itself what is wrong
                store.set(f"beat/{self._rank}", json.dumps(asdict(self._beat())))
            if now - since >= self._timeout_s:
                found = self._look(store)
                if self._steps == steps and not self._over.is_set():
                    self._end(found)
                    return
                before = time.monotonic()

    def _look(self, store: Store) -> Verdict:
        """Read all beats twice; this rank's own goes on in between."""
        try:
            earlier = self._read(store)
            for _ in range(3):
                self._over.wait(self._every_s)
                store.set(f"beat/{self._rank}", json.dumps(asdict(self._beat())))
            return verdict(earlier, self._read(store), self._timeout_s)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:120]
            return Verdict(
                f"rank {self._rank} on {socket.gethostname()}: nothing has gone on for {self._timeout_s:g} s, and "
                f"where the ranks meet doesn't answer ({reason}); look at the machine of rank 0",
                None,
            )

    def _read(self, store: Store) -> list[Beat | None]:
        keys = [f"beat/{rank}" for rank in range(self._world_size)]
        return [Beat(**json.loads(store.get(key))) if store.check([key]) else None for key in keys]


def pid_space() -> str:
    """Which processes a pid numbers: the same text only for those who number them alike."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return f"unknown to {os.getpid()}"


def end_all(tell: Callable[[str], None], found: Verdict) -> None:
    """Say a verdict, end the rank to blame if it is on this machine, and this process."""
    tell(found.line)
    beat = found.beat
    if beat and beat.space == pid_space() and beat.pid != os.getpid():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(beat.pid, signal.SIGKILL)  # it may be stopped, and then heeds nothing else
    sys.stdout.flush()
    os._exit(_EXIT_CODE)  # the loop's thread waits for a rank that won't come

"""Sides that take turns, as a machine's speed drifts by 10 % within a minute: in this process, or in one for each."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from effloop.config.overrides import key_of
from effloop.errors import PROGRAM, ConfigError
from effloop.registry import choices, explained, line_of, plugin_words
from effloop.system.files import explained_writing
from effloop.system.hardware import keep_freed_memory
from effloop.system.memory import memory_of
from effloop.system.signals import ignore_interrupts

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """One turn of a training loop."""

    images_per_s: float  # of the loop as a whole
    wait: float = 0.0  # share of its time in which it waited for data


def in_turns(
    sides: Mapping[K, Callable[[], T]], until: int | Callable[[Mapping[K, list[T]]], bool], warm_up: int = 0
) -> dict[K, list[T]]:
    """What each side, a function that measures once, returns, turn by turn; every other round is in reverse order.

    `until` is how many rounds, or gets all turns after each round and returns whether to stop; results of the `warm_up`
    rounds before these are dropped.
    """
    turns: dict[K, list[T]] = {name: [] for name in sides}
    number = 0
    while True:
        for name in list(sides)[:: -1 if number % 2 else 1]:
            found = sides[name]()
            if number >= warm_up:
                turns[name].append(found)
        number += 1
        rounds = number - warm_up
        if rounds > 0 and (rounds >= until if isinstance(until, int) else until(turns)):
            return turns


def ratio_of(new: Sequence[float], old: Sequence[float]) -> tuple[float, float]:
    """Turns of two sides -> the median of their ratios, round by round, and its median absolute deviation."""
    ratios = [one / max(other, 1e-9) for one, other in zip(new, old, strict=True)]  # 0: out of memory
    middle = statistics.median(ratios)
    return middle, statistics.median(abs(ratio - middle) for ratio in ratios)


def for_seconds(items: Iterable[T], seconds: float, at_least: int = 1) -> Iterator[T]:
    """The first items: those before the time is over, and `at_least` so many in any case."""
    end = time.perf_counter() + seconds
    for number, item in enumerate(items, start=1):
        yield item
        del item  # frees its memory for the next one
        if number >= at_least and time.perf_counter() >= end:
            return


def chosen(key: str, words: str, names: Collection[str], what: str) -> list[str]:
    """The names in an option's value, with commas between; `all` stands for all."""
    found = list(names) if words == "all" else list(dict.fromkeys(words.split(",")))
    for name in found:
        if name not in names:
            raise ConfigError(f"{key}: no {what} '{name}'; {choices(name, ['all', *names])}")
    return found


def run_command(words: Sequence[str], new: Sequence[str], name: str = "") -> str:
    """The command line of a run with other overrides, instead of those of the same keys."""
    keys = {key_of(word) for word in new}
    kept = [word for word in words if key_of(word) not in keys]
    return f"{PROGRAM} {shlex.join([*filter(None, [name]), *kept, *new, *plugin_words()])}"


def output_folder(out: Path | None, name: str) -> Path:
    """A folder for figures, made before minutes of work: `out`, or outputs/NAME/DATE/TIME.

    Raises:
        ConfigError: it can't be made.
    """
    folder = out or Path("outputs") / name / time.strftime("%Y-%m-%d/%H-%M-%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: {folder} can't be made: {error.strerror or error}; set out=FOLDER") from None
    return folder


@contextmanager
def scratch_folder(work: str) -> Iterator[Path]:
    """A temporary folder in `work`, or in the system's if that is empty."""
    parent = Path(work or tempfile.gettempdir())
    with explained_writing("work", parent, "set work=FOLDER"):
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="effloop-bench-", dir=parent) as folder:
            yield Path(folder)


@contextmanager
def apart(name: str, build: Callable[[], Callable[[], T]], *, reuse_memory: bool = False) -> Iterator[Callable[[], T]]:
    """A side in a process of its own, so that no side shares another's threads, or what can't be undone in a process.

    `build` makes, there, the function that measures once; it can be pickled. `name` is for messages.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, build, reuse_memory), name=f"effloop-measure-{name}")
    process.start()
    there.close()

    def answer() -> Any:
        try:
            line, found = here.recv()
        except (EOFError, OSError):
            raise ConfigError(f"{name} has ended; its message is above") from None
        if line:
            raise ConfigError(line if name == "effloop" else f"{name}: {line}")
        return found

    def measure() -> Any:
        with suppress(OSError):  # it has ended, which `answer` reports
            here.send(None)
        return answer()

    try:
        answer()  # it is built
        yield measure
    finally:
        here.close()
        process.join(10)
        process.kill()


def _serve(requests: Connection, build: Callable[[], Callable[[], Any]], reuse_memory: bool) -> None:
    """Build, then measure once for each request until the other end is closed; answers are (error line, result)."""
    ignore_interrupts()  # the parent process ends this one
    multiprocessing.set_start_method("fork", force=True)  # Linux's own until Python 3.14, for the baselines' workers
    if reuse_memory:
        keep_freed_memory()  # for all sides alike

    def tried(call: Callable[[], T]) -> T | None:
        line, found = "", None
        try:
            found = call()
        except Exception as error:  # of a baseline's, any
            failure = explained(error)
            line = line_of(failure) if failure else f"{type(error).__name__}: {error}"
        requests.send((line, None if call is build else found))
        return found

    with suppress(EOFError, OSError):  # the parent process is done
        measure = tried(build)
        while measure:
            requests.recv()
            tried(measure)


def process_tree() -> list[int]:
    """Ids of this process, its children and theirs."""
    found = [os.getpid()]
    for pid in found:  # grows as their children are found
        with suppress(OSError):  # it has just ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def cpu_seconds() -> float:
    """CPU time of this process with all its threads, and of the children that run."""
    total, ticks = time.process_time(), os.sysconf("SC_CLK_TCK")
    for pid in process_tree()[1:]:
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def held_bytes() -> int:
    """Memory of this process and its children without pages of files; what they share counts once."""
    total = 0
    for pid in process_tree():
        with suppress(OSError):
            total += memory_of(pid)["held"]
    return total

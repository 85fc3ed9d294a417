"""Loaders, or whole trainings, side by side: each in a process of its own, measured in turns, shown in one table."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from effloop import config as configs
from effloop.bench.baselines import Epoch, Work, num_workers
from effloop.config import Config
from effloop.errors import ConfigError, EffLoopError
from effloop.system.hardware import available_cores, keep_freed_memory
from effloop.system.memory import memory_of
from effloop.system.processes import ignore_interrupts

Figures = dict[str, float]
"""Of an epoch: `per_s` images, `cores_used`, the share of time `waited`, `bytes` of memory."""

Row = Callable[[], Figures]
"""Goes through one epoch in its own process."""


@contextmanager
def served(name: str, build: Callable[[Work], Epoch], work: Work) -> Iterator[Row]:
    """A process that goes through an epoch whenever it is called, so that none shares another's threads.

    Raises:
        ConfigError: the loader can't be built.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, build, work), name=f"effloop-bench-{name}")
    process.start()
    there.close()
    try:
        with suppress(EOFError):
            line = here.recv()
            if line:
                raise ConfigError(line if name == "effloop" else f"{name}: {line}")
        yield partial(_epoch_of, name, here)
    finally:
        here.close()
        process.join(10)
        process.kill()


def _epoch_of(name: str, process: Connection) -> Figures:
    try:
        process.send(None)
        return cast(Figures, process.recv())
    except (EOFError, OSError):
        raise ConfigError(f"{name} has ended; what it said stands above") from None


def _serve(orders: Connection, build: Callable[[Work], Epoch], work: Work) -> None:
    """What the process does until the other end is closed."""
    ignore_interrupts()
    multiprocessing.set_start_method("fork", force=True)  # Linux's own until Python 3.14, for the peers' workers
    if work.config.reuse_memory:
        keep_freed_memory()  # for all alike
    try:
        epoch = build(work)
    except Exception as error:  # of a peer's, any
        orders.send(str(error) if isinstance(error, EffLoopError) else f"{type(error).__name__}: {error}")
        return
    orders.send(None)
    while _told(orders):
        figures = _measured(epoch)
        with suppress(OSError):  # nobody waits for them any more
            orders.send(figures)


def _told(orders: Connection) -> bool:
    """Wait for an order; False if none will come."""
    try:
        orders.recv()
    except (EOFError, OSError):
        return False
    return True


def _measured(epoch: Epoch) -> Figures:
    started, cpu = time.perf_counter(), _cpu_seconds()
    images, waited = epoch()
    seconds = time.perf_counter() - started
    return {
        "per_s": images / seconds,
        "cores_used": (_cpu_seconds() - cpu) / seconds,
        "waited": waited / seconds,
        "bytes": _bytes(),
    }


def _family() -> list[int]:
    """This process, its children and theirs."""
    found = [os.getpid()]
    for pid in found:  # grows as their children are found
        with suppress(OSError):  # it has just ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _cpu_seconds() -> float:
    """Of this process, its threads, and the children that run."""
    total, ticks = time.process_time(), os.sysconf("SC_CLK_TCK")
    for pid in _family()[1:]:
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def _bytes() -> int:
    """Memory that is of no file, of this process and its children; what they share counts once."""
    total = 0
    for pid in _family():
        with suppress(OSError):
            total += memory_of(pid)["held"]
    return total


_COLUMNS = (
    *("loader", "images/s", "least", "most", "effloop over it"),
    *("per core used", "cores used", "waiting", "MB of memory"),
)


def result_of(what: str, config: Config, about: str, turns: Mapping[str, list[Figures]]) -> dict[str, Any]:
    """What goes to JSON."""
    return {
        "what": what,
        "data": about,
        "engine": config.engine.name,
        "decode": config.decode.name,
        "augment": configs.to_dict(config)["augment"],
        "batch_size": config.batch_size,
        "image_size": config.image_size,
        "num_workers": num_workers(config),
        "cores": available_cores(),
        "loaders": {name: {key: [turn[key] for turn in found] for key in found[0]} for name, found in turns.items()},
    }


def show(result: Mapping[str, Any], repeats: int) -> None:
    """Print the table of a result."""
    table = Table(title=f"{result['data']}; {repeats} epochs each, in turns; {result['num_workers']} workers")
    for heading in _COLUMNS:
        table.add_column(heading, justify="left" if heading == "loader" else "right")
    medians = {name: statistics.median(found["per_s"]) for name, found in result["loaders"].items()}
    for name, found in result["loaders"].items():
        cores, waited, used = (statistics.median(found[key]) for key in ("cores_used", "waited", "bytes"))
        speed = [f"{value:,.0f}" for value in (medians[name], min(found["per_s"]), max(found["per_s"]))]
        rest = [f"{medians[name] / cores:,.0f}", f"{cores:.2f}", f"{waited:.0%}", f"{used / 1e6:,.0f}"]
        table.add_row(name, *speed, f"{medians['effloop'] / medians[name]:.2f}", *rest)
    Console(width=max(110, Console().width)).print(table)
    print("medians; effloop over it: effloop's images/s over this one's")

"""Loaders, or whole trainings, compared: each in a process of its own, interleaved, shown in one table."""

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

from effloop import config as configs
from effloop.assemble.resolve import num_workers
from effloop.bench.baselines import EpochRunner, Workload
from effloop.bench.gil import GilProbe
from effloop.bench.tables import print_table
from effloop.config import Config
from effloop.errors import ConfigError, EffLoopError
from effloop.system.hardware import available_cores, keep_freed_memory
from effloop.system.memory import memory_of
from effloop.system.signals import ignore_interrupts

Measurement = dict[str, float]
"""Of an epoch: images `per_s`, `cores_used`, the share of time `waited` for batches, `bytes` of memory, and, where no
child process loads, `gil_us`: how long the process held the GIL for each image.
"""

MeasureEpoch = Callable[[], Measurement]
"""Measures one epoch in a process of its own."""


@contextmanager
def epoch_process(name: str, build: Callable[[Workload], EpochRunner], workload: Workload) -> Iterator[MeasureEpoch]:
    """A process that runs an epoch at each call, so that no side shares another's threads.

    Raises:
        ConfigError: what it is to run can't be built.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, build, workload), name=f"effloop-bench-{name}")
    process.start()
    there.close()
    try:
        with suppress(EOFError):
            line = here.recv()
            if line:
                raise ConfigError(line if name == "effloop" else f"{name}: {line}")
        yield partial(_request_epoch, name, here)
    finally:
        here.close()
        process.join(10)
        process.kill()


def _request_epoch(name: str, process: Connection) -> Measurement:
    try:
        process.send(None)
        return cast(Measurement, process.recv())
    except (EOFError, OSError):
        raise ConfigError(f"{name} has ended; what it said stands above") from None


def _serve(requests: Connection, build: Callable[[Workload], EpochRunner], workload: Workload) -> None:
    """Run an epoch for each request until the other end is closed."""
    ignore_interrupts()  # the parent process ends this one
    multiprocessing.set_start_method("fork", force=True)  # Linux's own until Python 3.14, for the baselines' workers
    if workload.config.reuse_memory:
        keep_freed_memory()  # for all sides alike
    try:
        epoch = build(workload)
    except Exception as error:  # of a baseline's, any
        requests.send(str(error) if isinstance(error, EffLoopError) else f"{type(error).__name__}: {error}")
        return
    requests.send(None)
    while _next_request(requests):
        measurement = _measure(epoch)
        with suppress(OSError):  # nobody waits for it any more
            requests.send(measurement)


def _next_request(requests: Connection) -> bool:
    """Wait for a request; False if there won't be one."""
    try:
        requests.recv()
    except (EOFError, OSError):
        return False
    return True


def _measure(epoch: EpochRunner) -> Measurement:
    with GilProbe() as gil:
        started, cpu = time.perf_counter(), cpu_seconds()
        num_images, waited_s = epoch()
        seconds = time.perf_counter() - started
    alone = len(_process_tree()) == 1
    return {
        "per_s": num_images / seconds,
        "cores_used": (cpu_seconds() - cpu) / seconds,
        "waited": waited_s / seconds,
        "bytes": _memory_bytes(),
        **({"gil_us": gil.share * seconds / num_images * 1e6} if alone else {}),
    }


def _process_tree() -> list[int]:
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
    for pid in _process_tree()[1:]:
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def _memory_bytes() -> int:
    """Memory of this process and its children, without pages of files; what they share counts once."""
    total = 0
    for pid in _process_tree():
        with suppress(OSError):
            total += memory_of(pid)["held"]
    return total


_COLUMNS = (
    *("loader", "images/s", "least", "most", "effloop over it"),
    *("per core used", "cores used", "waiting", "MB of memory", "GIL µs"),
)


def comparison_result(what: str, config: Config, data: str, rounds: Mapping[str, list[Measurement]]) -> dict[str, Any]:
    """The figures as they go to JSON.

    Args:
        what: the benchmark's name.
        config: of EffLoop's side.
        data: what was loaded, in words.
        rounds: side -> its measurements.
    """
    return {
        "what": what,
        "data": data,
        "engine": config.engine.name,
        "decode": config.decode.name,
        "augment": configs.to_dict(config)["augment"],
        "batch_size": config.batch_size,
        "image_size": config.image_size,
        "num_workers": num_workers(config),
        "cores": available_cores(),
        "loaders": {name: _by_figure(found) for name, found in rounds.items()},
    }


def _by_figure(found: list[Measurement]) -> dict[str, list[float]]:
    """The values of each figure that all of a side's epochs have."""
    return {key: [each[key] for each in found] for key in found[0] if all(key in each for each in found)}


def print_comparison(result: Mapping[str, Any], repeats: int) -> None:
    """Print a result's table."""
    loaders = result["loaders"]
    medians = {name: statistics.median(found["per_s"]) for name, found in loaders.items()}
    rows = []
    for name, found in loaders.items():
        cores, waited, used = (statistics.median(found[key]) for key in ("cores_used", "waited", "bytes"))
        speed = [f"{value:,.0f}" for value in (medians[name], min(found["per_s"]), max(found["per_s"]))]
        gil = f"{statistics.median(found['gil_us']):,.0f}" if "gil_us" in found else ""
        rest = [f"{medians[name] / cores:,.0f}", f"{cores:.2f}", f"{waited:.0%}", f"{used / 1e6:,.0f}", gil]
        rows.append([name, *speed, f"{medians['effloop'] / medians[name]:.2f}", *rest])
    title = f"{result['data']}; {repeats} epochs each, in turns; {result['num_workers']} workers"
    print_table(_COLUMNS, rows, left=("loader",), min_width=110, title=title)
    print("medians; effloop over it: effloop's images/s over this one's; GIL µs: how long an image holds the GIL")

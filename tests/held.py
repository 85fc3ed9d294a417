"""What a loader holds in memory; a module of its own, so that a spawned process can import it."""

import gc
import multiprocessing
import tracemalloc
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

from plans import make_engine, make_plan, open_source

from effloop.system.memory import memory_of

MIB = 1 << 20


def held_after_epochs(engine: str, root: Path, epochs: Collection[int]) -> list[dict[str, float]]:
    """MiB that a loader with two workers holds when it has run these numbers of epochs.

    Returns:
        For each, `here`, this process's resident memory; `workers`, that of its children together; `python`,
        Python's own objects in this process.
    """
    plan = make_plan(open_source("folder", root), size=160)
    tracemalloc.start()
    held = []
    with closing(make_engine(engine, plan, 2)) as made:
        for epoch in range(max(epochs)):
            for _ in made.stream(epoch):
                pass
            if epoch + 1 in epochs:
                held.append(_held())
    tracemalloc.stop()
    return held


def _held() -> dict[str, float]:
    gc.collect()
    workers = sum(memory_of(child.pid or 0)["rss"] for child in multiprocessing.active_children())
    found = {"here": memory_of()["rss"], "workers": workers, "python": tracemalloc.get_traced_memory()[0]}
    return {name: number / MIB for name, number in found.items()}

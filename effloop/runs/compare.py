"""Differences between runs, as lines and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from effloop.errors import printable
from effloop.runs.reader import PLACE, Row, RunRecord, differing_values, flatten, format_value
from effloop.task import objectives

Tree: TypeAlias = Mapping[str, Any]

_KEY_PACKAGES = ("effloop", "torch", "torchvision", "numpy", "opencv-python-headless", "pillow", "timm")
"""Packages that a run's numbers depend on; changes of others rarely matter."""
_PACKAGES = "packages."
_MAX_PACKAGES = 10
PER_RUN_KEYS = ("started", "command")
"""Keys of environment.json that differ in every run."""
_IRRELEVANT_KEYS = (*PER_RUN_KEYS, "hardware.cores", "hardware.memory_gb", "variables.OMP_NUM_THREADS")
"""Keys that no result depends on: torch computes on `hardware.torch_threads`, whatever the cores and the variable."""


def environments(then: Tree, now: Tree) -> list[str]:
    """A line for each difference that results may depend on; both arguments are as in environment.json.

    At most 10 packages are named, those that compute first.
    """
    if not then:
        return ["environment: not recorded then"]
    lines = _then_now(_without(then, _IRRELEVANT_KEYS), _without(now, _IRRELEVANT_KEYS))
    packages = sorted(
        (key.removeprefix(_PACKAGES) for key in lines if key.startswith(_PACKAGES)),
        key=lambda name: (_KEY_PACKAGES.index(name) if name in _KEY_PACKAGES else len(_KEY_PACKAGES), name),
    )
    found = [line for key, line in lines.items() if not key.startswith(_PACKAGES)]
    found += [lines[_PACKAGES + name].removeprefix(_PACKAGES) for name in packages[:_MAX_PACKAGES]]
    more = len(packages) - _MAX_PACKAGES
    return [*found, f"{more} more packages"] if more > 0 else found


def inputs(then: Tree, now: Tree) -> list[str]:
    """A line for each fact of data.json that has changed, except the places of files."""
    if not then:
        return ["data: not recorded then"]
    kept = [{key: value for key, value in flatten(tree).items() if not key.endswith(".path")} for tree in (then, now)]
    return [*_then_now(*kept).values()]


def configs(then: Tree, now: Tree) -> list[str]:
    """A line for each config key that differs, except the run's place and what the environment has as a number."""
    return [*_then_now(*(_without(tree, (*PLACE, "threads", "parallel.processes")) for tree in (then, now))).values()]


def first_difference(then: Sequence[Row], now: Sequence[Row]) -> int | None:
    """Index of the first row that isn't bit-identical, up to the shorter end; None if all of these are."""
    pairs = enumerate(zip(then, now, strict=False))
    return next((index for index, (one, other) in pairs if one != other), None)


def difference_tables(found: Sequence[RunRecord]) -> list[RenderableType]:
    """Config, environment, data and result of runs: a table of what differs for each, or a line that nothing does."""
    trees: dict[str, list[Tree]] = {
        "config": [_without(run.config, PLACE) for run in found],
        "environment": [_without(run.environment, PER_RUN_KEYS) for run in found],
        "data": [_without(run.data, ()) for run in found],
        "result": [_result(run, found[0]) for run in found],
    }
    names = [run.name for run in found]
    names = names if len(set(names)) == len(names) else [str(run.path) for run in found]
    return [_difference_table(group, names, each) for group, each in trees.items()]


def _difference_table(group: str, names: Sequence[str], trees: Sequence[Tree]) -> RenderableType:
    changed = differing_values([tree for tree in trees if tree])
    if not changed:
        without = ", ".join(name for name, tree in zip(names, trees, strict=True) if not tree)
        return Text(f"{group}: " + (f"not recorded in {without}" if without else "the same"))
    table = Table(title=group, title_justify="left")
    for heading in ("", *names):
        table.add_column(Text(printable(heading)), overflow="fold")
    for key in changed:
        cells = (format_value(tree[key]) if key in tree else "-" for tree in trees)
        table.add_row(Text(printable(key)), *map(Text, cells))
    return table


def _result(run: RunRecord, first: RunRecord) -> Tree:
    """A run's progress and best scores, and where its metrics begin to differ from those of the first."""
    values = {objective: run.value(objective) for objective in objectives(first.meters)}
    index = first_difference(first.metrics, run.metrics)
    lines = f"{len(run.metrics)} lines" + ("" if index is None else f", unlike {first.name} from line {index + 1}")
    last = run.metrics[-1] if run.metrics else {}
    return {
        "state": run.state,
        "epoch": last.get("epoch"),
        "step": last.get("step"),
        **{name: None if math.isnan(value) else f"{value:.6g}" for name, value in values.items()},
        "metrics.jsonl": lines,
    }


def _without(tree: Tree, keys: Iterable[str]) -> Tree:
    """The flattened tree without some keys and without empty dicts."""
    return {key: value for key, value in flatten(tree).items() if key not in keys and value != {}}


def _then_now(then: Tree, now: Tree) -> dict[str, str]:
    """{key: a line with the key and both values} for what differs between two flat trees."""
    lines = {}
    for key in differing_values([then, now]):
        old, new = (format_value(tree[key]) if key in tree else "not there" for tree in (then, now))
        lines[key] = f"{key}: {old} then, {new} now"
    return lines

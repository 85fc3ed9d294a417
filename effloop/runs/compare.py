"""What differs between runs, in words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from effloop.runs.reader import Row, RunRecord, differing_values, flatten
from effloop.task import objectives

Tree: TypeAlias = Mapping[str, Any]

_KEY_PACKAGES = ("effloop", "torch", "torchvision", "numpy", "simplejpeg", "opencv-python-headless", "pillow", "timm")
"""Packages that compute what a run computes; of others a change matters rarely."""
_PACKAGES = "packages."
_MAX_PACKAGES, _MAX_ITEMS, _HASH_CHARS = 10, 12, 12
PER_RUN_KEYS = ("started", "command")
"""What of environment.json is another in each run."""
_IRRELEVANT_KEYS = (*PER_RUN_KEYS, "hardware.cores", "hardware.memory_gb")
"""What of it changes no number that a run computes: threads that compute are `hardware.torch_threads`."""


def environments(then: Tree, now: Tree) -> list[str]:
    """A line for each difference between two environments, as in environment.json, that results may depend on.

    Of more than 10 packages the first are named, those that compute before others.
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
    return found + [f"{len(packages) - _MAX_PACKAGES} more packages"] * (len(packages) > _MAX_PACKAGES)


def inputs(then: Tree, now: Tree) -> list[str]:
    """A line for each split or file that isn't what it was; both as in data.json."""
    lines = []
    for key in dict.fromkeys((*then, *now)):
        both = [tree.get(key) for tree in (then, now)]
        hashes = [each.get("sha256") if isinstance(each, Mapping) else each for each in both]
        if hashes[0] != hashes[1]:
            was, is_ = (describe_fingerprint(it) if isinstance(it, Mapping) else format_value(it) for it in both)
            lines.append(f"{key}: {was} then, {is_} now")
    return lines


def describe_fingerprint(fingerprint: Tree) -> str:
    """A fingerprint in words: `40 samples, 31,234 bytes, sha256 0123456789ab` (over keys, labels and sizes)."""
    counts = [f"{fingerprint[key]:,} {key}" for key in ("samples", "bytes") if isinstance(fingerprint.get(key), int)]
    return ", ".join([*counts, f"sha256 {str(fingerprint.get('sha256'))[:_HASH_CHARS]}"])


def configs(then: Tree, now: Tree) -> list[str]:
    """A line for each key of the config that differs, but the run's name."""
    return [*_then_now(_without(then, ("run",)), _without(now, ("run",))).values()]


def first_difference(then: Sequence[Row], now: Sequence[Row]) -> int | None:
    """Index of the first row that isn't equal to the bit, as far as both go; None if all of these are."""
    pairs = enumerate(zip(then, now, strict=False))
    return next((index for index, (one, other) in pairs if one != other), None)


def difference_tables(found: Sequence[RunRecord]) -> list[RenderableType]:
    """What differs between runs in config, environment, data and result: a table each, or a line that nothing does."""
    trees: dict[str, list[Tree]] = {
        "config": [_without(run.config, ("run",)) for run in found],
        "environment": [_without(run.environment, PER_RUN_KEYS) for run in found],
        "data": [_without(run.data, ()) for run in found],
        "result": [_result(run, found[0]) for run in found],
    }
    names = _names(found)
    return [_difference_table(group, names, each) for group, each in trees.items()]


def _difference_table(group: str, names: Sequence[str], trees: Sequence[Tree]) -> RenderableType:
    changed = differing_values([tree for tree in trees if tree])
    if not changed:
        without = ", ".join(name for name, tree in zip(names, trees, strict=True) if not tree)
        return Text(f"{group}: " + (f"not recorded in {without}" if without else "the same"))
    table = Table(title=group, title_justify="left")
    for heading in ("", *names):
        table.add_column(Text(heading), overflow="fold")
    for key in changed:
        cells = (format_value(tree[key]) if key in tree else "-" for tree in trees)
        table.add_row(Text(key), *map(Text, cells))
    return table


def _result(run: RunRecord, first: RunRecord) -> Tree:
    """How far a run came and what it brought; its metrics beside those of the first."""
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


def _names(found: Sequence[RunRecord]) -> list[str]:
    """Short ones, if these tell the runs apart."""
    names = [run.name for run in found]
    return names if len(set(names)) == len(names) else [str(run.path) for run in found]


def _without(tree: Tree, keys: Iterable[str]) -> Tree:
    """A flat tree without some keys, and without what is empty."""
    return {key: value for key, value in flatten(tree).items() if key not in keys and value != {}}


def _then_now(then: Tree, now: Tree) -> dict[str, str]:
    """{key: a line that names it and both values} for what differs in two flat trees."""
    lines = {}
    for key in differing_values([then, now]):
        was, is_ = (format_value(tree[key]) if key in tree else "not there" for tree in (then, now))
        lines[key] = f"{key}: {was} then, {is_} now"
    return lines


def format_value(value: object) -> str:
    """A value as it is typed; a long list is cut, and so is a hash."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        more = f",… ({len(value)})" if len(value) > _MAX_ITEMS else ""
        return f"[{','.join(map(format_value, value[:_MAX_ITEMS]))}{more}]"
    return str(value)[:_HASH_CHARS] if re.fullmatch("[0-9a-f]{40,}", str(value)) else str(value)

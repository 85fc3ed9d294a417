"""Differences between runs, as lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from effloop.errors import printable
from effloop.record.rows import flatten
from effloop.runs.reader import PLACE, RunRecord, differing_values, format_value, read_resumes

Tree: TypeAlias = Mapping[str, Any]

# Packages that a run's numbers depend on; changes of others rarely matter.
_KEY_PACKAGES = ("effloop", "torch", "torchvision", "numpy", "opencv-python-headless", "pillow", "timm")
_PACKAGES = "packages."
_MAX_PACKAGES = 10
PER_RUN_KEYS = ("started", "command")  # keys of environment.json that differ in every run
# Keys that no result depends on: torch computes on `hardware.torch_threads`, whatever the cores and the variable.
_IRRELEVANT_KEYS = (*PER_RUN_KEYS, "hardware.cores", "hardware.memory_gb", "variables.OMP_NUM_THREADS")


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
    """A line for each split or file of data.json that has changed."""
    if not then:
        return ["data: not recorded then"]
    lines = []
    for key in {**then, **now}:
        both = [tree.get(key) for tree in (then, now)]
        hashes = [each.get("sha256") if isinstance(each, Mapping) else each for each in both]
        if hashes[0] != hashes[1]:
            old, new = map(_described, both)
            lines.append(f"{key}: {old} then, {new} now")
    return lines


def _described(facts: Any) -> str:
    """A fingerprint as text: `40 samples, 31,234 bytes, sha256 0123456789ab`."""
    if not isinstance(facts, Mapping):
        return format_value(facts)
    counts = [f"{facts[key]:,} {key}" for key in ("samples", "files", "bytes") if isinstance(facts.get(key), int)]
    return ", ".join([*counts, f"sha256 {format_value(facts.get('sha256'))}"])


def configs(then: Tree, now: Tree) -> list[str]:
    """A line for each key that differs, but the run's place, and what the environment has as a number."""
    return [*_then_now(*(_without(tree, (*PLACE, "threads", "parallel.processes")) for tree in (then, now))).values()]


def differences(then: RunRecord, now: RunRecord) -> list[str]:
    """A line for each difference between two runs that their metrics may depend on."""
    lines = configs(then.config, now.config)
    for run in (then, now):
        for entry in read_resumes(run.path):
            how = " ".join(entry["overrides"]) or "the same overrides"
            where = f" in another environment: {'; '.join(entry['differs'])}" if entry["differs"] else ""
            lines.append(f"{run.path} was resumed at epoch {entry['epoch']} with {how}{where}")
    lines += environments(then.environment, now.environment) + inputs(then.data, now.data)
    return [printable(line) for line in lines]


def metrics(then: RunRecord, now: RunRecord) -> tuple[bool, str]:
    """Whether two runs' metrics are bit-identical, up to the end of the shorter one, and that in words."""
    rows = [*zip(then.metrics, now.metrics, strict=False)]
    for number, (one, other) in enumerate(rows, start=1):
        if one != other:
            lines = f"metrics.jsonl: line {number} differs", f"then {json.dumps(one)}", f"now  {json.dumps(other)}"
            return False, "\n  ".join(lines)
    longer = max(then, now, key=lambda run: len(run.metrics))
    more = len(longer.metrics) - len(rows)
    words = f"bit-identical, {len(rows)} lines" if rows else "no lines in common"
    return True, f"metrics.jsonl: {words}" + (f"; {longer.path} has {more} more" if more else "")


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

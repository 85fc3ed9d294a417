"""What differs between runs: the keys that were varied, and their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from effloop.report.values import to_text
from effloop.runs.reader import SWEEP, RunRecord, differing_values, flatten

_IDENTITY_KEYS = ("out", "run", "resume", "sweep", "objective")
"""Config keys that identify a run, but don't change how it trains."""


def swept_values(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """{key: its value in each run} for the keys that were varied.

    For the jobs of one sweep these are the overrides, as typed. For other runs they are the config keys that differ,
    without those implied by another: `optim.lr` by `lr`, and a key of one part alone, if it is constant, by the part.
    """
    sweeps = {next((path for path in run.path.parents if (path / SWEEP).is_file()), None) for run in runs}
    if len(sweeps) == 1 and all("overrides" in run.job for run in runs):
        return differing_values([_parse_overrides(run.job["overrides"]) for run in runs])
    columns = differences([run.config for run in runs])
    found = {key: values for key, values in columns.items() if key.split(".")[0] not in _IDENTITY_KEYS}
    if "model.name" in found and "model.arch" in found:  # users type model=resnet50
        models = zip(found["model.name"], found["model.arch"], strict=True)
        found["model.name"] = [arch if name == "torchvision" else name for name, arch in models]
    for part in [key.removesuffix(".name") for key in found if key.endswith(".name") and key.count(".") == 1]:
        shared = set.intersection(*(set(flatten(run.config)) for run in runs if run.config))
        names = found[f"{part}.name"]
        found = {
            key: values
            for key, values in found.items()
            if not key.startswith(f"{part}.") or key in shared or not _is_implied(values, names)
        }
    if found.get("lr") == found.get("optim.lr"):
        found.pop("optim.lr", None)
    if "amp" in found and "precision.name" in found:
        found.pop("amp" if None in found["amp"] else "precision.name")
    return {key.removesuffix(".name") if key.count(".") == 1 else key: values for key, values in found.items()}


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """{key: its last word, or the whole key where several end with it}, printable."""
    ends = {key: key.rpartition(".")[2] for key in keys}
    counts = Counter(ends.values())
    return {key: to_text(end if counts[end] == 1 else key) for key, end in ends.items()}


def differences(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """{key: its value in each tree} for what differs; an empty tree is unknown, and has None."""
    known = [index for index, tree in enumerate(trees) if tree]
    columns = differing_values([trees[index] for index in known])
    spread: dict[str, list[Any]] = {key: [None] * len(trees) for key in columns}
    for key, values in columns.items():
        for index, value in zip(known, values, strict=True):
            spread[key][index] = value
    return spread


def _is_implied(values: Sequence[Any], names: Sequence[Any]) -> bool:
    """Whether runs of the same part have the same value."""
    return all(value == values[names.index(name)] for value, name in zip(values, names, strict=True))


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """{key: value} of overrides; numbers are int or float."""
    pairs = (str(override).lstrip("+~").partition("=")[::2] for override in overrides)
    return {key: _parse_value(text) for key, text in pairs}


def _parse_value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("'\"")

"""What a checkpoint may hold: a file that was read without running code can still say anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_MOST_VALUES, _MOST_LEVELS = 5_000_000, 60
"""Far above the 20,000 values of a ResNet-50's checkpoint, 8 levels deep. A list of lists that are one and the same
takes a few bytes and is endless to walk through."""

_TYPES: dict[str, tuple[type, ...]] = {
    "config": (dict,),
    "classes": (list, tuple),
    "model": (dict,),
    "progress": (dict,),
    "target_names": (list, tuple),
    "num_outputs": (int,),
    "data": (dict,),
    "world_size": (int,),
    "trained": (dict,),
    "average": (dict,),
    "optimizer": (dict,),
    "schedule": (dict,),
    "precision": (dict,),
    "checkpoints": (dict,),
    "task": (dict,),
    "stop": (dict,),
    "metrics": (list, Tensor),
    "rng": (list, tuple),
    "buffers": (list,),
    "recorder": (dict,),
    "last": (dict,),
}
"""Of the fields that are known, what they hold; the first four have to be there. Others are for who reads them."""

_PROGRESS = ("epoch", "samples_seen", "step")
_POSITION = ("epoch", "epochs", "update", "updates", "step")
_RECORDER = ("sums", "before", "position", "lr", "span", "clock")
_MOST_TIMES = 8

REQUIRED = ("format", "config", "classes", "model", "progress")


def check(state: Mapping[str, Any]) -> None:
    """Look that fields have the types, and the position the numbers, that everything which reads them relies on.

    Raises:
        ValueError: with what is wrong.
    """
    _count(state, 0, {})
    for key, types in _TYPES.items():
        value = state.get(key)
        if key not in REQUIRED and value is None:
            continue
        if not isinstance(value, types) or isinstance(value, bool):
            raise ValueError(f"its {key} is {_said(value)}, not a {types[0].__name__}")
    for key in ("classes", "target_names"):
        if odd := [each for each in state.get(key) or () if not isinstance(each, str)]:
            raise ValueError(f"its {key} have {_said(odd[0])} among them, which is no name")
    for key in ("config", "model"):
        if odd := [each for each in state[key] if not isinstance(each, str)]:
            raise ValueError(f"its {key} has {_said(odd[0])} for a name")
    _check_position(state["progress"], state.get("schedule") or {})
    best = state["checkpoints"].get("best") if state.get("checkpoints") else {}
    if not isinstance(best, dict) or not all(isinstance(value, int | float) for value in best.values()):
        raise ValueError(f"its best scores are {_said(best)}, not numbers")
    if "epoch" in best:
        _check_count(best, "checkpoints.best", "epoch")
    if recorder := {key: value for key, value in (state.get("recorder") or {}).items() if key != "unrecorded"}:
        _check_recorder(recorder, state.get("metrics"))


def _check_position(progress: Mapping[str, Any], schedule: Mapping[str, Any]) -> None:
    for key in _PROGRESS:
        _check_count(progress, "progress", key)
    if odd := [key for key in progress if key not in _PROGRESS]:
        raise ValueError(f"its progress has {_said(odd[0])}, which is none of {', '.join(_PROGRESS)}")
    step = progress["step"]
    if progress["epoch"] > step:
        raise ValueError(f"its progress.epoch is {progress['epoch']}, of {step} updates")
    if isinstance(done := schedule.get("last_epoch"), int) and done > step:
        raise ValueError(f"its schedule.last_epoch is {done}, of {step} updates")


def _check_recorder(recorder: Mapping[str, Any], metrics: Any) -> None:
    """Look at what a recorder has of the epoch that is trained."""
    if missing := [key for key in _RECORDER if key not in recorder]:
        raise ValueError(f"its recorder has no {missing[0]}")
    count = metrics[0].numel() if isinstance(metrics, list) and metrics and isinstance(metrics[0], Tensor) else None
    for key in ("sums", "before"):
        sums = recorder[key]
        if sums is not None and not (_are_numbers(sums) and count in (None, len(sums))):
            raise ValueError(f"its recorder.{key} is {_said(sums)}, not {count or 'some'} numbers")
    for key in ("span", "clock"):
        if not _are_numbers(times := recorder[key]) or len(times) > _MOST_TIMES or not all(map(math.isfinite, times)):
            raise ValueError(f"its recorder.{key} is {_said(times)}, not a few numbers")
    if not _are_numbers([recorder["lr"]]):
        raise ValueError(f"its recorder.lr is {_said(recorder['lr'])}, not a number")
    position = recorder["position"]
    if (position is None) != (recorder["sums"] is None):
        raise ValueError(f"its recorder.position is {_said(position)}, and its recorder.sums {_said(recorder['sums'])}")
    if position is not None:
        if not isinstance(position, dict) or set(position) != set(_POSITION):
            raise ValueError(f"its recorder.position is not {', '.join(_POSITION)}")
        for key in _POSITION:
            _check_count(position, "recorder.position", key)


def _are_numbers(values: Any) -> bool:
    if not isinstance(values, list | tuple):
        return False
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _check_count(values: Mapping[str, Any], name: str, key: str) -> None:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 60:
        raise ValueError(f"its {name}.{key} is {_said(value)}, not a whole number from 0")


def _count(value: Any, level: int, counted: dict[int, int]) -> int:
    """The values in a tree, each as often as one meets it.

    Args:
        value: the tree.
        level: how deep it is in another one.
        counted: of lists and dicts by id; one that is being counted contains itself.

    Raises:
        ValueError: there are too many, or too many levels, or a tensor claims more than the file has.
    """
    if isinstance(value, Tensor):
        _check_tensor(value)
    if not isinstance(value, Mapping | list | tuple):
        return 1
    if id(value) not in counted:
        counted[id(value)] = _MOST_VALUES
        children = value.values() if isinstance(value, Mapping) else value
        found = 1 + sum(_count(child, level + 1, counted) for child in children) if level < _MOST_LEVELS else math.inf
        if found > _MOST_VALUES:
            raise ValueError("it has more values, or more levels of them, than a checkpoint can have")
        counted[id(value)] = int(found)
    return counted[id(value)]


def _check_tensor(tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has more elements than are stored of it")


def _said(value: Any) -> str:
    """A value for a message, in so many characters."""
    text = type(value).__name__ if isinstance(value, Tensor | Mapping | list | tuple) else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."

"""Tries overrides: the training loop with each, in turns beside the loop as it is."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

from effloop.config import Config
from effloop.convert.convert import convert
from effloop.convert.options import ConvertOptions
from effloop.convert.reencode import Recipe
from effloop.data.source.splits import open_split
from effloop.errors import EffLoopError, InterruptedRunError
from effloop.measure.diagnosis import Override
from effloop.measure.loops import Loop, alone, per_s, process_state_restored
from effloop.measure.measured import Measured, Progress
from effloop.measure.turns import in_turns, ratio_of, scratch_folder
from effloop.runs.environment import effloop_version
from effloop.system.hardware import available_cores

_TURN_S = 2.5
_TURNS = 3
_LEAST = 4  # batches of a turn


_MOST_IMAGES = 20_000
"""Of a dataset that is converted to see what that brings."""


def verified(found: Measured, overrides: Sequence[Override], top: int, progress: Progress) -> list[Override]:
    """Overrides with what they bring when they are tried.

    Each is measured in a process of its own, in turns with another one that trains as it is; its images/s are those of
    the diagnosed loop, times the ratio of the two. What needs a conversion is tried on a converted copy, which is
    deleted afterwards.

    Args:
        found: the run, measured.
        overrides: the best first; those that don't change the loop aren't tried, nor those that convert many images.
        top: how many are tried.
        progress: called with what is tried next.
    """
    tried = [each for each in overrides if _can_be_tried(found, each)][:top]
    rows = []
    for each in overrides:
        if each in tried:
            progress(f"trying {each.override}")
            try:
                each = replace(each, measured=found.loop.images_per_s * _tried(found, each))
            except InterruptedRunError:
                raise
            except EffLoopError as error:
                each = replace(each, why=f"{each.why}; it can't be tried: {error}")
        rows.append(each)
    return rows


def _can_be_tried(found: Measured, override: Override) -> bool:
    """Whether it changes the loop that is measured, and doesn't convert many images for it."""
    if override.recipe:
        return len(found.loader.plan.source) <= _MOST_IMAGES
    changed = found.with_overrides(*override.override.split())
    return override.images_per_s is not None and alone(changed, "progressive=[]") != alone(
        found.config, "progressive=[]"
    )


def _tried(found: Measured, override: Override) -> float:
    """Images/s with an override over images/s without.

    Raises:
        EffLoopError: it can't be measured.
    """
    with scratch_folder("") as scratch:
        words = shlex.split(override.override)
        if override.recipe:
            copy = scratch / "converted.effloop"
            _convert(found, override.recipe, copy)
            words = ["data=auto", f"data.root={copy}", "data.val_split=val"]
            words += [f"data.{key}=null" for key in ("val", "folds", "fold", "group")]  # it has both splits
        return ratio(found.config, found.with_overrides(*words), scratch)


def _convert(found: Measured, recipe: Recipe, out: Path) -> None:
    """Write both splits, re-encoded; what `convert` says is left out."""
    data = found.config.data
    splits = {split: open_split(data, split) for split in ("train", "val")}
    options = ConvertOptions(
        "memmap",
        out,
        payload="raw" if recipe.payload == "raw" else None,
        quality=None if recipe.payload == "raw" else recipe.quality,  # type: ignore[arg-type]
        max_side=(recipe.max_side,) if recipe.max_side else (),
    )
    with redirect_stdout(StringIO()):
        convert(options, splits, found.loader.plan.decoder, available_cores(), effloop_version())


def ratio(config: Config, other: Config, scratch: Path) -> float:
    """Images/s of another config's training loop over those of one.

    Args:
        config: of the one.
        other: of the other one.
        scratch: a folder for temporary files.

    Raises:
        ConfigError: one can't be built.
    """
    sides = {"as it is": config, "changed": other}
    with ExitStack() as stack, process_state_restored():
        loops = {name: stack.enter_context(closing(Loop(alone(each), scratch))) for name, each in sides.items()}
        turns = in_turns({name: each.turn for name, each in loops.items()}, _TURNS)
    return ratio_of(per_s(turns["changed"]), per_s(turns["as it is"]))[0]

"""A run done again: what differs is named before, and the numbers are compared after."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from effloop import config as configs
from effloop.cli.command import RunOptions, command
from effloop.config import Config
from effloop.data.source import Source, sources
from effloop.data.source.base import printable
from effloop.launch.execute import run
from effloop.launch.spec import RunSpec
from effloop.runs import compare
from effloop.runs.environment import describe_environment, find_checkouts
from effloop.runs.folder import initial_files, read_overrides, read_resumes
from effloop.runs.reader import RunRecord, read_run
from effloop.system.hardware import available_cores, set_reproducible

_LOOK_S = 20.0
"""For all files of the data: 1.3 million would take 8 s where the kernel has their inodes in memory."""
_NAMED = 5


@command("replay", RunOptions)
def replay(options: RunOptions, overrides: list[str]) -> int:
    """Run a run again in a new folder, and compare the numbers to the bit.

    What differs in config, environment and data is listed before.

    Returns:
        0; 1 if the numbers aren't the same though nothing is known to differ.

    Raises:
        EffLoopError: not a run folder, or what training raises.
    """
    folder = options.run
    original = read_run(folder)
    config = configs.load(folder / "config.yaml", overrides)
    differences = [*differing(original, config)]
    print("\n  ".join([f"replay of {folder}{', what differs:' if differences else ': nothing differs'}", *differences]))
    sys.stdout.flush()  # before the ranks' own lines
    config = _again(original, config, named=any(word.startswith("run=") for word in overrides))
    typed = [word for word in read_overrides(folder) if not word.startswith("run=")]
    run_dir = run(RunSpec(config, [*typed, *overrides], Path("outputs") / config.run, note=f"replay of {folder}"))
    if _compare(original, read_run(run_dir)) or differences:
        return 0
    if torch.cuda.is_available() and not config.deterministic:
        print("a GPU gives the same bits each time with deterministic=true only")
    return 1


def _again(original: RunRecord, config: Config, *, named: bool) -> Config:
    """A config for another run folder, with as many ranks, whoever had started them."""
    if not named:
        config = replace(config, run=datetime.now().strftime("%Y-%m-%d/%H-%M-%S"))
    parallel: Any = config.parallel
    return (
        replace(config, parallel=replace(parallel, processes=_ranks(original, config))) if parallel.of_ranks else config
    )


def _ranks(original: RunRecord, config: Config) -> int | None:
    """How many processes are to train; None if this machine decides."""
    parallel: Any = config.parallel
    if not parallel.of_ranks:
        return 1
    then = original.environment.get("ranks") if parallel.name == original.config["parallel"]["name"] else None
    return parallel.processes or (then if isinstance(then, int) else None)


def differing(original: RunRecord, config: Config) -> Iterator[str]:
    """A line for each thing that isn't as it was when a run began, as far as its numbers may hang on it.

    Args:
        original: the run.
        config: what it is to be done again with.

    Raises:
        ConfigError, DataError: the data isn't there, or resumed.json is damaged.
    """
    yield from compare.configs(original.config, configs.to_dict(config))
    for entry in read_resumes(original.path):
        what = " ".join(entry["overrides"]), "; ".join(entry["differs"])
        if what[0]:
            yield f"it went on from epoch {entry['epoch']} with {what[0]}, which the replay has from its beginning"
        if what[1]:
            yield f"it went on from epoch {entry['epoch']} elsewhere: {what[1]}"
    yield from compare.environments(original.environment, _environment(config, _ranks(original, config) or 1))
    names = {"train": config.data.train_split, "val": config.data.val_split}
    opened = {split: sources.build(config.data, name) for split, name in names.items()}
    prints = {split: source.fingerprint() for split, source in opened.items()}
    data = {"classes": list(opened["train"].classes), **prints, **initial_files(config)}
    yield from compare.inputs(original.data, data) if original.data else ["data: not recorded then"]
    with suppress(ValueError):  # an older run doesn't say when it was
        since = datetime.fromisoformat(str(original.environment.get("started"))).timestamp()
        yield from _changed_files([*opened.values()], since, config.data.root)


def _environment(config: Config, ranks: int) -> dict[str, Any]:
    """What the run will find."""
    if config.deterministic:
        set_reproducible(deterministic=True, cudnn_benchmark=False)  # which sets a variable
    found = describe_environment(find_checkouts(), ranks)
    if config.parallel.of_ranks and not os.environ.get("OMP_NUM_THREADS"):
        found["hardware"]["torch_threads"] = max(1, available_cores() // ranks)  # of each of them
    return found


def _changed_files(opened: Sequence[Source], since: float, root: str | None) -> Iterator[str]:
    """Lines for files that were changed after `since`, in seconds since 1970: a fingerprint doesn't read them.

    The time of a file's change is its inode's, which copying with times, moving and renaming can't set back.
    """
    until = time.monotonic() + _LOOK_S
    prefix = os.fsencode(os.path.join(os.path.abspath(root), "")) if root else b""
    names: dict[bytes, None] = {}  # packed files hold several splits
    for looked, file in enumerate(file for source in opened for file in source.files()):
        if not looked % 1000 and time.monotonic() > until:
            yield f"data: only the first {looked:,} files were looked at for changes"
            break
        if os.stat(file).st_ctime > since:
            names[file.removeprefix(prefix)] = None
    if names:
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        yield f"data: files changed since then: {', '.join(map(printable, islice(names, _NAMED)))}{more}"


def _compare(original: RunRecord, again: RunRecord) -> bool:
    """Say whether two runs' metrics are equal to the bit, as far as both go; whether they are."""
    then, now = original.metrics, again.metrics
    index = compare.first_difference(then, now)
    if index is not None:
        print(f"metrics.jsonl: line {index + 1} differs")
        print(f"  then {json.dumps(then[index])}")
        print(f"  now  {json.dumps(now[index])}")
        return False
    lines = min(len(then), len(now))
    longer = original if len(then) > lines else again
    more = f"; {longer.path} has {len(longer.metrics) - lines} more" if len(longer.metrics) > lines else ""
    print(
        f"metrics.jsonl: equal to the bit, {lines} lines{more}" if lines else f"metrics.jsonl: no lines in common{more}"
    )
    return True

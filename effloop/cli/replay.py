"""Replay a run: list what differs first, then train, then compare the metrics."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from effloop import config as configs
from effloop.cli.command import RunOptions, command
from effloop.config import Config
from effloop.config.schema import run_folder
from effloop.data.source.root import remote_files
from effloop.data.source.splits import open_split
from effloop.run.execute import run
from effloop.run.spec import RunSpec
from effloop.runs import compare
from effloop.runs.environment import describe_environment, find_checkouts
from effloop.runs.folder import initial_files, read_overrides, read_resumes
from effloop.runs.reader import RunRecord, read_run
from effloop.system.hardware import available_cores, set_reproducible, set_threads


@command("replay", RunOptions, "outputs/first")
def replay(options: RunOptions, overrides: list[str]) -> int:
    """Repeat a run in a new folder, and compare the metrics bit by bit.

    Differences in config, environment and data are listed first.

    Returns:
        0; 1 if the metrics differ though no difference was found before.
    """
    folder = options.run
    original = read_run(folder)
    config = configs.load(folder / "config.yaml", overrides)
    config = replace(config, threads=_threads(original, config))
    differences = [*find_differences(original, config)]
    print("\n  ".join([f"replay of {folder}{', what differs:' if differences else ': nothing differs'}", *differences]))
    sys.stdout.flush()  # before the ranks' own lines
    config = _replay_config(original, config, named=any(each.startswith("run=") for each in overrides))
    saved = [each for each in read_overrides(folder) if not each.startswith("run=")]
    new = Path(run_folder(config.out, config.run))
    run_dir = run(RunSpec(config, [*saved, *overrides], new, note=f"replay of {folder}"))
    if _compare(original, read_run(run_dir)) or differences:
        return 0
    if torch.cuda.is_available() and not config.deterministic:
        print("a GPU gives the same bits each time with deterministic=true only")
    return 1


def _threads(original: RunRecord, config: Config) -> int | str:
    """The original's number of threads, where this process would take another one by itself."""
    then = original.environment.get("hardware", {}).get("torch_threads")
    set_threads(config.threads)
    if config.threads != "auto" or then is None:
        return config.threads
    if config.parallel.of_ranks:  # then of each rank
        return int(then) if _num_ranks(original, config) == original.environment.get("ranks") else "auto"
    if then == torch.get_num_threads():
        return "auto"
    set_threads(then)
    return int(then)


def _replay_config(original: RunRecord, config: Config, *, named: bool) -> Config:
    """The config with another run folder, and with the original's number of ranks."""
    if not named:
        config = replace(config, run=datetime.now().strftime("%Y-%m-%d/%H-%M-%S"))
    parallel: Any = config.parallel
    if not parallel.of_ranks:
        return config
    return replace(config, parallel=replace(parallel, processes=_num_ranks(original, config)))


def _num_ranks(original: RunRecord, config: Config) -> int | None:
    """The number of processes that train; None if it depends on this machine."""
    parallel: Any = config.parallel
    if not parallel.of_ranks:
        return 1
    then = original.environment.get("ranks") if parallel.name == original.config["parallel"]["name"] else None
    return parallel.processes or (then if isinstance(then, int) else None)


def find_differences(original: RunRecord, config: Config) -> Iterator[str]:
    """A line for each difference from the original run that its metrics may depend on."""
    then = configs.to_dict(configs.from_dict(original.config, (), "its config"))  # with the keys that are new since
    yield from compare.configs(then, configs.to_dict(config))
    for entry in read_resumes(original.path):
        if overrides := " ".join(entry["overrides"]):
            yield f"it was resumed at epoch {entry['epoch']} with {overrides}, which the replay uses from the start"
        if differs := "; ".join(entry["differs"]):
            yield f"it was resumed at epoch {entry['epoch']} in another environment: {differs}"
    yield from compare.environments(original.environment, _environment(config, _num_ranks(original, config) or 1))
    opened = {split: open_split(config.data, split) for split in ("train", "val")}
    fingerprints = {split: source.fingerprint() for split, source in opened.items()}
    fingerprints |= {name: manifest.fingerprint() for name, manifest in remote_files(config.data).items()}
    data = {"classes": list(opened["train"].classes), **fingerprints, **initial_files(config)}
    yield from compare.inputs(original.data, data) if original.data else ["data: not recorded then"]


def _environment(config: Config, ranks: int) -> dict[str, Any]:
    """The environment of the replay."""
    if config.deterministic:
        set_reproducible(deterministic=True, cudnn_benchmark=False)  # it sets an environment variable
    found = describe_environment(find_checkouts(config.out), ranks)
    if config.parallel.of_ranks and isinstance(config.threads, int):
        found["hardware"]["torch_threads"] = config.threads
    elif config.parallel.of_ranks and not os.environ.get("OMP_NUM_THREADS"):
        found["hardware"]["torch_threads"] = max(1, available_cores() // ranks)  # of each rank
    return found


def _compare(original: RunRecord, replayed: RunRecord) -> bool:
    """Print and return whether two runs' metrics are bit-identical, up to the end of the shorter one."""
    then, now = original.metrics, replayed.metrics
    index = compare.first_difference(then, now)
    if index is not None:
        print(f"metrics.jsonl: line {index + 1} differs")
        print(f"  then {json.dumps(then[index])}")
        print(f"  now  {json.dumps(now[index])}")
        return False
    lines = min(len(then), len(now))
    longer = original if len(then) > lines else replayed
    more = f"; {longer.path} has {len(longer.metrics) - lines} more" if len(longer.metrics) > lines else ""
    print(f"metrics.jsonl: bit-identical, {lines} lines{more}" if lines else f"metrics.jsonl: no lines in common{more}")
    return True

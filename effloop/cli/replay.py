"""Replay a run: train again, list what differs, and compare the metrics."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from effloop import config as configs
from effloop.cli.command import RunOptions, command
from effloop.config import Config
from effloop.config.schema import run_folder
from effloop.run import run
from effloop.run.spec import RunSpec
from effloop.runs import compare
from effloop.runs.reader import RunRecord, read_overrides, read_resumes, read_run


@command("replay", RunOptions, "outputs/first")
def replay(options: RunOptions, overrides: list[str]) -> int:
    """Repeat a run in a new folder, and compare the metrics bit by bit.

    Differences in config, environment and data are listed, too.

    Returns:
        0; 1 if the metrics differ though nothing else does.
    """
    folder = options.run
    original = read_run(folder)
    read_resumes(folder)  # early: it may be damaged
    config = _as_then(configs.load(folder / "config.yaml", overrides), original)
    if not any(each.startswith("run=") for each in overrides):
        config = replace(config, run=datetime.now().strftime("%Y-%m-%d/%H-%M-%S"))
    saved = [each for each in read_overrides(folder) if not each.startswith("run=")]
    new = Path(run_folder(config.out, config.run))
    run_dir = run(RunSpec(config, [*saved, *overrides], new, note=f"replay of {folder}"))
    replayed = read_run(run_dir)
    complete = configs.to_dict(configs.from_dict(original.config, (), "its config"))  # with the keys that are new since
    differences = compare.differences(replace(original, config=complete), replayed)
    print("\n  ".join([f"replay of {folder}{', what differs:' if differences else ': nothing differs'}", *differences]))
    same, words = compare.metrics(original, replayed)
    print(words)
    if same or differences:
        return 0
    if torch.cuda.is_available() and not config.deterministic:
        print("a GPU gives the same bits each time with deterministic=true only")
    return 1


def _as_then(config: Config, original: RunRecord) -> Config:
    """The config with the original's numbers of threads and ranks, which sums depend on, where it leaves them open."""
    threads, ranks = original.environment.get("hardware", {}).get("torch_threads"), original.environment.get("ranks")
    if config.threads == "auto" and isinstance(threads, int):
        config = replace(config, threads=threads)
    parallel: Any = config.parallel
    same = parallel.of_ranks and parallel.name == original.config["parallel"]["name"]
    if same and parallel.processes is None and isinstance(ranks, int):
        config = replace(config, parallel=replace(parallel, processes=ranks))
    return config

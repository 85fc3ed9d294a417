"""`report`, `diff` and `replay`: runs beside each other."""

from __future__ import annotations

import filecmp
import os
import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from effloop import config as configs
from effloop.cli.command import RunOptions, command
from effloop.config import Config
from effloop.config.schema import run_folder
from effloop.data.source import DataConfig
from effloop.data.source.splits import open_split
from effloop.errors import PROGRAM, ConfigError, EffLoopError, printable
from effloop.registry import load_plugins
from effloop.report.files import PLOT, REPORT, SUMMARY, print_tables, write_report
from effloop.run import run
from effloop.run.spec import RunSpec
from effloop.runs import compare, reader
from effloop.system import gpu
from effloop.task import check_objective


@dataclass(frozen=True)
class RunsOptions:
    """Options of commands for several runs.

    Attributes:
        runs: folders of runs, or of sweeps, which stand for all their jobs.
    """

    runs: tuple[Path, ...] = field(metadata={"positional": "RUN"})


@dataclass(frozen=True)
class ReportOptions(RunsOptions):
    """Options of `report`.

    Attributes:
        out: where the report goes; without it the one folder that is named, or outputs/reports/DATE/TIME.
        objective: what the runs are compared by; without it what they were made for.
    """

    out: Path | None = None
    objective: str | None = None


@command("report", ReportOptions, "outputs/multirun/lr out=report", overrides=False)
def report(options: ReportOptions, _: list[str]) -> int:
    """Compare runs, or a sweep's jobs: table, CSV, plot and page."""
    load_plugins()  # which may have the runs' task
    runs = list({run.path.resolve(): run for run in reader.find_runs(options.runs)}.values())
    meters = reader.meters_of_runs(runs)
    recorded = {str(run.config["objective"]) for run in runs if "objective" in run.config}
    shared = recorded.pop() if len(recorded) == 1 else f"val/{meters[0].name}"
    objective = check_objective(options.objective or shared, meters)
    first, *others = options.runs
    folder = options.out or (Path("outputs/reports") / time.strftime("%Y-%m-%d/%H-%M-%S") if others else first)
    kind = "Sweep" if (first / reader.SWEEP).is_file() else "Run"
    write_report(runs, folder, objective, f"{len(runs)} runs" if others else f"{kind} {first}")
    print_tables(runs, objective)
    for path in options.runs:
        if missing := reader.unstarted_jobs(path):
            print(f"{path}: jobs that haven't started: {missing}")
    print(f"report: {folder / REPORT}   beside it: {PLOT}, {SUMMARY}")
    return 0


@command("diff", RunsOptions, "outputs/first outputs/second", overrides=False)
def diff_runs(options: RunsOptions, _: list[str]) -> int:
    """What differs from the first run: config, environment, data, metrics."""
    load_plugins()  # which may have the runs' task
    found = reader.find_runs(options.runs)
    if len(found) < 2:
        raise ConfigError(f"diff needs two runs or more: {PROGRAM} diff RUN RUN [RUN ...]")
    first, *others = found
    for other in others:
        lines = compare.differences(first, other)
        title = f"{other.path} beside {first.path}{', what differs:' if lines else ': nothing differs'}"
        print("\n  ".join([printable(title), *lines, compare.metrics(first, other)[1].replace("\n", "\n  ")]))
    return 0


@command("replay", RunOptions, "outputs/first")
def replay(options: RunOptions, overrides: list[str]) -> int:
    """Repeat a run in a new folder, and compare the metrics bit by bit.

    Differences in config, environment and data are listed, too; of copied data, whether its bytes are the same.

    Returns:
        0; 1 if the metrics differ though nothing else does.
    """
    folder = options.run
    original = reader.read_run(folder)
    reader.read_resumes(folder)  # early: it may be damaged
    config = _as_then(configs.load(folder / "config.yaml", overrides), original)
    if not any(each.startswith("run=") for each in overrides):
        config = replace(config, run=datetime.now().strftime("%Y-%m-%d/%H-%M-%S"))
    saved = [each for each in reader.read_overrides(folder) if not each.startswith("run=")]
    new = Path(run_folder(config.out, config.run))
    run_dir = run(RunSpec(config, [*saved, *overrides], new, note=f"replay of {folder}"))
    replayed = reader.read_run(run_dir)
    then = configs.from_dict(original.config, (), "its config")  # with the keys that are new since
    copied, same = "", then
    if then.data.root != config.data.root and not compare.inputs(original.data, replayed.data):
        copied, equal = _copied(then.data, replace(config.data, root=replayed.config["data"]["root"]))
        same = replace(then, data=replace(then.data, root=config.data.root)) if equal else then
    differences = compare.differences(replace(original, config=configs.to_dict(same)), replayed)
    print("\n  ".join([f"replay of {folder}{', what differs:' if differences else ': nothing differs'}", *differences]))
    print(copied, end="\n" * bool(copied))
    identical, words = compare.metrics(original, replayed)
    print(words)
    if identical or differences:
        return 0
    if gpu.count() and not config.deterministic:
        print("a GPU gives the same bits each time with deterministic=true only")
    return 1


def _copied(then: DataConfig, now: DataConfig) -> tuple[str, bool]:
    """A line about the files of data with the same fingerprint at another place; whether none has other bytes."""
    what, pairs = f"data at {then.root} then, at {now.root} now: ", dict[bytes, bytes]()
    try:
        for split in ("train", "val"):
            pairs.update(zip(*(open_split(each, split).file_paths() for each in (then, now)), strict=True))
        changed = [new for old, new in pairs.items() if not filecmp.cmp(old, new, shallow=False)]
        others = sum(os.stat(old).st_mtime_ns != os.stat(new).st_mtime_ns for old, new in pairs.items())
    except (EffLoopError, OSError, ValueError):  # the first place isn't there any more, or isn't a file's
        return f"{what}names, labels and sizes are the same, bytes can't be compared any more", True
    if changed:
        named = ", ".join(map(printable, map(os.fsdecode, changed[:8])))
        return f"{what}{len(changed):,} of {len(pairs):,} files have other bytes: {named}", False
    files = f"{others:,} file{' has' if others == 1 else 's have'} other times and" if others else "all files have"
    return f"{what}{files} the same bytes", True


def _as_then(config: Config, original: reader.RunRecord) -> Config:
    """The config with the original's numbers of threads and ranks, which sums depend on, where it leaves them open."""
    threads, ranks = original.environment.get("hardware", {}).get("torch_threads"), original.environment.get("ranks")
    if config.threads == "auto" and isinstance(threads, int):
        config = replace(config, threads=threads)
    parallel: Any = config.parallel
    same = parallel.of_ranks and parallel.name == original.config["parallel"]["name"]
    if same and parallel.processes is None and isinstance(ranks, int):
        config = replace(config, parallel=replace(parallel, processes=ranks))
    return config

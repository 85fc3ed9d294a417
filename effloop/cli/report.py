"""`report` and `diff`: runs beside each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from effloop.cli.command import command
from effloop.errors import PROGRAM, ConfigError, printable
from effloop.registry import load_plugins
from effloop.report.files import PLOT, REPORT, SUMMARY, print_tables, write_report
from effloop.runs import compare
from effloop.runs.reader import SWEEP, find_runs, meters_of_runs, unstarted_jobs
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
    runs = list({run.path.resolve(): run for run in find_runs(options.runs)}.values())
    meters, recorded = meters_of_runs(runs), {str(run.config["objective"]) for run in runs if "objective" in run.config}
    shared = recorded.pop() if len(recorded) == 1 else f"val/{meters[0].name}"
    objective = check_objective(options.objective or shared, meters)
    first, *others = options.runs
    folder = options.out or (Path("outputs/reports") / time.strftime("%Y-%m-%d/%H-%M-%S") if others else first)
    kind = "Sweep" if (first / SWEEP).is_file() else "Run"
    write_report(runs, folder, objective, f"{len(runs)} runs" if others else f"{kind} {first}")
    print_tables(runs, objective)
    for path in options.runs:
        if missing := unstarted_jobs(path):
            print(f"{path}: jobs that haven't started: {missing}")
    print(f"report: {folder / REPORT}   beside it: {PLOT}, {SUMMARY}")
    return 0


@command("diff", RunsOptions, "outputs/first outputs/second", overrides=False)
def diff_runs(options: RunsOptions, _: list[str]) -> int:
    """What differs from the first run: config, environment, data, metrics."""
    load_plugins()  # which may have the runs' task
    found = find_runs(options.runs)
    if len(found) < 2:
        raise ConfigError(f"diff needs two runs or more: {PROGRAM} diff RUN RUN [RUN ...]")
    first, *others = found
    for other in others:
        lines = compare.differences(first, other)
        title = f"{other.path} beside {first.path}{', what differs:' if lines else ': nothing differs'}"
        print("\n  ".join([printable(title), *lines, compare.metrics(first, other)[1].replace("\n", "\n  ")]))
    return 0

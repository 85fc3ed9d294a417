"""Sweeps: a run for each combination of values, or as a search sees fit, and how they compare."""

from __future__ import annotations

import logging
import os
import shlex
import socket
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from effloop.config import Config, hydra_app, hydra_setup, messages
from effloop.config.hydra_setup import run_folder
from effloop.config.task_of_data import with_task
from effloop.config.typed import quoted
from effloop.errors import PROGRAM, ConfigError, EffLoopError, InterruptedRunError, PreemptedRunError
from effloop.launch.continued import AUTO
from effloop.registry import plugin_words
from effloop.report.files import print_tables, write_report
from effloop.runs.reader import SWEEP, RunRecord, read_jobs
from effloop.sweep.folder import owned_folder
from effloop.sweep.job_runner import THREAD_VARIABLES, JobRunner
from effloop.sweep.shared import compose_shared, shared_overrides
from effloop.sweep.stops import Stops
from effloop.system.files import remove_if_empty
from effloop.task import meters_of, objectives


def sweep(flags: list[str], overrides: list[str], *, debug: bool = False) -> None:
    """Train once for each combination of values, or as a search decides; and show how they compare.

    Args:
        flags: Hydra's, as typed.
        overrides: as typed.
        debug: show tracebacks of jobs.

    Raises:
        ConfigError: the arguments can't be taken, or jobs failed; the line says which.
        InterruptedRunError: Ctrl-C.
        PreemptedRunError: SIGTERM, SIGUSR1 or SIGHUP; the jobs that ran are saved.
    """
    with messages.in_one_line(Config, overrides):
        hydra_setup.prepare(Config, overrides)
        overrides = with_task(overrides)
        parsed = OverridesParser.create().parse_overrides(overrides)
        shared = shared_overrides(parsed)
        hydra, config = compose_shared(flags, parsed)
        if config.resume == AUTO:
            raise ConfigError(f"resume: {AUTO} is of a single run; a sweep goes on by sweep.resume=true run=NAME")
        assert config.objective is not None  # `finish` decided it
        choices = hydra.runtime.choices
        grid = choices["hydra/sweeper"] == "basic"  # a search decides itself how many jobs it has
        count = hydra_app.count_jobs(parsed) if grid else 0
        trials = count if grid else OmegaConf.select(hydra, "sweeper.n_trials") or 0
        for key in ("sweep.dir", "sweep.subdir"):
            hydra_app.check_folder(hydra, key)
        planned = Path(str(hydra.sweep.dir)).absolute()
    with owned_folder(planned, overrides, shared, config, count) as folder:
        job = JobRunner(
            folder=str(folder),
            fixed=frozenset(shared),
            objective=config.objective,
            count=trials,
            resume=config.sweep.resume,
            parallel=choices["hydra/launcher"] != "basic",
            debug=debug,
            parent=os.getpid() if choices["hydra/launcher"] == "joblib" else 0,  # whose processes would go on alone
            host=socket.gethostname(),
            threads={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        )
        maximize = objectives(meters_of(config.task.name))[config.objective]
        added = _added(choices, shared, maximize=maximize, folder=folder)
        go_on = _how_to_go_on(flags, overrides, folder, config.out)
        stops = Stops(folder, elsewhere=choices["hydra/launcher"] == "submitit_slurm")
        with closing(stops), stops.caught():
            problem = _launch(job, flags, [*overrides, *added], go_on)
        if stops.how:
            reason = f"{problem}" if isinstance(problem, PreemptedRunError) else stops.how
            raise PreemptedRunError(f"{reason}; {go_on}")
        found = _jobs_of(folder, problem)
        unwritten = _show(found, folder, config.objective)
        _raise_for(found, count, problem or unwritten, go_on)


def _jobs_of(folder: Path, problem: EffLoopError | None) -> list[RunRecord]:
    """The jobs of a sweep; where there are none, its folder goes.

    Raises:
        EffLoopError: there are none, because of the problem if there was one.
    """
    found = read_jobs(folder)
    if not found:
        for name in (SWEEP, "multirun.yaml"):
            (folder / name).unlink(missing_ok=True)
        remove_if_empty(folder)
        raise problem or ConfigError("the sweep has no jobs; give a key several values")
    return found


def _added(choices: Any, shared: Iterable[str], *, maximize: bool, folder: Path) -> list[str]:
    """Overrides of Hydra's own config that a sweep needs, where the user has given none."""
    added = {"hydra.sweep.dir": quoted(str(folder))}
    if choices["hydra/sweeper"] == "optuna":
        added["hydra.sweeper.direction"] = "maximize" if maximize else "minimize"
        added["hydra.sweeper.max_failure_rate"] = "1.0"  # a failed job ends no other
        if choices["hydra/launcher"] == "basic":
            added["hydra.sweeper.n_jobs"] = "1"  # each trial knows of all before it
    return [f"{key}={value}" for key, value in added.items() if key == "hydra.sweep.dir" or key not in shared]


def _launch(job: JobRunner, flags: list[str], overrides: list[str], go_on: str) -> EffLoopError | None:
    """Have Hydra start the jobs; what went wrong beside them."""
    logging.getLogger("hydra_plugins.hydra_optuna_sweeper").setLevel(logging.ERROR)  # that a job failed has been said
    try:
        with messages.in_one_line(Config, overrides):
            hydra_app.call_hydra(job, flags, overrides)
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted; {go_on}") from None
    except EffLoopError as error:
        return error
    except Exception as error:  # of a launcher
        if job.debug or not read_jobs(Path(job.folder)):
            raise
        reason = (str(error).splitlines() or [""])[0]
        return ConfigError(f"hydra/launcher: it ended with {type(error).__name__}: {reason}")
    return None


def _show(found: Sequence[RunRecord], folder: Path, objective: str) -> ConfigError | None:
    """The table on the terminal; summary.csv, plot.png and report.html in the sweep's folder, or why they aren't."""
    place = os.path.relpath(folder)
    print()
    print_tables(found, objective)
    try:
        write_report(found, folder, objective, place)
    except ConfigError as error:
        return ConfigError(f"{error} in: {PROGRAM} {shlex.join(['report', place, *plugin_words()])}")
    print(f"sweep: {place}   look: {place}/report.html", flush=True)
    return None


def _raise_for(found: Sequence[RunRecord], count: int, problem: EffLoopError | None, go_on: str) -> None:
    """Say which jobs didn't come to their end.

    Raises:
        ConfigError: there are some.
        EffLoopError: the problem, where all did.
    """
    failed = [run for run in found if run.state not in ("done", "pruned")]
    count = max(count, len(found))
    missing = count - len(found)
    if not failed and not missing:
        if problem:
            raise problem
        return
    names = [f"job {run.name} ({' '.join(run.job['overrides'])})" for run in failed]
    if missing:
        names.append(f"{missing} not started")
    reason = f"{problem}; " if problem else ""
    raise ConfigError(
        f"{reason}{len(failed) + missing} of {count} jobs of the sweep failed: {', '.join(names)}; "
        f"what each lacks is said above; {go_on}"
    )


def _how_to_go_on(flags: Sequence[str], overrides: Sequence[str], folder: Path, out: str) -> str:
    """The command that continues a sweep."""
    kept = [each for each in overrides if each.partition("=")[0] not in ("run", "sweep.resume")]
    outputs = Path(run_folder(out, "multirun")).absolute()
    name = [f"run={folder.relative_to(outputs)}"] if folder.is_relative_to(outputs) else []
    return f"resume with: {PROGRAM} {shlex.join([*flags, *kept, *name, *plugin_words(), 'sweep.resume=true'])}"

"""Sweeps: a run for each combination of values, or as a search sees fit, and how they compare."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from effloop.config import Config
from effloop.config.compose import complete, count_jobs, in_one_line, searchpath
from effloop.config.hydra_setup import NAME, application, compose_tree
from effloop.config.overrides import by_key, parsed
from effloop.config.schema import run_folder
from effloop.errors import PROGRAM, ConfigError, EffLoopError, InterruptedRunError, PreemptedRunError, reason
from effloop.registry import plugin_words
from effloop.report.files import print_tables, write_report
from effloop.run.jobs import THREAD_VARIABLES, JobRunner, signals_shared
from effloop.run.spec import AUTO
from effloop.runs.folder import LOCK, TIMESTAMP, lock, unlock, writing_to
from effloop.runs.reader import SWEEP, RunRecord, read_file, read_jobs
from effloop.system.files import numbered, remove_if_empty, write_text
from effloop.task import meters_of, objectives

# What all jobs of a sweep share: their overrides, and the config that these make.


def shared_overrides(overrides: Iterable[Override]) -> dict[str, str]:
    """{key: override} of what all jobs of a sweep have; of several with a key the last counts."""
    last = by_key([*overrides])
    return {key: str(each.input_line) for key, each in last.items() if not each.is_sweep_override()}


def compose_shared(flags: Sequence[str], overrides: Sequence[Override]) -> tuple[Any, Config]:
    """Hydra's own config, and that of what all jobs share, with the first value of each key that is swept."""
    swept = {key: each for key, each in by_key(overrides).items() if each.is_choice_sweep() or each.is_range_sweep()}
    first = [f"{key}={value}" for key, each in swept.items() for value in islice(each.sweep_string_iterator(), 1)]
    words = [*shared_overrides(overrides).values(), *first]
    with in_one_line(words):
        tree = compose_tree([*words, *searchpath(flags)])
        return tree.hydra, complete(tree)[0]


# A sweep's folder: made or found again, owned by one process, and continued only with the same overrides.

_ABOUT_THE_SWEEP = ("out", "run", "objective", "sweep.resume", "sweep.prune")
"""Keys that change nothing about what a job is."""


@contextmanager
def owned_folder(overrides: list[str], shared: Mapping[str, str], config: Config, count: int) -> Iterator[Path]:
    """A sweep's folder, new or of an earlier start, that is this process's alone for as long as it lives."""
    folder = _folder(config)
    place = os.path.relpath(folder)
    lock(folder, new=True)
    try:
        earlier = read_file(folder / SWEEP) if (folder / SWEEP).stat().st_size else {}  # empty: killed at once
        before = shared_overrides(parsed(earlier.get("overrides", []))) if earlier else shared
        for key in {**before, **shared}:
            if key not in _ABOUT_THE_SWEEP and not key.startswith("hydra") and before.get(key) != shared.get(key):
                raise ConfigError(
                    f"sweep.resume: {place} was started with {before.get(key, f'no {key}')}, now it is "
                    f"{shared.get(key, f'no {key}')}; start it with the same, or set run=ANOTHER_NAME"
                )
        facts = {"overrides": overrides, "objective": config.objective, "jobs": count}
        with writing_to(folder):
            write_text(folder / SWEEP, json.dumps(facts, indent=2) + "\n")
        yield folder
    finally:
        unlock(folder)


def _folder(config: Config) -> Path:
    """The folder; made now, unless the sweep in it is continued."""
    planned = Path(run_folder(config.out, f"multirun/{config.run}")).absolute()
    place, stamped = os.path.relpath(planned), TIMESTAMP.search(planned.as_posix())
    if config.sweep.resume and (planned / SWEEP).is_file():
        return planned
    if config.sweep.resume and stamped:
        raise ConfigError(
            f"sweep.resume: {place} holds no sweep; say which: run=NAME, as it stands below {config.out}/multirun/"
        )
    for folder in numbered(planned):
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                (folder / SWEEP).touch(exist_ok=False)  # whoever makes the file owns the folder
            except FileExistsError:
                if not stamped:
                    fix = "continue it with sweep.resume=true, or set run=ANOTHER_NAME"
                    raise ConfigError(f"run: {place} holds a sweep already; {fix}") from None
            else:
                return folder
    raise AssertionError  # there is no end to numbers


def sweep(flags: list[str], overrides: list[str], *, debug: bool = False) -> None:
    """Train once for each combination of values, or as a search decides; and show how they compare."""
    with in_one_line(overrides):
        given = parsed(overrides)
        shared = shared_overrides(given)
        hydra, config = compose_shared(flags, given)
        launcher, sweeper = (hydra.runtime.choices[f"hydra/{name}"] for name in ("launcher", "sweeper"))
        count = count_jobs(by_key(given).values()) if sweeper == "basic" else 0  # a search decides itself
    if config.resume == AUTO:
        raise ConfigError(f"resume: {AUTO} is of a single run; a sweep goes on by sweep.resume=true run=NAME")
    assert config.objective is not None  # `finish` decided it
    with owned_folder(overrides, shared, config, count) as folder:
        added = {}
        if sweeper == "optuna":
            maximize = objectives(meters_of(config.task.name))[config.objective]
            added["hydra.sweeper.direction"] = "maximize" if maximize else "minimize"
            added["hydra.sweeper.max_failure_rate"] = "1.0"  # a failed job ends no other
            if launcher == "basic":
                added["hydra.sweeper.n_jobs"] = "1"  # each trial knows of all before it
        kept = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
        job = JobRunner(
            folder=str(folder),
            fixed=frozenset(shared),
            objective=config.objective,
            count=count or OmegaConf.select(hydra, "sweeper.n_trials") or 0,
            resume=config.sweep.resume,
            parallel=launcher != "basic",
            debug=debug,
            parent=os.getpid() if launcher == "joblib" else 0,  # whose processes would go on alone
            threads=None if launcher == "submitit_slurm" else kept,
        )
        words = [
            *overrides,
            *searchpath(flags),
            *(f"{key}={value}" for key, value in added.items() if key not in shared),
        ]
        go_on = _resume_hint(flags, overrides, folder, config.out)
        with signals_shared(folder, elsewhere=launcher == "submitit_slurm") as names:
            problem = _launch(job, words, go_on)
        if names:
            why = problem if isinstance(problem, PreemptedRunError) else f"stopped by {names[0]}"
            raise PreemptedRunError(f"{why}; {go_on}")
        found = read_jobs(folder)
        if not found:
            for name in (SWEEP, LOCK, "multirun.yaml"):
                (folder / name).unlink(missing_ok=True)
            remove_if_empty(folder)
            raise problem or ConfigError("the sweep has no jobs; give a key several values")
        unwritten = _show(found, folder, config.objective)
        _raise_for(found, count, problem or unwritten, go_on)


def _launch(job: JobRunner, overrides: list[str], go_on: str) -> EffLoopError | None:
    """Have Hydra start the jobs; what went wrong beside them."""
    logging.getLogger("hydra_plugins.hydra_optuna_sweeper").setLevel(logging.ERROR)  # that a job failed has been said
    try:
        with in_one_line(overrides), application(job.folder) as hydra:
            hydra.multirun(NAME, job, [*overrides, "hydra.mode=MULTIRUN"])
    except (KeyboardInterrupt, BrokenPipeError):  # or nobody reads the output any more
        raise InterruptedRunError(f"interrupted; {go_on}") from None
    except EffLoopError as error:
        return error
    except Exception as error:  # of a launcher
        if job.debug or not read_jobs(Path(job.folder)):
            raise
        return ConfigError(f"hydra/launcher: it ended with {type(error).__name__}: {reason(error)}")
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
    """Say which jobs didn't come to their end."""
    names = [
        f"job {run.name} ({' '.join(run.job['overrides'])})" for run in found if run.state not in ("done", "pruned")
    ]
    failed, missing = len(names), max(count - len(found), 0)
    if not failed and not missing:
        if problem:
            raise problem
        return
    more = [f"{missing} not started"] if missing else []
    raise ConfigError(
        f"{f'{problem}; ' if problem else ''}{failed + missing} of {len(found) + missing} jobs of the sweep failed: "
        f"{', '.join([*names, *more])}; what each lacks is said above; {go_on}"
    )


def _resume_hint(flags: Sequence[str], overrides: Sequence[str], folder: Path, out: str) -> str:
    """The command that continues a sweep."""
    kept = [each for each in overrides if each.partition("=")[0] not in ("run", "sweep.resume")]
    name = f"run={folder.relative_to(Path(run_folder(out, 'multirun')).absolute())}"
    return f"resume with: {PROGRAM} {shlex.join([*flags, *kept, name, *plugin_words(), 'sweep.resume=true'])}"

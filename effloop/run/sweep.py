"""Sweeps: a run for each combination of values, or as a search sees fit, and how they compare."""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from effloop.config import Config, messages
from effloop.config.compose import check_folder, complete, count_jobs, searchpath, with_task
from effloop.config.hydra_setup import NAME, application, compose_tree, prepare, without_hydra
from effloop.config.overrides import by_key, parsed, quoted
from effloop.config.schema import run_folder
from effloop.data.source import ScanError
from effloop.errors import PROGRAM, ConfigError, EffLoopError, InterruptedRunError, PreemptedRunError, reason
from effloop.registry import plugin_words
from effloop.report.files import print_tables, write_report
from effloop.run.jobs import THREAD_VARIABLES, JobRunner, Stops
from effloop.run.spec import AUTO
from effloop.runs.folder import LOCK, TIMESTAMP
from effloop.runs.reader import SWEEP, RunRecord, read_jobs
from effloop.system.files import describe_failure, numbered, remove_if_empty, try_lock, write_text
from effloop.system.untrusted import read_json
from effloop.task import meters_of, objectives

# What all jobs of a sweep share: their overrides, and the config that these make.


def shared_overrides(overrides: Iterable[Override]) -> dict[str, str]:
    """{key: override} of what all jobs of a sweep have; of several with a key the last counts."""
    last = by_key([*overrides])
    return {key: str(each.input_line) for key, each in last.items() if not each.is_sweep_override()}


def compose_shared(flags: Sequence[str], overrides: Sequence[Override]) -> tuple[Any, Config]:
    """Hydra's own config, and that of what all jobs share; of the first job where keys need a value that is swept."""
    shared = [*shared_overrides(overrides).values()]

    def composed(words: list[str]) -> tuple[Any, Config]:
        with messages.in_one_line(words):
            tree = compose_tree([*words, *searchpath(flags)], with_hydra=True)
            return tree.hydra, complete(without_hydra(tree), words)[0]

    try:
        return composed(shared)
    except (ConfigError, ScanError):  # e.g. model=resnet18,resnet50 model.pretrained=true: the default model hasn't
        swept = {
            key: each for key, each in by_key(overrides).items() if each.is_choice_sweep() or each.is_range_sweep()
        }
        return composed(
            [*shared, *(f"{key}={next(iter(each.sweep_string_iterator()))}" for key, each in swept.items())]
        )


# A sweep's folder: made or found again, owned by one process, and continued only with the same overrides.

_ABOUT_THE_SWEEP = ("out", "run", "objective", "sweep.resume", "sweep.prune")
"""Keys that change nothing about what a job is."""


@contextmanager
def owned_folder(
    planned: Path, overrides: list[str], shared: Mapping[str, str], config: Config, count: int
) -> Iterator[Path]:
    """A sweep's folder, new or of an earlier start, that is this process's alone for as long as it lives.

    Raises:
        ConfigError: another sweep's, or another process is at it.
    """
    folder = _folder(planned, config)
    place = os.path.relpath(folder)
    with _locked(folder) as ours:
        earlier = _earlier(folder / SWEEP)
        if not ours:
            raise ConfigError(
                f"run: {place} is being worked on by process {earlier.get('pid')} on {earlier.get('host')}; "
                "wait for its end or set run=ANOTHER_NAME"
            )
        before = shared_overrides(parsed(earlier.get("overrides", []))) if earlier else shared
        for key in {**before, **shared}:
            if key not in _ABOUT_THE_SWEEP and not key.startswith("hydra") and before.get(key) != shared.get(key):
                raise ConfigError(
                    f"sweep.resume: {place} was started with {before.get(key, f'no {key}')}, now it is "
                    f"{shared.get(key, f'no {key}')}; start it with the same, or set run=ANOTHER_NAME"
                )
        process = {"pid": os.getpid(), "host": socket.gethostname()}
        facts = {"overrides": overrides, "objective": config.objective, "jobs": count, **process}
        try:
            write_text(folder / SWEEP, json.dumps(facts, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"run: {describe_failure(folder / SWEEP, error)}; make room there") from None
        yield folder


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a sweep's folder for the block, on all machines; whether no other process has it.

    It takes a file that can be written: on NFS a lock of a folder is of this machine alone.
    """
    try:
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"run: {describe_failure(folder / LOCK, error)}; set run=ANOTHER_NAME") from None
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


def _earlier(path: Path) -> dict[str, Any]:
    """The facts of an earlier start; empty where there was none, or it was killed at once."""
    try:
        return dict(read_json(path)) if path.stat().st_size else {}
    except (OSError, ValueError, TypeError):
        place = os.path.relpath(path)
        raise ConfigError(f"{place} is damaged; delete it, and start again with the same overrides") from None


def _folder(planned: Path, config: Config) -> Path:
    """The folder; made now, unless the sweep in it is continued."""
    place = os.path.relpath(planned)
    stamped = TIMESTAMP.search(planned.as_posix())
    if config.sweep.resume and (planned / SWEEP).is_file():
        return planned
    if config.sweep.resume and stamped:
        raise ConfigError(
            f"sweep.resume: {place} holds no sweep; say which: run=NAME, as it stands below {config.out}/multirun/"
        )
    for folder in numbered(planned):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SWEEP).touch(exist_ok=False)  # whoever makes the file owns the folder
        except FileExistsError:
            if not stamped:
                raise ConfigError(
                    f"run: {place} holds a sweep already; continue it with sweep.resume=true, or set run=ANOTHER_NAME"
                ) from None
        except OSError as error:
            raise ConfigError(f"run: {place} can't be made: {error.strerror}; set out=FOLDER") from None
        else:
            return folder
    raise AssertionError  # there is no end to numbers


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
    with messages.in_one_line(overrides):
        prepare(overrides)
        overrides = with_task(overrides)
        given = parsed(overrides)
        shared = shared_overrides(given)
        hydra, config = compose_shared(flags, given)
        if config.resume == AUTO:
            raise ConfigError(f"resume: {AUTO} is of a single run; a sweep goes on by sweep.resume=true run=NAME")
        assert config.objective is not None  # `finish` decided it
        choices = hydra.runtime.choices
        grid = choices["hydra/sweeper"] == "basic"  # a search decides itself how many jobs it has
        count = count_jobs(by_key(given).values()) if grid else 0
        trials = count if grid else OmegaConf.select(hydra, "sweeper.n_trials") or 0
        for key in ("sweep.dir", "sweep.subdir"):
            check_folder(hydra, key)
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
        added = [*searchpath(flags), *_added(choices, shared, maximize=maximize, folder=folder)]
        go_on = _resume_hint(flags, overrides, folder, config.out)
        stops = Stops(folder, elsewhere=choices["hydra/launcher"] == "submitit_slurm")
        with closing(stops), stops.caught():
            problem = _launch(job, [*overrides, *added], go_on)
        if stops.how:
            reason = f"{problem}" if isinstance(problem, PreemptedRunError) else stops.how
            raise PreemptedRunError(f"{reason}; {go_on}")
        found = _jobs_of(folder, problem)
        unwritten = _show(found, folder, config.objective)
        _raise_for(found, count, problem or unwritten, go_on)


def _jobs_of(folder: Path, problem: EffLoopError | None) -> list[RunRecord]:
    """The jobs of a sweep; where there are none, its folder goes."""
    found = read_jobs(folder)
    if not found:
        for name in (SWEEP, LOCK, "multirun.yaml"):
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


def _launch(job: JobRunner, overrides: list[str], go_on: str) -> EffLoopError | None:
    """Have Hydra start the jobs; what went wrong beside them."""
    logging.getLogger("hydra_plugins.hydra_optuna_sweeper").setLevel(logging.ERROR)  # that a job failed has been said
    try:
        with messages.in_one_line(overrides), application(overrides) as hydra:
            hydra.multirun(NAME, job, [*overrides, "hydra.mode=MULTIRUN"])
    except KeyboardInterrupt:
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


def _resume_hint(flags: Sequence[str], overrides: Sequence[str], folder: Path, out: str) -> str:
    """The command that continues a sweep."""
    kept = [each for each in overrides if each.partition("=")[0] not in ("run", "sweep.resume")]
    outputs = Path(run_folder(out, "multirun")).absolute()
    name = [f"run={folder.relative_to(outputs)}"] if folder.is_relative_to(outputs) else []
    return f"resume with: {PROGRAM} {shlex.join([*flags, *kept, *name, *plugin_words(), 'sweep.resume=true'])}"

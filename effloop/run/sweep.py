"""Sweeps: a run for each combination of values, or as a search sees fit, and how they compare."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from effloop import config as configs
from effloop import registry
from effloop.config import Config
from effloop.config.compose import complete, count_jobs, in_one_line, searchpath
from effloop.config.hydra_setup import NAME, application, compose_tree
from effloop.config.overrides import by_key, parsed
from effloop.config.schema import run_folder
from effloop.data.remote.fetch import fetched_before
from effloop.errors import PROGRAM, ConfigError, EffLoopError, InterruptedRunError, PreemptedRunError, reason
from effloop.run.spec import AUTO, JobState, RunSpec, from_newest_checkpoint
from effloop.runs.folder import LOCK, TIMESTAMP, TakenError, check_free, has_checkpoints, lock, unlock, writing_to
from effloop.runs.reader import CONFIG, JOB, SWEEP, RunRecord, read_file, read_job_files, read_jobs, read_run
from effloop.system import processes
from effloop.system.files import numbered, remove_if_empty, write_text
from effloop.system.signals import handled, interrupts_blocked, signal_name
from effloop.task import meters_of, objectives

# Signals to a sweep are passed on to its jobs, which save; no other job is started.

_MARK = ".stopping"
"""A file in a sweep's folder with the numbers of the signals that it got, for the processes of its launcher."""
_POLL_S = 0.2

_here: list[Path] = []
"""Folders of the sweeps in this process."""


@contextmanager
def signals_shared(folder: Path, *, elsewhere: bool = False) -> Iterator[list[str]]:
    """Signals inside the block are written down for all jobs; yields their names.

    With `elsewhere`, for jobs of Slurm, which may wait for their turn for long, the block is left.
    """
    mark, names = folder / _MARK, list[str]()
    mark.unlink(missing_ok=True)

    def share(number: int, frame: Any) -> None:
        names.append(signal_name(number))
        with suppress(OSError), mark.open("a") as file:
            file.write(f"{number}\n")
        if elsewhere:
            raise PreemptedRunError(f"stopped by {names[0]}; jobs that run save and end, none begins")

    _here.append(folder)
    try:
        with handled(share):
            yield names
    finally:
        _here.remove(folder)
        if not elsewhere:
            mark.unlink(missing_ok=True)


def signals_of(folder: Path) -> list[int]:
    """What `signals_shared` has written down for a sweep."""
    with suppress(OSError, ValueError):
        return [int(number) for number in (folder / _MARK).read_text().split()]
    return []


def _wait(process: subprocess.Popen[str], folder: Path) -> tuple[int, list[int]]:
    """Wait for a job's process, which gets the signals of the sweep and of this process; its exit code, and these."""
    came: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        came.append(number)
        process.send_signal(number)

    sent = 0
    with nullcontext() if _here else handled(pass_on):
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_S), came
            for number in signals_of(folder)[sent:]:
                process.send_signal(number)
                sent += 1


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS")
"""Environment variables that launchers set for their processes."""


@dataclass(frozen=True)
class JobRunner:
    """The function that Hydra's launchers call for each job, in whatever process."""

    folder: str  # of the sweep
    fixed: frozenset[str]  # keys of the overrides that all jobs share
    objective: str  # of which a search gets each job's value
    count: int  # how many jobs the sweep has; 0 is not known
    resume: bool  # whether to continue the jobs of an earlier start
    parallel: bool  # whether jobs run side by side, so that their lines need a prefix
    debug: bool  # show tracebacks
    parent: int  # PID of the process whose end ends this one, which is its child; 0 is none
    # the sweep's variables about threads, as joblib and ray set their own; None on another machine
    threads: Mapping[str, str] | None
    cwd: str = field(default_factory=os.getcwd)  # where the sweep was typed; Ray's processes begin elsewhere

    def __call__(self, tree: DictConfig) -> float | None:
        """Run a job in a process of its own and wait for it; None if it failed, and job.json says why."""
        if self.parent not in (0, os.getpid()):
            processes.end_with_parent(self.parent)
        try:
            os.chdir(self.cwd)
        except OSError as error:
            here = f"{self.cwd}, where the sweep was typed, can't be used on {socket.gethostname()}"
            print(f"effloop: a job: {here}: {error.strerror}; share it, or make it there", file=sys.stderr, flush=True)
            return None
        registry.load_plugins()  # in a launcher's own process: a score of theirs may be the objective
        hydra = HydraConfig.get()
        task: Any = OmegaConf.to_container(hydra.overrides.task)  # as typed, interpolations and all
        own = [override for override in task if override.partition("=")[0] not in self.fixed]
        number = int(hydra.job.num)
        name = f"job {number} ({' '.join(own)})" if own else f"job {number}"
        earlier = self._earlier(number, own)
        if earlier and earlier.state in ("done", "pruned"):
            print(f"{name}: {earlier.state} already", flush=True)
            remove_if_empty(Path(hydra.runtime.output_dir))
            return earlier.value(self.objective)
        if signals_of(Path(self.folder)):
            return None
        print(f"\n{name}{f', {number + 1} of {self.count}' if self.count else ''}", flush=True)
        state = self._claim(number, own, Path(hydra.runtime.output_dir), earlier)
        try:  # a launcher's process goes on when its sweep was killed, and `resume` may continue a job alone
            check_free(Path(state.folder))
        except TakenError as error:
            print(f"effloop: {name}: {error}", file=sys.stderr, flush=True)
            return None
        found = self._run(tree, task, state)
        if found.state == "stopped":
            raise KeyboardInterrupt
        if found.state not in ("done", "pruned"):
            print(f"effloop: {name}: {found.reason}", file=sys.stderr, flush=True)
            return None
        return found.value(self.objective)

    def _earlier(self, number: int, own: Sequence[str]) -> RunRecord | None:
        """The job with the same values of an earlier start: of the sweep, or of this job by its launcher."""
        jobs = read_job_files(Path(self.folder))  # not all that the jobs wrote: 35 ms each
        same = [folder for folder, job in jobs.items() if sorted(job["overrides"]) == sorted(own)]
        mine = [folder for folder in same if jobs[folder]["number"] == number]  # several may have the same values
        found = mine or (same if self.resume else [])
        return read_run(found[0]) if found else None

    def _claim(self, number: int, own: list[str], planned: Path, earlier: RunRecord | None) -> JobState:
        """The job's state: in its folder of an earlier start, or in a new one."""
        if earlier:
            if planned != earlier.path:
                remove_if_empty(planned)
            return JobState(str(earlier.path), int(earlier.job["number"]), own)
        folder = next(each for each in numbered(planned) if not (each / JOB).exists())  # an earlier start's
        folder.mkdir(parents=True, exist_ok=True)
        state = JobState(str(folder), number, own)
        state.write("waiting", **processes.describe_process())
        return state

    def _run(self, tree: DictConfig, task: list[str], state: JobState) -> RunRecord:
        """Carry out a job as far as possible, and read what it has written."""
        try:
            spec = self._spec(tree, task, Path(state.folder))
        except EffLoopError as error:
            state.write("failed", str(error))
        except KeyboardInterrupt:
            state.write("stopped", "interrupted")
            raise
        else:
            self._run_process(spec, state)
        return read_run(Path(state.folder))

    def _spec(self, tree: DictConfig, task: list[str], folder: Path) -> RunSpec:
        """The run of a job's folder: a new one, or what is left of one."""
        if has_checkpoints(folder):
            return from_newest_checkpoint(RunSpec(configs.load(folder / CONFIG), [], folder))
        config, task = complete(tree, HydraConfig.get())
        outputs = Path(config.out).expanduser().absolute()
        if folder.is_relative_to(outputs):
            config = replace(config, run=str(folder.relative_to(outputs)))
        return RunSpec(config, task, Path(os.path.relpath(folder)), resume=True)  # maybe of an earlier start

    def _run_process(self, spec: RunSpec, state: JobState) -> None:
        """Carry out a run in a process of its own."""
        job = {"spec": spec.to_plain(), "state": asdict(state), "debug": self.debug}
        streams = subprocess.PIPE if self.parallel else None
        env = {**self.environment(), **(fetched_before() if state.number else {})}  # the first job's figures have it
        with interrupts_blocked():  # until job.json says which process it is
            process = processes.start_child("effloop.run.job", env=env, stdout=streams, stderr=streams)
            state.write("running", **processes.describe_process(process.pid))
        prefixed = processes.output_prefixed(process, f"[job {state.number}] ")
        with process, prefixed, processes.ended_on_error(process):
            processes.send_request(process, job)
            code, came = _wait(process, Path(self.folder))
        if read_run(Path(state.folder)).job["state"] == "running":  # it couldn't say itself how it ended
            if code == PreemptedRunError.exit_code or came:
                state.write("preempted", "stopped before training began")
            else:
                state.write("killed", f"it {processes.how_ended(code)}")
        if code and came and self.threads is None:
            signal.raise_signal(came[0])  # SIGUSR1: submitit queues the job again
            raise SystemExit(code)  # SIGTERM: Slurm does so itself, and a result would be the end of the job

    def environment(self) -> dict[str, str]:
        """A job's environment: with as many threads under any launcher, as their number changes results."""
        if self.threads is None:
            return processes.with_spin_limit(os.environ)
        kept = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
        return processes.with_spin_limit({**kept, **self.threads})


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
    if launcher == "ray":
        _prepare_ray(hydra.launcher.ray.init)
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
        if elsewhere := launcher == "submitit_slurm":
            os.environ.setdefault("SUBMITIT_PREEMPT_SIGNAL", "USR1")  # when a job's time is up: USR2 would kill the run
        with signals_shared(folder, elsewhere=elsewhere) as names:
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


def _prepare_ray(init: Any) -> None:
    """Have Ray print the jobs' lines as they are, and join a cluster that runs: its launcher can start one only."""
    for name in ("RAY_COLOR_PREFIX", "RAY_DEDUP_LOGS"):
        os.environ.setdefault(name, "0")
    if address := init.address or os.environ.get("RAY_ADDRESS"):
        import ray

        try:
            ray.init(**init)
        except Exception as error:
            raise ConfigError(
                f"hydra.launcher.ray.init: can't join the cluster at '{address}': {reason(error)}; set another "
                "hydra.launcher.ray.init.address, or leave it and RAY_ADDRESS out"
            ) from None


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
    from effloop.report.files import print_tables, write_report  # which a launcher's processes don't need

    place = os.path.relpath(folder)
    print()
    print_tables(found, objective)
    try:
        write_report(found, folder, objective, place)
    except ConfigError as error:
        return ConfigError(f"{error} in: {PROGRAM} {shlex.join(['report', place, *registry.plugin_words()])}")
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
    return f"resume with: {PROGRAM} {shlex.join([*flags, *kept, name, *registry.plugin_words(), 'sweep.resume=true'])}"

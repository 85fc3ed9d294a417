"""Sweeps: one run after the other, or side by side by one of Hydra's launchers, each in a process of its own."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, flag_override
from rich.console import Console

from effloop import config as configs
from effloop import explain, launch, registry, runs, search, snapshot
from effloop.config import Config, finish
from effloop.errors import ConfigError, EffLoopError, InterruptedRunError
from effloop.measure import report
from effloop.rank import Job, Prefixed
from effloop.runs import JOB, OBJECTIVES, SWEEP, Run

_PATIENCE_S = 10
"""For a job to end that was told to."""


@dataclass(frozen=True)
class Note:
    """What stands in a job's folder of the job.

    Attributes:
        folder: of the job.
        number: counted from 0.
        overrides: what makes it this job.
    """

    folder: str
    number: int
    overrides: list[str]

    def write(self, state: str, reason: str = "", **more: Any) -> None:
        """Write job.json, whole or not at all."""
        path = Path(self.folder, JOB)
        temporary = path.with_suffix(".tmp")
        fields = {"number": self.number, "overrides": self.overrides, "state": state, "reason": reason, **more}
        temporary.write_text(json.dumps(fields, indent=2) + "\n")
        os.replace(temporary, path)


@dataclass(frozen=True)
class Sweep:
    """What Hydra's launchers call for each job, in whatever process.

    Attributes:
        folder: of the sweep.
        fixed: keys of the overrides that all jobs share.
        objective: what a search gets to know of a job.
        resume: whether jobs of an earlier start are gone on with.
        beside: whether jobs run side by side, so that their lines need a name.
        debug: show tracebacks.
    """

    folder: str
    fixed: frozenset[str]
    objective: str
    resume: bool
    beside: bool
    debug: bool

    def __call__(self, tree: DictConfig) -> float | None:
        """Train a job in a process of its own and wait for it; None if it failed, which job.json says then."""
        hydra = HydraConfig.get()
        task: Any = OmegaConf.to_container(hydra.overrides.task)  # as typed, interpolations and all
        own = [override for override in task if override.partition("=")[0] not in self.fixed]
        number = int(hydra.job.num)
        name = f"job {number} ({' '.join(own)})" if own else f"job {number}"
        earlier = self._earlier(number, own)
        if earlier and earlier.state in ("done", "pruned"):
            print(f"{name}: {earlier.state} already", flush=True)
            launch.remove_if_empty(Path(hydra.runtime.output_dir))
            return earlier.value(self.objective)
        print(f"\n{name}", flush=True)
        note = self._note(number, own, Path(hydra.runtime.output_dir), earlier)
        folder = Path(note.folder)
        try:
            job = self._job(tree, task, folder)
        except EffLoopError as error:
            note.write("failed", str(error))
        else:
            self._run(job, note)
        found = runs.read(folder)
        if found.state == "stopped":
            raise KeyboardInterrupt
        if found.state not in ("done", "pruned"):
            print(f"effloop: {name}: {found.reason}", file=sys.stderr, flush=True)
            return None
        return found.value(self.objective)

    def _earlier(self, number: int, own: Sequence[str]) -> Run | None:
        """What an earlier start left of the job with the same values: of the sweep, or of this job by its launcher."""
        started = [run for run in runs.jobs(Path(self.folder)) if sorted(run.job["overrides"]) == sorted(own)]
        return next((run for run in started if self.resume or run.job["number"] == number), None)

    def _note(self, number: int, own: list[str], planned: Path, earlier: Run | None) -> Note:
        """What keeps the job's state: in its folder of an earlier start, or in one that nobody else has."""
        if earlier:
            if planned != earlier.path:
                launch.remove_if_empty(planned)
            return Note(str(earlier.path), int(earlier.job["number"]), own)
        folder, tries = planned, 1
        while (folder / JOB).exists():  # an earlier start's, of other values
            tries += 1
            folder = planned.with_name(f"{planned.name}-{tries}")
        folder.mkdir(parents=True, exist_ok=True)
        note = Note(str(folder), number, own)
        note.write("waiting")
        return note

    def _job(self, tree: DictConfig, task: list[str], folder: Path) -> Job:
        """What is to be done in a folder: all of it, or what is left."""
        if (folder / "checkpoints" / "last.ckpt").is_file():
            return Job(configs.to_dict(configs.load(folder / "config.yaml")), [], str(folder), resume=True)
        for path in (folder / "config.yaml", *folder.glob("tensorboard/*")):
            path.unlink(missing_ok=True)  # of a start that came to no checkpoint
        registry.load_plugins()  # in a worker of the launcher
        config = finish(tree, task)
        outputs = Path("outputs").absolute()
        if folder.is_relative_to(outputs):
            config = replace(config, run=str(folder.relative_to(outputs)))
        return Job(configs.to_dict(config), task, os.path.relpath(folder))

    def _run(self, job: Job, note: Note) -> None:
        """Do a job in a process of its own."""
        plan = {"job": asdict(job), "note": asdict(note), "debug": self.debug, "parent": os.getpid()}
        package = str(Path(configs.__file__).parents[1])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        streams = subprocess.PIPE if self.beside else None
        with subprocess.Popen(
            [sys.executable, "-m", "effloop.job"],
            stdin=subprocess.PIPE,
            stdout=streams,
            stderr=streams,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
        ) as process:
            note.write("running", pid=process.pid, host=socket.gethostname())
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already
                process.stdin.write(json.dumps(plan))
                process.stdin.close()
            with _lines_passed_on(process, f"[job {note.number}] "), _ends(process):
                code = process.wait()
        if runs.read(Path(note.folder)).job["state"] == "running":  # it couldn't say itself how it ended
            note.write("killed", _ending(code))


def _ending(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"it ended with exit code {code}"
    guess = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"it was killed by {signal.Signals(-code).name}{guess}"


@contextmanager
def _ends(process: subprocess.Popen[str]) -> Iterator[None]:
    """On Ctrl-C, wait for a process that may have heard it, too, and see to its end."""
    try:
        yield
    except BaseException:
        for number, patience_s in ((0, 1), (signal.SIGINT, _PATIENCE_S), (signal.SIGKILL, None)):
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
                break
        raise


@contextmanager
def _lines_passed_on(process: subprocess.Popen[str], prefix: str) -> Iterator[None]:
    """Each line that a process writes, with whose it is; nothing to do where it has our own streams."""

    def pass_on(source: IO[str], stream: Any) -> None:
        for line in source:
            stream.write(line)
            stream.flush()

    pairs = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
    threads = [
        threading.Thread(target=pass_on, args=(source, Prefixed(stream, prefix))) for source, stream in pairs if source
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(_PATIENCE_S)


def sweep(args: list[str], *, debug: bool = False) -> None:
    """Train once for each combination of values, or as a search sees fit; and show how they compare.

    Args:
        args: overrides and Hydra's flags, as typed.
        debug: show tracebacks of jobs.

    Raises:
        ConfigError: the arguments can't be taken, or jobs failed; the line says which.
        InterruptedRunError: Ctrl-C.
    """
    flags, overrides = launch.parse(args)
    with explain.in_one_line(Config, overrides):
        search.prepare(Config, overrides)
        parsed = OverridesParser.create().parse_overrides(overrides)
        shared = _shared(parsed)
        tree = search.compose_tree(Config, list(shared.values()), with_hydra=True)
        hydra, tree = tree.hydra, _without_hydra(tree)
        config = finish(tree, list(shared.values()))
        choices = hydra.runtime.choices
        count = launch.count_jobs(parsed) if choices["hydra/sweeper"] == "basic" else 0  # a search ends when it likes
        planned = Path(str(hydra.sweep.dir)).absolute()
    with _owned(planned, overrides, shared, config) as folder:
        job = Sweep(
            folder=str(folder),
            fixed=frozenset(shared),
            objective=config.objective,
            resume=config.sweep.resume,
            beside=choices["hydra/launcher"] != "basic",
            debug=debug,
        )
        added = _added(choices, shared, config.objective, folder)
        go_on = _how_to_go_on(overrides, folder)
        problem = _launch(job, flags, [*overrides, *added], go_on)
        found = runs.jobs(folder)
        if not found:
            for name in (SWEEP, "multirun.yaml"):
                (folder / name).unlink(missing_ok=True)
            launch.remove_if_empty(folder)
            raise problem or ConfigError("the sweep has no jobs; give a key several values")
        _show(found, folder, config.objective)
        _raise_for(found, count, problem, go_on)


def _shared(parsed: Iterable[Override]) -> dict[str, str]:
    """{key: override} of what all jobs of a sweep have; of several with a key the last counts."""
    last = {each.get_key_element(): each for each in parsed}
    return {key: str(each.input_line) for key, each in last.items() if not each.is_sweep_override()}


def _without_hydra(tree: DictConfig) -> DictConfig:
    """The config without Hydra's own, as jobs get it."""
    with flag_override(tree, ["readonly", "struct"], False):
        del tree["hydra"]
    return tree


def _added(choices: Any, shared: Iterable[str], objective: str, folder: Path) -> list[str]:
    """Overrides that make Hydra's sweepers and launchers do what is expected here, where nobody has said otherwise."""
    added = {"hydra.sweep.dir": "'" + str(folder).replace("\\", "\\\\").replace("'", "\\'") + "'"}
    if choices["hydra/sweeper"] == "optuna":
        added["hydra.sweeper.direction"] = "maximize" if OBJECTIVES[objective] else "minimize"
        added["hydra.sweeper.max_failure_rate"] = "1.0"  # a failed job ends no other
        if choices["hydra/launcher"] == "basic":
            added["hydra.sweeper.n_jobs"] = "1"  # each trial knows of all before it
    return [f"{key}={value}" for key, value in added.items() if key == "hydra.sweep.dir" or key not in shared]


def _launch(job: Sweep, flags: list[str], overrides: list[str], go_on: str) -> EffLoopError | None:
    """Have Hydra start the jobs; what went wrong beside them."""
    logging.getLogger("hydra_plugins.hydra_optuna_sweeper").setLevel(logging.ERROR)  # that a job failed has been said
    try:
        with explain.in_one_line(Config, overrides):
            launch.call_hydra(job, flags, overrides)
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted; {go_on}") from None
    except EffLoopError as error:
        return error
    except Exception as error:  # of a launcher
        if job.debug or not runs.jobs(Path(job.folder)):
            raise
        reason = (str(error).splitlines() or [""])[0]
        return ConfigError(f"hydra/launcher: it ended with {type(error).__name__}: {reason}")
    return None


def _show(found: Sequence[Run], folder: Path, objective: str) -> None:
    """The table on the terminal; summary.csv, plot.png and report.html in the sweep's folder."""
    place = os.path.relpath(folder)
    report.write(found, folder, objective, place)
    console = Console()
    console.print()
    console.print(report.table(found, objective))
    print(f"sweep: {place}   look: {place}/report.html", flush=True)


def _raise_for(found: Sequence[Run], count: int, problem: EffLoopError | None, go_on: str) -> None:
    """Say which jobs didn't come to their end.

    Raises:
        ConfigError: there are some.
    """
    failed = [run for run in found if run.state not in ("done", "pruned")]
    count = max(count, len(found))
    missing = count - len(found)
    if not failed and not missing and not problem:
        return
    names = [f"job {run.name} ({' '.join(run.job['overrides'])})" for run in failed]
    names += [f"{missing} not started"] * bool(missing)
    reason = f"{problem}; " if problem else ""
    raise ConfigError(
        f"{reason}{len(failed) + missing} of {count} jobs of the sweep failed: {', '.join(names)}; "
        f"what each lacks is said above; {go_on}"
    )


_ABOUT_THE_SWEEP = ("run", "objective", "sweep.resume", "sweep.prune")
"""Keys that change nothing about what a job is."""


def _how_to_go_on(overrides: Sequence[str], folder: Path) -> str:
    """The command that goes on with a sweep."""
    kept = [each for each in overrides if each.partition("=")[0] not in ("run", "sweep.resume")]
    outputs = Path("outputs", "multirun").absolute()
    name = [f"run={folder.relative_to(outputs)}"] if folder.is_relative_to(outputs) else []
    return "go on with: " + shlex.join(["python", "-m", "effloop", "-m", *kept, *name, "sweep.resume=true"])


@contextmanager
def _owned(planned: Path, overrides: list[str], shared: Mapping[str, str], config: Config) -> Iterator[Path]:
    """A sweep's folder, new or of an earlier start, that is this process's alone for as long as it lives.

    Raises:
        ConfigError: another sweep's, or another process is at it.
    """
    folder, is_new = _folder(planned, config)
    with (folder / SWEEP).open("r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = json.load(file)
            raise ConfigError(
                f"run: {os.path.relpath(folder)} is being worked on by process {owner.get('pid')} on "
                f"{owner.get('host')}; wait for its end or set run=ANOTHER_NAME"
            ) from None
        if not is_new:
            _check_same(json.load(file), shared, folder)
            file.seek(0)
        facts = {
            "overrides": overrides,
            "objective": config.objective,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        file.write(json.dumps(facts, indent=2) + "\n")
        file.truncate()
        file.flush()
        yield folder


def _folder(planned: Path, config: Config) -> tuple[Path, bool]:
    """The folder, and whether it was made now."""
    place, tries = os.path.relpath(planned), 1
    stamped = snapshot.STAMP.search(planned.as_posix())
    if config.sweep.resume and (planned / SWEEP).is_file():
        return planned, False
    if config.sweep.resume and stamped:
        raise ConfigError(
            f"sweep.resume: {place} holds no sweep; say which: run=NAME, as it stands below outputs/multirun/"
        )
    folder = planned
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SWEEP).touch(exist_ok=False)  # whoever makes the file owns the folder
        except FileExistsError:
            if not stamped:
                raise ConfigError(
                    f"run: {place} holds a sweep already; go on with it by sweep.resume=true, or set run=ANOTHER_NAME"
                ) from None
            tries += 1
            folder = planned.with_name(f"{planned.name}-{tries}")
        except OSError as error:
            raise ConfigError(f"run: {place} can't be made: {error.strerror}; start from another folder") from None
        else:
            return folder, True


def _check_same(earlier: Mapping[str, Any], shared: Mapping[str, str], folder: Path) -> None:
    """Refuse to go on with other values of what all jobs share.

    Raises:
        ConfigError: they differ.
    """
    before = _shared(OverridesParser.create().parse_overrides(list(earlier.get("overrides", []))))
    for key in {**before, **shared}:
        if key not in _ABOUT_THE_SWEEP and not key.startswith("hydra") and before.get(key) != shared.get(key):
            raise ConfigError(
                f"sweep.resume: {os.path.relpath(folder)} was started with {before.get(key, f'no {key}')}, now it is "
                f"{shared.get(key, f'no {key}')}; start it with the same, or set run=ANOTHER_NAME"
            )

"""Runs the jobs of a sweep, each in a process of its own, and says how they ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from effloop import config as configs
from effloop import registry
from effloop.config.compose import complete
from effloop.data.remote.fetch import fetched_before
from effloop.errors import EffLoopError, PreemptedRunError
from effloop.run.spec import JobState, RunSpec, from_newest_checkpoint
from effloop.runs.folder import TakenError, check_free, has_checkpoints
from effloop.runs.reader import CONFIG, JOB, RunRecord, read_job_files, read_run
from effloop.system import processes
from effloop.system.files import numbered, remove_if_empty
from effloop.system.signals import handled, interrupts_blocked, signal_name

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


def _wait(process: subprocess.Popen[str], folder: Path) -> int:
    """Wait for a job's process, which gets the signals of the sweep, and those of this process."""

    def pass_on(number: int, frame: Any) -> None:
        process.send_signal(number)

    sent = 0
    with nullcontext() if _here else handled(pass_on):
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_S)
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

    def __call__(self, tree: DictConfig) -> float | None:
        """Run a job in a process of its own and wait for it; None if it failed, and job.json says why."""
        if self.parent not in (0, os.getpid()):
            processes.end_with_parent(self.parent)
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
            code = _wait(process, Path(self.folder))
        if read_run(Path(state.folder)).job["state"] == "running":  # it couldn't say itself how it ended
            if code == PreemptedRunError.exit_code:
                state.write("preempted", "stopped before training began")
            else:
                state.write("killed", f"it {processes.how_ended(code)}")

    def environment(self) -> dict[str, str]:
        """A job's environment: with as many threads under any launcher, as their number changes results."""
        if self.threads is None:
            return processes.with_spin_limit(os.environ)
        kept = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
        return processes.with_spin_limit({**kept, **self.threads})

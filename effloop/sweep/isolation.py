"""Starting the jobs of a sweep, each in a process of its own, and saying how they ended."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from effloop import config as configs
from effloop import registry
from effloop.config import finish
from effloop.config import hydra_app as launch
from effloop.errors import EffLoopError
from effloop.launch.rank import Job, Prefixed, end_with_parent
from effloop.runs.reader import JOB, RunRecord, read_job_files, read_run

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
        parent: the process without which a launcher's own are to end, which are its children; 0 is none.
    """

    folder: str
    fixed: frozenset[str]
    objective: str
    resume: bool
    beside: bool
    debug: bool
    parent: int

    def __call__(self, tree: DictConfig) -> float | None:
        """Train a job in a process of its own and wait for it; None if it failed, which job.json says then."""
        if self.parent not in (0, os.getpid()):
            end_with_parent(self.parent)
        hydra = HydraConfig.get()
        task: Any = OmegaConf.to_container(hydra.overrides.task)  # as typed, interpolations and all
        own = [override for override in task if override.partition("=")[0] not in self.fixed]
        number = int(hydra.job.num)
        name = f"job {number} ({' '.join(own)})" if own else f"job {number}"
        earlier = self._earlier(number, own)
        if earlier and earlier.state in ("done", "pruned"):
            _say(f"{name}: {earlier.state} already")
            launch.remove_if_empty(Path(hydra.runtime.output_dir))
            return earlier.value(self.objective)
        _say(f"\n{name}")
        note = self._note(number, own, Path(hydra.runtime.output_dir), earlier)
        with _alone_in(Path(note.folder)) as alone:
            if not alone:
                print(f"effloop: {name}: a process of an earlier start is still at it", file=sys.stderr, flush=True)
                return None
            found = self._do(tree, task, note)
        if found.state == "stopped":
            raise KeyboardInterrupt
        if found.state not in ("done", "pruned"):
            print(f"effloop: {name}: {found.reason}", file=sys.stderr, flush=True)
            return None
        return found.value(self.objective)

    def _earlier(self, number: int, own: Sequence[str]) -> RunRecord | None:
        """What an earlier start left of the job with the same values: of the sweep, or of this job by its launcher."""
        notes = read_job_files(Path(self.folder))  # not all that the jobs wrote: 35 ms each
        same = [folder for folder, note in notes.items() if sorted(note["overrides"]) == sorted(own)]
        mine = [folder for folder in same if notes[folder]["number"] == number]  # several may have the same values
        found = mine or (same if self.resume else [])
        return read_run(found[0]) if found else None

    def _note(self, number: int, own: list[str], planned: Path, earlier: RunRecord | None) -> Note:
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

    def _do(self, tree: DictConfig, task: list[str], note: Note) -> RunRecord:
        """Do a job, as far as that can be; what came of it."""
        try:
            job = self._job(tree, task, Path(note.folder))
        except EffLoopError as error:
            note.write("failed", str(error))
        else:
            self._run(job, note)
        return read_run(Path(note.folder))

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
        streams = subprocess.PIPE if self.beside else None
        command = [sys.executable, "-m", "effloop.sweep.job"]
        with _ctrl_c_held_back():
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=streams, stderr=streams, text=True)
        with process:
            note.write("running", pid=process.pid, host=socket.gethostname())
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already
                process.stdin.write(json.dumps(plan))
                process.stdin.close()
            with _lines_passed_on(process, f"[job {note.number}] "), _ends(process):
                code = process.wait()
        if read_run(Path(note.folder)).job["state"] == "running":  # it couldn't say itself how it ended
            note.write("killed", _ending(code))


def _say(line: str) -> None:
    """Print a line; where nobody reads it any more, that ends the sweep as Ctrl-C does."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        raise KeyboardInterrupt from None


@contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Whether no other process is at a job: a launcher's may go on when the sweep that it was of has been killed."""
    place = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(place)


def _ending(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"it ended with exit code {code}"
    guess = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"it was killed by {signal.Signals(-code).name}{guess}"


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """Start processes that Ctrl-C waits for until they let it through: importing torch takes 2 s."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
            with suppress(BrokenPipeError):  # a pipe that isn't emptied would stop the job
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

"""Starting the jobs of a sweep, each in a process of its own, and saying how they ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from effloop import config as configs
from effloop import registry
from effloop.config import finish
from effloop.errors import EffLoopError
from effloop.launch.rank import Job
from effloop.runs.reader import JOB, RunRecord, read_job_files, read_run
from effloop.system.files import numbered, remove_if_empty, try_lock, write_text
from effloop.system.processes import end_with_parent, ended_on_error, how_ended, interrupts_blocked, output_prefixed


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
        fields = {"number": self.number, "overrides": self.overrides, "state": state, "reason": reason, **more}
        write_text(path, json.dumps(fields, indent=2) + "\n")


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
            remove_if_empty(Path(hydra.runtime.output_dir))
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
                remove_if_empty(planned)
            return Note(str(earlier.path), int(earlier.job["number"]), own)
        folder = next(each for each in numbered(planned) if not (each / JOB).exists())  # an earlier start's
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
        with interrupts_blocked():
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=streams, stderr=streams, text=True)
        with process:
            note.write("running", pid=process.pid, host=socket.gethostname())
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already
                process.stdin.write(json.dumps(plan))
                process.stdin.close()
            with output_prefixed(process, f"[job {note.number}] "), ended_on_error(process):
                code = process.wait()
        if read_run(Path(note.folder)).job["state"] == "running":  # it couldn't say itself how it ended
            note.write("killed", f"it {how_ended(code)}")


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
        yield try_lock(place)
    finally:
        os.close(place)

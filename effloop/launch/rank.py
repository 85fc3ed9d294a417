"""A rank's life: what a process that is one of several does from its start to its end."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import platform
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

import torch

from effloop import config as configs
from effloop import registry
from effloop.checkpoint import files
from effloop.config import Config
from effloop.errors import EffLoopError, InterruptedRunError
from effloop.parallel.found import Place, found
from effloop.parallel.join import Joined, join
from effloop.parallel.join import joined as met
from effloop.parallel.notes import FolderNotes, Notes
from effloop.parallel.reports import ended_for_good, kind_of, read, reports
from effloop.runs.environment import effloop_version
from effloop.system.hardware import available_cores

_PATIENCE_S = {"lost": 5.0, "crash": 1.0}
"""What has started the ranks ends them all when one dies. Whoever fails thereupon waits so long for that,
so that the first one is named and not its victims."""


@dataclass(frozen=True)
class Job:
    """What all ranks are to do; plain values, that travel as JSON.

    Attributes:
        config: as `config.to_dict` gives it.
        overrides: what it was composed from.
        run_dir: the run folder.
        resume: whether to go on in it.
        note: a line for people, where the ranks were started again.
    """

    config: dict[str, Any]
    overrides: list[str]
    run_dir: str
    resume: bool = False
    note: str = ""


@dataclass(frozen=True)
class Task:
    """A job as the work gets it.

    Attributes:
        config, overrides, run_dir, resume, note: as in `Job`.
        begun: to be called on rank 0 with the run folder once it is this run's.
    """

    config: Config
    overrides: Sequence[str]
    run_dir: Path
    resume: bool = False
    note: str = ""
    begun: Callable[[Path], None] = lambda run_dir: None


Work = Callable[[Task], None]
"""What trains; it finds the other ranks by `parallel=ddp`."""


def rank_main(scratch: str, job: Job, work: Work) -> None:
    """What a rank runs that `ranks.launch` has started; it ends the process if anything fails."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    end_with_parent(launcher.pid or 0)
    folder, start = Path(scratch), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    place = found()
    assert place is not None  # the launcher sets it
    (folder / f"pid-{start}-{place.rank}").write_text(str(os.getpid()))
    reports.go_to(folder, start)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; else gloo looks the machine's name up
    registry.load_plugins()
    if any(report.final for report in read(folder)):  # of an earlier start: this one would end the same way
        os._exit(EffLoopError.exit_code)
    take_part(place, lambda: job, work, lambda joined: FolderNotes(folder), facts=False)


def take_part(
    place: Place, compose: Callable[[], Job | None], work: Work, notes_in: Callable[[Joined], Notes], *, facts: bool
) -> None:
    """Do a job together with the other ranks; ends the process where that fails.

    Args:
        place: of this rank.
        compose: what there is to do; rank 0 alone asks.
        work: what does it, on every rank.
        notes_in: where notes are kept.
        facts: whether the ranks, started one by one, have to show that they are alike.
    """
    by_torchrun = facts and "TORCHELASTIC_RUN_ID" in os.environ
    _set_up(place, by_torchrun=by_torchrun)
    try:
        with _interrupted_once():
            joined = join(place, _facts() if facts else None)
            if ended_for_good(joined):  # an earlier start of the ranks
                raise EffLoopError
            _share_cores(joined, by_torchrun=by_torchrun)
            _do(joined, compose, work, notes_in(joined))
        return
    except KeyboardInterrupt as interrupt:
        if facts and not place.rank:  # else the launcher says it
            print(f"effloop: {interrupt.__cause__ or 'interrupted'}", file=sys.stderr)
        code = InterruptedRunError.exit_code
    except EffLoopError as error:
        if str(error):
            reports.tell(place.rank, str(error), kind_of(error))
        code = error.exit_code
    except Exception as error:
        _tell_of_a_bug(place, error)
        code = EffLoopError.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    if not place.rank and not os.environ.get("TORCHELASTIC_RUN_ID"):
        time.sleep(1)  # the store ends with this process, and others may still be at it: torch says that in 17 lines
    os._exit(code)  # the usual end waits in gloo for ranks that have gone


def _do(joined: Joined, compose: Callable[[], Job | None], work: Work, notes: Notes) -> None:
    """Get the job from rank 0 and do it.

    Raises:
        EffLoopError: without a word: rank 0 couldn't compose it, and has said why.
    """
    if joined.place.rank == 0:
        try:
            job = compose()
            job = job and _again(job, notes)
        except EffLoopError as error:
            kind = kind_of(error).replace("failed", "explained")  # another start would compose the same
            reports.tell(0, str(error), kind)  # first: what has started the ranks ends them all with the next
            joined.store.set("job", json.dumps("failed"))
            raise EffLoopError from error
        joined.store.set("job", json.dumps(job and asdict(job)))
    else:
        said = json.loads(joined.store.get("job"))
        if said == "failed":
            raise EffLoopError
        job = said and Job(**said)
    if job:
        config = configs.from_dict(job.config, (), "the config from rank 0")
        work(Task(config, job.overrides, Path(job.run_dir), job.resume, job.note, notes.begun))


def _again(job: Job, notes: Notes) -> Job:
    """The job as it is now: after an earlier start of the ranks it goes on in that one's run folder."""
    run_dir = notes.run_dir()
    if run_dir is None:
        return job
    last = run_dir / "checkpoints" / "last.ckpt"
    if not last.is_file():
        (run_dir / "config.yaml").unlink(missing_ok=True)  # which makes the folder some run's own
        note = f"again from the beginning: {notes.why()}"
        return replace(job, run_dir=str(run_dir), note=note)
    epoch = files.read(last)["progress"]["epoch"]
    note = f"again from epoch {epoch}: {notes.why()}"
    return replace(job, run_dir=str(run_dir), resume=True, overrides=[], note=note)


def _facts() -> dict[str, str]:
    """What has to be the same on all ranks."""
    return {
        "effloop": effloop_version(),
        "python": platform.python_version(),
        "the arguments": shlex.join(sys.argv[1:]),
    }


def _tell_of_a_bug(place: Place, error: Exception) -> None:
    kind = kind_of(error)
    time.sleep(_PATIENCE_S.get(kind, 0))
    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    if kind == "lost":
        joined = met()
        others = joined.others if joined else "that one"
        reports.tell(place.rank, f"lost the connection to another rank ({reason}); look at {others}", kind)
        return
    traceback.print_exception(error)
    reports.tell(place.rank, reason, kind)


def _share_cores(joined: Joined, *, by_torchrun: bool) -> None:
    """Have torch compute on this rank's share of the cores, unless somebody has chosen."""
    chosen = os.environ.get("OMP_NUM_THREADS")
    if not chosen or (by_torchrun and chosen == "1"):  # torchrun sets 1 where nobody has chosen
        torch.set_num_threads(max(1, available_cores() // joined.sharing))


def _set_up(place: Place, *, by_torchrun: bool) -> None:
    """Whose end is this one's, and whose lines are whose."""
    if by_torchrun:
        end_with_parent(os.getppid())
    if place.rank:
        sys.stdout = cast("TextIO", Prefixed(sys.stdout, f"[rank {place.rank}] "))
        sys.stderr = cast("TextIO", Prefixed(sys.stderr, f"[rank {place.rank}] "))


class Prefixed:
    """A text stream that begins each line with a prefix, and passes on whole lines until it is flushed."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream, self._prefix = stream, prefix
        self._pending = ""
        self._begun = False
        """Whether a part of the pending line has been passed on."""

    def write(self, text: str) -> int:
        """Pass on what lines are complete."""
        *lines, self._pending = (self._pending + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._head()}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        """Pass on what there is of a line."""
        if self._pending:
            self._stream.write(f"{self._prefix * (not self._begun)}{self._pending}")
            self._pending, self._begun = "", True
        self._stream.flush()

    def _head(self) -> str:
        begun, self._begun = self._begun, False
        return "" if begun else self._prefix

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent(parent: int) -> None:
    """Have Linux end this process when its parent ends, however that may be."""
    with suppress(AttributeError, OSError):  # another system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it has ended already


@contextmanager
def _interrupted_once() -> Iterator[None]:
    """Let the first Ctrl-C through and no further one: the terminal sends it, and what has started the ranks, too."""
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if not seen:
            seen.append(number)
            _exit_soon(InterruptedRunError.exit_code)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        yield
        if seen:
            raise KeyboardInterrupt
    except Exception as error:
        if seen:  # the run's own line for it; or a collective that was broken by the other ranks' end
            raise KeyboardInterrupt from (error if isinstance(error, InterruptedRunError) else None)
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _exit_soon(code: int) -> None:
    """End the process in some seconds, whatever it is at: a thread may wait for a rank that has gone."""
    timer = threading.Timer(5, os._exit, [code])
    timer.daemon = True
    timer.start()

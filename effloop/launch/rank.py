"""A rank's life: what a process that is one of several does from its start to its end."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
from effloop.system.processes import end_with_parent, interrupted_once, prefix_output

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
        with interrupted_once():
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
        prefix_output(f"[rank {place.rank}] ")

"""Entry point of one rank, and its session with the others."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import platform
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from effloop.checkpoint import files
from effloop.data.remote.location import this_process
from effloop.data.source.root import fetch_all
from effloop.errors import BUG, EffLoopError, InterruptedRunError, reason
from effloop.parallel.base import RankEnv, detect_launcher
from effloop.parallel.failures import (
    RestartState,
    failed_for_good,
    failure_kind,
    reporter,
)
from effloop.parallel.rendezvous import START_TIMEOUT_S, RankGroup, join
from effloop.registry import explained, line_of
from effloop.run.spec import RunSpec, from_newest_checkpoint
from effloop.run.training import announce_end, train
from effloop.runs.environment import effloop_version
from effloop.system.hardware import available_cores
from effloop.system.processes import command_timed, end_with_parent, escaped_output, prefix_output
from effloop.system.signals import BEFORE, ending_at_once, interrupted_once

_PATIENCE_S = {"lost": 5.0, "crash": 1.0}
"""The launcher ends all ranks when one dies. A rank that fails because of that waits this long to be ended,
so that the first failure is reported and not its consequences."""

_FETCHING = "fetching"
_POLL_S = 0.05

_KEY = "start_timeout_s"  # of `parallel`


def run_rank(scratch: str, spec: dict[str, Any], variables: dict[str, str]) -> None:
    """Run a rank that `ranks.launch` has started; ends the process if anything fails."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    end_with_parent(launcher.pid or 0)
    os.environ.update(variables)
    folder, start = Path(scratch), int(variables["TORCHELASTIC_RESTART_COUNT"])
    env = detect_launcher()
    assert env is not None
    (folder / f"pid-{start}-{env.rank}").write_text(str(os.getpid()))
    reporter.write_to(folder, start)
    faulthandler.enable(2)  # as in `entry` of the command line
    with (
        command_timed(whole_process=True),
        escaped_output(),
        rank_session(env, folder, spec["config"]["parallel"].get(_KEY, START_TIMEOUT_S)) as session,
    ):
        if env.rank == 0:
            session.share(spec)
        session.run()


class RankSession:
    """The ranks of a run, from their rendezvous on."""

    def __init__(self, group: RankGroup, state: RestartState) -> None:
        self._group, self._state, self._told = group, state, 0.0
        this_process.progressed, this_process.run = self._fetches, f"{group.env.address}:{group.env.port}"
        self.shared = False
        """Whether rank 0 has told the others what to do."""

    def share(self, spec: dict[str, Any] | None) -> None:
        """Rank 0's part: give all ranks the plain values of a `RunSpec`; None if there is nothing to do."""
        self._publish(_restarted(spec, self._state) if spec else None)

    def fail(self) -> None:
        """Tell the other ranks that rank 0 has no run for them."""
        if self._group.env.rank == 0 and not self.shared:
            with suppress(RuntimeError):  # the store has gone
                self._publish("failed")

    def run(self) -> None:
        """Carry out what rank 0 has shared."""
        self._wait(lambda: self._group.store.check(["spec"]))
        spec = json.loads(self._group.store.get("spec"))
        if spec == "failed":
            raise EffLoopError
        if spec:
            run = RunSpec.from_plain(spec)
            self._fetch(run)
            train(run, self._state.remember)

    def _fetch(self, run: RunSpec) -> None:
        """Fetch remote data, and wait for the other machines: the time that it takes is no rank's fault."""
        if fetch_all(run.config.data):
            store = self._group.store
            store.add("fetched", 1)
            self._wait(lambda: store.add("fetched", 0) == self._group.env.world_size)

    def _wait(self, there: Callable[[], bool]) -> None:
        """Wait for other ranks as long as one of them fetches data; without that, as long as for a start."""
        store, known, until = self._group.store, -1, 0.0
        while not there():
            if (now := store.add(_FETCHING, 0)) != known:
                known, until = now, time.monotonic() + _typed_timeout_s()
            if time.monotonic() > until:
                return  # what comes next says who is missing
            time.sleep(_POLL_S)

    def _fetches(self) -> None:
        """Tell the other ranks that this one fetches data."""
        if (now := time.monotonic()) - self._told > 1:
            self._told = now
            self._group.store.add(_FETCHING, 1)

    def _publish(self, spec: Any) -> None:
        self._group.store.set("spec", json.dumps(spec))
        self.shared = True


@contextmanager
def rank_session(env: RankEnv, scratch: Path | None = None, timeout_s: float = 0) -> Iterator[RankSession]:
    """Join the other ranks; ends the process where the block raises, as the usual end waits for ranks that have gone.

    `scratch` is the folder of the process that has started the ranks on this machine; None for torchrun and Slurm,
    which start them one by one, so that their versions and arguments have to be compared. `timeout_s` is for all ranks
    to connect; 0 is what the command line says.
    """
    by_torchrun = scratch is None and "TORCHELASTIC_RUN_ID" in os.environ
    if env.rank:
        prefix_output(f"[rank {env.rank}] ")
    session = None
    try:
        with interrupted_once(), ending_at_once(BEFORE, announce_end):
            versions = {"effloop": effloop_version(), "python": platform.python_version()}
            same = {**versions, "the arguments": shlex.join(sys.argv[1:])}  # on all ranks
            group = join(env, None if scratch else same, timeout_s or _typed_timeout_s())
            if failed_for_good(group):  # an earlier start of the ranks
                raise EffLoopError
            _share_cores(group, by_torchrun=by_torchrun)
            session = RankSession(group, RestartState(scratch, group.base))
            yield session
        return
    except KeyboardInterrupt as interrupt:
        if not scratch and not env.rank:  # else the launcher says it
            print(f"effloop: {interrupt.__cause__ or 'interrupted'}", file=sys.stderr)
        code = InterruptedRunError.exit_code
    except Exception as raised:
        error = (failure_kind(raised) == "crash" and explained(raised)) or raised  # not where another rank has gone
        code = BUG if failure_kind(error) == "crash" else getattr(error, "exit_code", EffLoopError.exit_code)
        _report(env, error, session)
    _end(env, code)


def _report(env: RankEnv, error: Exception, session: RankSession | None) -> None:
    """Say why this rank ends; where rank 0 had no run for the others, tell them afterwards: that ends them all."""
    kind = failure_kind(error)
    if not isinstance(error, EffLoopError):
        _report_bug(env, error, kind)
    elif str(error):
        composing = session is not None and env.rank == 0 and not session.shared
        final = composing and kind == "failed"  # another start would compose the same
        reporter.report(env.rank, line_of(error), "final" if final else kind)
    if session is not None:
        session.fail()


def _report_bug(env: RankEnv, error: Exception, kind: str) -> None:
    time.sleep(_PATIENCE_S.get(kind, 0))
    if kind == "lost":
        others = RankGroup.current.others if RankGroup.current else "that one"
        why = re.sub(r"\[\S+/gloo/\S+\] |\. This is typically.*", "", reason(error))[:200]
        reporter.report(env.rank, f"lost the connection to another rank ({why}); look at {others}", kind)
        return
    traceback.print_exception(error)
    what = f"{type(error).__name__}: {reason(error)[:200]}"
    reporter.report(env.rank, f"bug: {what}; please report it with the lines above", kind)


def _end(env: RankEnv, code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if not env.rank and not os.environ.get("TORCHELASTIC_RUN_ID"):
        time.sleep(1)  # the store ends with this process, and others may still use it: torch says that in 17 lines
    os._exit(code)


def _restarted(spec: dict[str, Any], state: RestartState) -> dict[str, Any]:
    """The run as it is now: after an earlier start of the ranks it continues in that one's run folder."""
    run_dir = state.run_dir()
    if run_dir is None:
        return spec
    found = from_newest_checkpoint(replace(RunSpec.from_plain(spec), folder=run_dir))
    where = f"epoch {files.position(found.checkpoint)['epoch']}" if found.checkpoint else "the beginning"
    return replace(found, note=f"again from {where}: {state.reason()}").to_plain()


def _typed_timeout_s() -> float:
    """`parallel.start_timeout_s` on the command line: the config is composed when all ranks have connected."""
    typed = [word.partition("=")[2] for word in sys.argv if word.startswith(f"parallel.{_KEY}=")]
    with suppress(ValueError, IndexError):  # a ConfigError later
        return max(1.0, float(typed[-1]))
    return START_TIMEOUT_S


def _share_cores(group: RankGroup, *, by_torchrun: bool) -> None:
    """Have torch compute on this rank's share of the cores, unless the user has chosen a number of threads."""
    chosen = os.environ.get("OMP_NUM_THREADS")
    if not chosen or (by_torchrun and chosen == "1"):  # torchrun sets 1 where nobody has chosen
        torch.set_num_threads(max(1, available_cores() // group.sharing))

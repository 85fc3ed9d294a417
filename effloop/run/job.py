"""A job of a sweep: a process of its own, so that whatever ends it ends nothing else."""

from __future__ import annotations

import sys
import traceback

from effloop.errors import BUG, InterruptedRunError, PreemptedRunError, reason
from effloop.registry import explained, line_of
from effloop.run import run
from effloop.run.spec import JobState, RunSpec
from effloop.system import processes
from effloop.system.signals import unblock_interrupts


def main() -> int:
    """Carry out the run that comes as JSON on the standard input; returns the exit code."""
    job = processes.receive_request()
    state = JobState(**job["state"])
    sys.argv = ["effloop", *job["spec"]["overrides"]]  # what the run folder says it was started by
    try:
        unblock_interrupts()
        with processes.command_timed(whole_process=True), processes.escaped_output():
            run(RunSpec.from_plain(job["spec"]))
    except (KeyboardInterrupt, InterruptedRunError):
        state.write("stopped", "interrupted")
        return InterruptedRunError.exit_code
    except BrokenPipeError:
        state.write("stopped", "nobody reads its output any more")
        processes.discard_output()
        return InterruptedRunError.exit_code
    except PreemptedRunError as error:
        state.write("preempted", str(error))
        return error.exit_code
    except Exception as error:
        if found := explained(error):
            state.write("failed", line_of(found))
            if job["debug"]:
                traceback.print_exc()
            return found.exit_code
        traceback.print_exc()
        state.write("failed", f"{type(error).__name__}: {reason(error)}")
        return BUG
    state.write("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())

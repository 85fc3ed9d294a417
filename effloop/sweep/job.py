"""A job of a sweep: a process of its own, so that whatever ends it ends nothing else."""

from __future__ import annotations

import json
import sys
import traceback

from effloop import registry
from effloop.errors import EffLoopError, InterruptedRunError
from effloop.launch.execute import work
from effloop.launch.rank import Job
from effloop.sweep.isolation import Note
from effloop.system.processes import discard_output, end_with_parent, unblock_interrupts


def main() -> int:
    """Do the job that comes as JSON on the standard input; returns the exit code."""
    plan = json.load(sys.stdin)
    end_with_parent(plan["parent"])
    note = Note(**plan["note"])
    sys.argv = ["effloop", *plan["job"]["overrides"]]  # what the run folder says it was started by
    try:
        unblock_interrupts()
        registry.load_plugins()
        work(Job(**plan["job"]))
    except (KeyboardInterrupt, InterruptedRunError):
        note.write("stopped", "interrupted")
        return InterruptedRunError.exit_code
    except BrokenPipeError:
        note.write("stopped", "nobody reads its output any more")
        discard_output()
        return InterruptedRunError.exit_code
    except EffLoopError as error:
        note.write("failed", str(error))
        if plan["debug"]:
            traceback.print_exc()
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        note.write("failed", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        return 1
    note.write("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())

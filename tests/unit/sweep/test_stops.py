"""What a signal does to a sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from effloop.run.jobs import is_stopping

WAITS = """
import sys, time
from pathlib import Path
from effloop.errors import PreemptedRunError
from effloop.run.jobs import Stops
stops = Stops(Path(sys.argv[1]), elsewhere=True)
with stops.caught():
    try:
        print("waits", flush=True)
        time.sleep(60)  # which a signal doesn't end by itself
    except PreemptedRunError as error:
        print(error)
"""


def test_a_sweep_that_waits_for_slurm_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=120)[0].startswith("stopped by SIGTERM; jobs that Slurm has already go on")
    assert is_stopping(tmp_path)

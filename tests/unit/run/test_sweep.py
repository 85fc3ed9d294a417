import fcntl
import os
import signal
import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from effloop.cli.main import main
from effloop.config import compose
from effloop.data.source.storage.kept import once
from effloop.errors import ConfigError
from effloop.run.sweep import compose_shared, owned_folder, signals_of
from effloop.runs.folder import LOCK


@pytest.mark.parametrize(
    "words", ["model=resnet18,resnet50 model.pretrained=true", "data=folder data.root=/a,/b seed=range(1,4)"]
)
def test_keys_may_need_a_value_that_is_swept(words):
    hydra, config = compose_shared(["-m"], OverridesParser.create().parse_overrides(words.split()))
    assert hydra.runtime.choices["hydra/sweeper"] == "basic"
    assert config.objective == "val/top1"


def test_what_no_job_can_have_is_refused():
    with pytest.raises(ConfigError, match="is not a key of the model chosen"):
        compose_shared(["-m"], OverridesParser.create().parse_overrides(["seed=1,2", "model.pretrained=true"]))


def test_the_lock_is_of_a_file_that_is_open_for_writing(here):
    """Else it would be of one machine alone on NFS."""
    with owned_folder(["seed=1,2"], {}, compose(["run=x"]), 2) as folder:
        with (folder / LOCK).open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        again = compose(["run=x", "sweep.resume=true"])
        with pytest.raises(ConfigError, match="x is being trained by this process"), owned_folder([], {}, again, 2):
            pass


def test_data_is_not_kept_open_for_all_of_a_sweep(monkeypatch):
    found: list[object] = []
    monkeypatch.setattr(
        "effloop.run.sweep.sweep", lambda *_, debug: found.extend([once("x", object), once("x", object)])
    )
    assert main(["-m", "seed=1,2"]) == 0
    assert found[0] is not found[1]


# What a signal does to a sweep.

WAITS = """
import sys, time
from pathlib import Path
from effloop.errors import PreemptedRunError
from effloop.run.sweep import signals_shared
try:
    with signals_shared(Path(sys.argv[1]), elsewhere=True):
        print("waits", flush=True)
        time.sleep(60)  # which a signal doesn't end by itself
except PreemptedRunError as error:
    print(error)
"""


@pytest.mark.nightly
def test_a_sweep_that_waits_for_slurm_ends(tmp_path):
    command = [sys.executable, "-c", WAITS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=120)[0].startswith("stopped by SIGTERM; jobs that run save")
    assert signals_of(tmp_path) == [signal.SIGTERM]

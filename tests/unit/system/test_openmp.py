"""How long OpenMP's threads spin: set before torch is imported, however a process starts, unless users choose it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import effloop
from effloop.run.sweep import JobRunner
from effloop.system.processes import SPINS, limit_spinning

COUNT, POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
OURS = {COUNT: str(SPINS)}
CHOSEN: list[dict[str, str]] = [{COUNT: "7"}, {POLICY: "active"}, {COUNT: str(SPINS), POLICY: "passive"}]


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (COUNT, POLICY):
        monkeypatch.setenv(name, "")  # for the end of the test to undo what it sets
        monkeypatch.delenv(name)


def read_by_libgomp(folder: Path, words: list[str], env: dict[str, str]) -> Any:
    """What libgomp would read in a process: its package `torch` says it, and ends where it is imported."""
    (folder / "torch.py").write_text(
        "import json, os\n"
        f"read = {{name: os.environ[name] for name in ('{COUNT}', '{POLICY}') if name in os.environ}}\n"
        "print(json.dumps(read), flush=True)\nos._exit(0)\n"
    )
    path = os.pathsep.join([str(folder), str(Path(effloop.__file__).parents[1])])
    process = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **env, "PYTHONPATH": path}, text=True,
        stdin=subprocess.DEVNULL, capture_output=True, check=True,
    )  # fmt: skip
    return json.loads(process.stdout)


TRAIN = ["-m", "effloop", "data=embedded", "epochs=1"]
SCRIPT = ["-c", "import sys; sys.argv[1:] = ['data=embedded', 'epochs=1']; from effloop.cli.main import entry; entry()"]
JOB = ["-c", "import effloop.run.job, torch"]
RANK = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "OMP_NUM_THREADS": "1",
    "TORCHELASTIC_RUN_ID": "none",
}


@pytest.mark.parametrize(("words", "env"), [(SCRIPT, {}), (TRAIN, RANK)])
def test_of_a_command(words, env, tmp_path):
    assert read_by_libgomp(tmp_path, words, env) == OURS


def job_environment(threads: dict[str, str] | None) -> dict[str, str]:
    values: dict[str, Any] = {"folder": "", "fixed": frozenset(), "objective": "", "count": 0, "parent": 0}
    return JobRunner(**values, resume=False, parallel=True, debug=False, threads=threads).environment()


def test_of_a_job(tmp_path):
    assert read_by_libgomp(tmp_path, JOB, job_environment(None)) == OURS


@pytest.mark.parametrize("chosen", CHOSEN)
def test_of_a_job_by_the_users_choice(chosen, monkeypatch):
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    limit_spinning()  # as the command that starts the sweep
    found = job_environment({})
    assert {name: found[name] for name in (COUNT, POLICY) if name in found} == chosen

"""Jobs of a real Slurm: signalled, requeued and preempted, they end with the weights of a run that nothing disturbs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kills_train import WORDS, Runs, batches_of, check_ledger, check_same
from ranks import ROOT
from runs import once
from slurms import Slurm, slurm

from effloop.cli.main import main
from effloop.errors import PROGRAM

REQUEUES = int(os.environ.get("EFFLOOP_REQUEUES", "20"))
PREEMPTIONS = int(os.environ.get("EFFLOOP_PREEMPTIONS", "5"))
TWO = ("--nodes=2", "--ntasks-per-node=1")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), sources=["folder"])


def documented(page: str, start: str) -> str:
    """The batch script in docs/PAGE whose options begin so."""
    text = (Path(ROOT) / "docs" / page).read_text("utf-8")
    return next(script for script in re.findall(r"```\w+\n(.*?)```", text, re.DOTALL) if f"#SBATCH --{start}" in script)


def small(script: str, runs: Runs, ranks: int = 2) -> str:
    """The script with tiny data and model."""
    words = once(*WORDS, f"data.root={runs.folder / 'folder'}", f"batch_size={8 // ranks}", "engine=threads")
    assert "data.root=/data/pets" in script
    return script.replace("data.root=/data/pets", f"{' '.join(words)} plugins=[{runs.folder / 'ledger.py'}]")


def submit(box: Slurm, runs: Runs, name: str, script: str, *options: str, slower: float = 0.1) -> tuple[Path, str]:
    """Hand in a job; its folder and number. An update takes so many seconds more."""
    cwd = runs.folder / name
    (cwd / "ledger").mkdir(parents=True)
    options = (*options, "--output=out.txt", "--error=err.txt")
    return cwd, box.submit(script, *options, cwd=cwd, LEDGER=str(cwd / "ledger"), SLOWER=str(slower))


def preemptible(runs: Runs) -> str:
    return small(documented("interruptions.md", "signal").replace("run=pets", "run=x"), runs)


def launched(runs: Runs) -> str:
    words = ["to=slurm", "nodes=2", "gpus=0", f"file={runs.folder / 'launched.sh'}", "data.root=/data/pets", "run=x"]
    assert main(["launch", *words]) == 0
    return small((runs.folder / "launched.sh").read_text(), runs)


def trained(cwd: Path, batches: int) -> bool:
    return batches_of((cwd / "ledger").iterdir()) >= batches


@pytest.mark.slow
def test_a_signal_and_a_requeue(box: Slurm, runs: Runs) -> None:
    """On two nodes; the script is what `launch` writes."""
    reference = runs.reference(2)  # before, as it takes longer than the job
    cwd, job = submit(box, runs, "signal", launched(runs))
    box.wait(job, lambda _: trained(cwd, 20))
    box.said("scancel", "--signal=USR1", job)
    ended = box.end(job)
    said = (cwd / "err.txt").read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said
    [line] = re.findall("effloop: .*", said)
    assert re.search(f"stopped by SIGUSR1 after update \\d+; resume with: {PROGRAM} resume ", line)
    check_same(cwd, reference)
    check_ledger(cwd, 2)

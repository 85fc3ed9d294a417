"""Jobs of a real Slurm: signalled, requeued and preempted, they end with the weights of a run that nothing disturbs."""

import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kills_train import WORDS, Runs, batches_of, check_ledger, check_same
from ranks import ROOT, wait_until
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
def test_a_signal_and_a_requeue(box, runs):
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


def over(job: dict[str, str]) -> bool:
    return job["JobState"] not in ("PENDING", "RUNNING", "COMPLETING")


def struck(box: Slurm, cwd: Path, job: str, rng: random.Random, *command: str) -> float | None:
    """Call a command at a random moment of a job's start, training, evaluation or save, and wait until it is queued.

    Returns:
        Seconds until the run was saved, 0 if there was nothing to save; None if the job had ended.
    """
    steps, delay = rng.choice([(0, rng.uniform(0, 8)), *[(rng.randint(1, 9), rng.uniform(0, 0.3))] * 3])
    until = batches_of((cwd / "ledger").iterdir()) + 2 * steps
    now = box.wait(job, lambda each: over(each) or (each["JobState"] == "RUNNING" and trained(cwd, until)))
    time.sleep(delay)
    at, restarts = time.time(), int(now["Restarts"])
    box.call(*command)
    now = box.wait(job, lambda each: over(each) or (each["JobState"] == "PENDING" and int(each["Restarts"]) > restarts))
    last = cwd / "outputs" / "x" / "checkpoints" / "last.ckpt"
    return None if over(now) else max(0.0, last.stat().st_mtime - at) if last.exists() else 0.0


@pytest.mark.nightly
@pytest.mark.parametrize("preempted", [False, True])
def test_requeues_at_random_moments(box, runs, preempted):
    """By the user, or by jobs of a partition with priority."""
    rng, seconds, number = random.Random(preempted), list[float](), 0
    while len(seconds) < (PREEMPTIONS if preempted else REQUEUES):
        cwd, job = submit(box, runs, f"requeue-{preempted}-{number}", preemptible(runs), *TWO)
        high = ("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        command = high if preempted else ("scontrol", "requeue", job)
        for _ in range(4):
            if (took := struck(box, cwd, job, rng, *command)) is None:
                break
            seconds.append(took)
        ended = box.end(job)
        assert ended["JobState"] == "COMPLETED", (cwd / "err.txt").read_text()
        check_same(cwd, runs.reference(2))
        check_ledger(cwd, 2)
        number += 1
    saved = sorted(each for each in seconds if each)
    print(
        f"{len(seconds)} in {number} runs; {len(saved)} saved, after {saved[len(saved) // 2]:.2f} s, {saved[-1]:.2f} s"
    )


@pytest.mark.nightly
def test_the_time_is_up(box, runs):
    script = preemptible(runs).replace("USR1@90", "USR1@20")
    cwd, job = submit(box, runs, "time", script, *TWO, "--time=1", slower=2)
    ended = box.end(job, 400)
    assert ended["JobState"] == "COMPLETED"
    assert int(ended["Restarts"]) >= 1, (cwd / "err.txt").read_text()
    check_same(cwd, runs.reference(2))
    check_ledger(cwd, 2)


@pytest.mark.nightly
def test_a_job_array(box, runs):
    """A seed each; one is requeued."""
    script = small(documented("interruptions.md", "array").replace("1-4", "1-2"), runs, ranks=1)
    cwd, job = submit(box, runs, "array", script)
    box.wait(f"{job}_1", lambda each: over(each) or trained(cwd, 30))
    box.said("scontrol", "requeue", f"{job}_1")
    for seed in (1, 2):
        ended = box.end(f"{job}_{seed}")
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", str(2 - seed)), (cwd / "err.txt").read_text()
        (own := runs.folder / f"array-{seed}" / "outputs").mkdir(parents=True)
        (own / "x").symlink_to(cwd / "outputs" / f"seed-{seed}")
        check_same(own.parent, runs.reference(1, f"seed={seed}"))


@pytest.mark.nightly
def test_a_sweep_of_jobs(box, runs):
    """As documented: one job is told that its time is up, one is requeued, and the sweep waits for both."""
    text = (Path(ROOT) / "docs/sweeps.md").read_text("utf-8")
    [command] = re.findall(r"^effloop -m .*hydra/launcher=submitit_slurm (?:.*\\\n)*.*\n", text, re.MULTILINE)
    for old, new in (("gpus_per_node=8", "nodes=1"), ("partition=gpu", "partition=low"), ("_task=64", "_task=1")):
        assert old in command
        command = command.replace(old, new)
    words = f"{small(command, runs)[:-1]} run=s parallel.processes=2 seed=1,2".replace("seed=1,2,3,4 ", "")
    cwd = runs.folder / "sweep"
    (cwd / "ledger").mkdir(parents=True)
    with box.start("sh", "-c", words, cwd=cwd, LEDGER=str(cwd / "ledger"), SLOWER="0.1") as sweep:
        wait_until(lambda: trained(cwd, 30), sweep, 300)
        array = box.said("squeue", "--noheader", "--format=%F").split()[0]
        box.said("scancel", "--signal=USR1", f"{array}_0")
        box.said("scontrol", "requeue", f"{array}_1")
        for job in (f"{array}_0", f"{array}_1"):
            assert box.end(job)["Restarts"] == "1"
        _, err = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, err
    for number in (0, 1):
        assert "resumed from " in (cwd / f"outputs/multirun/s/{number}/log.txt").read_text()
        (own := runs.folder / f"sweep-{number}" / "outputs").mkdir(parents=True)
        (own / "x").symlink_to(cwd / f"outputs/multirun/s/{number}")
        check_same(own.parent, runs.reference(2, f"seed={number + 1}"))

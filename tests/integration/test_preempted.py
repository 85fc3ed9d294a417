"""A run that is stopped within an epoch, by a signal or a kill, and gone on with ends as if never stopped."""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import runs as of_runs
from kills_train import Runs, campaign, check_same, global_order, parallel
from ranks import all_gone, done, pids, started, wait_until
from runs import TINY, composed

import effloop
from effloop.checkpoint import files
from effloop.cli.main import main
from effloop.errors import PROGRAM, ConfigError, PreemptedRunError
from effloop.runs.reader import read_run
from effloop.system.signals import STOPPING, StopRequest
from effloop.train.evaluation import Scorer
from effloop.train.trainer import Trainer


def train(photos: Path, *words: str) -> int:
    """With TensorBoard's files."""
    return of_runs.train(photos, "record.tensorboard=true", *words)


KILLS = int(os.environ.get("EFFLOOP_KILLS", "8"))
TERMS = int(os.environ.get("EFFLOOP_TERMS", "5"))
WORDS = ("optim.ema=0.9", "accumulate=2", "precision=bf16", "batch_size=4", "record.log_every=3", "task.loss=bce")
WORDS += ("augment.mixup=0.3", "augment.mix=pair", "augment.mix_epochs=1")


@contextmanager
def signalled(step: int, number: int = signal.SIGTERM, *, evaluating: bool = False) -> Iterator[None]:
    """Runs in this process get a signal in the middle of this update, or in the evaluation after it."""
    update, add = Trainer.update, Scorer.add
    at, trainers = [0], list[Trainer]()

    def updating(trainer: Trainer) -> float:
        lr = update(trainer)
        at[0] = trainer.progress.step
        trainers.append(trainer)
        if at[0] == step and not evaluating:
            os.kill(os.getpid(), number)
            arrived(trainer)
        return lr

    def adding(scorer: Scorer, *args: Any) -> None:
        add(scorer, *args)
        if at[0] == step and evaluating:
            os.kill(os.getpid(), number)
            arrived(trainers[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", updating)
        patch.setattr(Scorer, "add", adding)
        yield


def arrived(trainer: Trainer) -> None:
    """A thread sees the signal, at once but for the scheduler."""
    until = time.monotonic() + 120
    while not trainer.request.bits:
        assert time.monotonic() < until


def preempted(photos: Path, *words: str) -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    assert train(photos, "run=x", *words) == 75
    assert [signal.getsignal(number) for number in STOPPING] == before
    assert not [thread for thread in threading.enumerate() if thread.name == "effloop-signals"]


@pytest.fixture(scope="module")
def reference(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(photos, "run=x", *WORDS) == 0
    return folder


def test_a_signal_in_an_epoch(reference, photos, here, capsys):
    """Ten batches are five updates in an epoch: the second one."""
    with signalled(2, signal.SIGUSR1):
        preempted(photos, *WORDS)
    said = capsys.readouterr().err
    assert said == f"effloop: stopped by SIGUSR1 after update 2; resume with: {PROGRAM} resume outputs/x\n"
    run = read_run(here / "outputs/x")
    assert (run.state, run.reason) == ("preempted", "stopped by SIGUSR1 after update 2")
    assert (run.path / "log.txt").read_text().endswith("\npreempted: stopped by SIGUSR1 after update 2\n")
    assert files.position(here / "outputs/x/checkpoints/last.ckpt") == {"epoch": 0, "samples_seen": 16, "step": 2}
    assert main(["resume", "outputs/x"]) == 0
    assert "at epoch 0, after 16 of its samples\n" in capsys.readouterr().out
    check_same(here, reference)
    assert curves(here) == curves(reference)


def test_a_signal_in_the_evaluation(reference, photos, here):
    with signalled(10, evaluating=True):
        preempted(photos, *WORDS)
    progress = files.position(here / "outputs/x/checkpoints/last.ckpt")
    assert progress == {"epoch": 1, "samples_seen": 40, "step": 10}  # which is trained, but not done
    with (here / "outputs/x/metrics.jsonl").open(
        "a"
    ) as file:  # as if killed after an evaluation, before its checkpoint
        file.write('{"split": "val", "epoch": 1, "step": 10}\n')
    assert main(["resume", "outputs/x"]) == 0
    check_same(here, reference)
    assert curves(here) == curves(reference)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's points, without the times."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "outputs/x/tensorboard"))
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if name.startswith(("train/", "val/"))]
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in names}


def test_a_kill_after_the_last_checkpoint(reference, here, capsys):
    shutil.copytree(reference / "outputs", here / "outputs")
    (here / "outputs/x/summary.json").unlink()
    assert main(["resume", "outputs/x"]) == 0
    assert "summary.json was missing" in capsys.readouterr().out
    check_same(here, reference)


def test_a_users_own_handlers_stay(photos, here):
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        trainer = effloop.build_trainer(composed(f"data.root={photos}", *TINY, "record=none"))
        update = trainer.update

        def asking() -> float:
            os.kill(os.getpid(), signal.SIGTERM)
            if trainer.progress.step == 6:
                trainer.request.ask(signal.SIGUSR1)
            return update()

        trainer.update = asking  # type: ignore[method-assign]
        with pytest.raises(PreemptedRunError, match="stopped by SIGUSR1 after update 7"):
            trainer.fit()
        assert len(came) == 7
    finally:
        signal.signal(signal.SIGTERM, before)


def ran(folder: Path) -> bool:
    """Whether a run has written a line of its second epoch."""
    path = folder / "outputs/x/metrics.jsonl"
    return path.exists() and '"epoch": 1' in path.read_text()


LONG = ("effloop", *TINY, "epochs=400", "device=cpu", "run=x")


@pytest.mark.parametrize(
    "rank", [pytest.param(None, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)]
)
def test_ranks_save_together(photos, tmp_path, rank):
    """A signal to the whole group, as Slurm sends it, workers and all; or to one rank."""
    words = ("parallel=ddp", "parallel.processes=2", "parallel.max_restarts=1", "engine=processes", "num_workers=1")
    process = started([*LONG, f"data.root={photos}", *words, "batch_size=4"], tmp_path)
    wait_until(lambda: ran(tmp_path), process)
    if rank is None:
        os.killpg(process.pid, signal.SIGTERM)
    else:
        os.kill(pids(tmp_path)[rank], signal.SIGHUP)
    code, _, err = done(process)
    assert code == 75, err
    (line,) = err.splitlines()
    by = "SIGTERM" if rank is None else "SIGHUP"
    assert line.startswith(f"effloop: stopped by {by} after update ")
    assert line.endswith(f"; resume with: {PROGRAM} resume outputs/x")
    assert all_gone(process.pid)
    state = files.read(tmp_path / "outputs/x/checkpoints/last.ckpt")
    assert read_run(tmp_path / "outputs/x").state == "preempted"
    assert len(state["rng"]) == len(state["metrics"]) == 2
    assert ("buffers" in state) == (state["progress"]["samples_seen"] > 0)


STUCK = """
import time
from effloop.data.transfer import Transfer
normalize = Transfer.normalize

def slow(transfer, images):
    if WHERE.exists():
        WHERE.rename(WHERE.with_name("waits"))
        time.sleep(1000)
    return normalize(transfer, images)

Transfer.normalize = slow
"""


@pytest.mark.slow
def test_a_second_signal_ends_a_run_that_waits(photos, tmp_path):
    plugin, where = tmp_path / "stuck.py", tmp_path / "stuck"
    plugin.write_text(f"from pathlib import Path\nWHERE = Path({str(where)!r})\n{STUCK}")
    process = started([*LONG, f"data.root={photos}", f"plugins=[{plugin}]"], tmp_path)
    wait_until(lambda: ran(tmp_path), process)
    where.touch()
    wait_until((tmp_path / "waits").exists, process)
    process.terminate()
    time.sleep(2.5)  # one that comes at once is the same
    assert process.poll() is None
    process.terminate()
    code, _, err = done(process)
    assert code == 75
    line = f"effloop: stopped by SIGTERM again, before it was saved; resume with: {PROGRAM} resume outputs/x "
    assert err.startswith(line)
    assert read_run(tmp_path / "outputs/x").state == "preempted"
    assert files.position(tmp_path / "outputs/x/checkpoints/last.ckpt")["epoch"] >= 1


@pytest.mark.slow
def test_patience_is_from_the_last_progress():
    reading, writing = os.pipe()
    if not (child := os.fork()):
        request = StopRequest(at_end=lambda name, again: os.write(writing, b"late") and None, patience_s=0.6)
        with request.caught():
            os.kill(os.getpid(), signal.SIGTERM)
            until = time.monotonic() + 0.9
            while time.monotonic() < until:
                request.progress()
                time.sleep(0.01)
            os.write(writing, b"batches, ")
            with request.busy():
                time.sleep(0.9)
            os.write(writing, b"a save, ")
            time.sleep(1000)
    os.close(writing)
    with open(reading) as said:
        assert said.read() == "batches, a save, late"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75


@pytest.mark.usefixtures("here")
def test_a_schedulers_signal_as_the_process_ends():
    """Of a run that is over it would make one that failed."""
    Path("late.py").write_text("import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGUSR1)\n")
    code, _, err = done(started([sys.executable, "-m", "effloop", "list", "model", "plugins=[late.py]"], Path.cwd()))
    assert (code, err) == (0, "")


def test_a_trainer_that_was_stopped(photos, here):
    trainer = effloop.build_trainer(effloop.compose([f"data.root={photos}", *TINY, "epochs=2", "run=x"]))
    trainer.request.ask()
    with pytest.raises(PreemptedRunError):
        trainer.fit()
    with pytest.raises(ConfigError, match="fit: this trainer was stopped"):
        trainer.fit()
    assert trainer.progress.step == 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("kills"))


@pytest.mark.nightly
def test_kills(runs):
    """Sources, engines and ranks in turn, several kills to a run; EFFLOOP_KILLS=200 is 12 or 13 to each of 16."""
    kills, _ = campaign(runs, KILLS, seed=1)
    assert kills >= KILLS


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stops(runs, number):
    count = TERMS if number == signal.SIGTERM else -(-TERMS // 5)
    assert campaign(runs, count, numbers=[number], seed=2)[0] >= count
    assert max(runs.seconds) < 10


@pytest.mark.nightly
def test_other_ranks_go_on_in_the_same_order(runs, monkeypatch):
    """2 ranks, then 1, then 2: each sample once, in the order that a run of 2 has them."""
    monkeypatch.setenv("SLOWER", "0.05")
    words = [f"data.root={runs.folder / 'folder'}"]
    for start, (step, ranks) in enumerate(((5, 2), (20, 1), (None, 2))):
        again = [] if not start else ["parallel=none", "batch_size=8"] if ranks == 1 else parallel(ranks)
        process = runs.start("other", words, ranks, resumed=again)
        metrics = runs.folder / "other/outputs/x/metrics.jsonl"
        if step:
            wait_until(lambda: metrics.exists() and f'"step": {step + 1}, ' in metrics.read_text(), process)  # noqa: B023
            process.terminate()
        _, err = process.communicate(timeout=120)
        assert process.returncode == (75 if step else 0), err
    log = (runs.folder / "other/outputs/x/log.txt").read_text()
    assert "other topology: 2 ranks then, 1 now: same sample order, other sums" in log
    assert "other topology: 1 ranks then, 2 now: same sample order, other sums" in log
    order = [global_order(folder) for folder in (runs.folder / "other", runs.reference(2))]
    assert order[0] == order[1]

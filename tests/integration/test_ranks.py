"""Several ranks: how they start, that they compute what one process does, and how they end."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from forks import Forked
from ranks import all_gone, done, environment, free_port, pids, run_script, started, wait_until
from runs import TINY, once, rows, train

import effloop
from effloop.cli.main import main
from effloop.errors import PROGRAM, ConfigError
from effloop.runs.reader import read_run

RUN = [*TINY, "run=run", "device=cpu", "batch_size=4", "record.tensorboard=false"]
DDP = [*RUN, "parallel=ddp", "parallel.sync_batchnorm=true"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def by_two(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run of two ranks: the folder it was started in, standard output and standard error."""
    folder = tmp_path_factory.mktemp("two")
    code, out, err = done(started(["effloop", f"data.root={photos}", *DDP], folder))
    assert code == 0, err
    return folder, out, err


def test_ranks_compute_what_one_process_does_with_the_global_batch(by_two, photos, here):
    """And leave one run folder, and nothing else."""
    folder, out, err = by_two
    assert not list(folder.glob("effloop-ranks-*"))
    assert [path.name for path in (folder / "outputs").iterdir()] == ["run"]
    assert "8 images = 4 per rank x 2 (ranks)" in out
    assert out.count("run: ") == 1
    assert err == ""
    assert json.loads((folder / "outputs" / "run" / "summary.json").read_text())
    assert train(photos, *RUN, "batch_size=8") == 0
    assert_alike(folder / "outputs" / "run", here / "outputs" / "run")


def test_the_end_of_a_forked_rank_leaves_its_launcher_the_folder(tmp_path):
    script = """
        import multiprocessing, os, tempfile
        with tempfile.TemporaryDirectory() as folder:
            process = multiprocessing.get_context("spawn").Process(target=os.getpid)
            process.start()
            process.join()
            print(process.exitcode, os.path.isdir(folder))
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    assert done(Forked([str(tmp_path / "script.py")], cwd=tmp_path, stdout=-1, stderr=-1, text=True)) == (
        0,
        "0 True\n",
        "",
    )


def assert_alike(run: Path, wanted: Path) -> None:
    """The same records, to rounding."""
    for one, other in zip(rows(run), rows(wanted), strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert one[key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), key


SCRIPT = """
    import json, torch, effloop
    cfg = effloop.compose({overrides})
    trainer = effloop.build_trainer(cfg)
    seen = []
    def noted(batches):
        for batch in batches:
            seen.extend(batch.ids[batch.valid].tolist())
            yield batch
    trainer.train_epoch(noted(trainer.train.epoch(0)))
    trained = sorted(sum(trainer.parallel.gather(seen), []))
    seen.clear()
    trainer.model.load_state_dict(torch.load({checkpoint!r}, weights_only=True)["model"])
    scores = trainer.evaluate(noted(trainer.val.epoch(0)))
    print(json.dumps([trained, sorted(sum(trainer.parallel.gather(seen), [])), scores]))
    trainer.parallel.close()
"""


@pytest.mark.slow
def test_ones_own_script_sees_each_sample_once(by_two, photos, tmp_path):
    world_size, run = 3, by_two[0] / "outputs" / "run"
    overrides = [f"data.root={photos}", *DDP, "data.tail=wrap"]
    script = SCRIPT.format(overrides=overrides, checkpoint=str(run / "checkpoints" / "last.ckpt"))
    ended = run_script(script, tmp_path, world_size)
    assert [code for code, _, _ in ended] == [0] * world_size, ended
    expected = json.loads((run / "summary.json").read_text())["last"]
    for _, out, _ in ended:
        trained, validated, scores = json.loads(out.splitlines()[-1])
        assert sorted(set(trained)) == list(range(40))
        assert len(trained) == -(-40 // (4 * world_size)) * 4 * world_size
        assert validated == list(range(13))  # which no number of ranks divides
        assert scores["top1"] == expected["top1"]
        assert scores["loss"] == pytest.approx(expected["loss"], rel=1e-5)


LOADS = """
    import json, effloop, torch.distributed as dist
    cfg = effloop.compose({overrides})
    dist.init_process_group("gloo")  # by the script itself
    loader = effloop.build_loader(cfg)
    print(json.dumps([sum((batch.ids.tolist() for batch in loader), []) for epoch in range(2)]))
"""


def test_a_loader_in_a_script_of_ones_own_has_its_ranks_part(photos, tmp_path):
    overrides = [f"data.root={photos}", "image_size=16", "batch_size=4", "num_workers=1", "data.tail=wrap"]
    ended = run_script(LOADS.format(overrides=overrides), tmp_path)
    assert [code for code, _, _ in ended] == [0, 0], ended
    first, second = (json.loads(out) for _, out, _ in ended)
    for epoch in range(2):
        assert sorted(first[epoch] + second[epoch]) == list(range(40))
    assert first[0] != first[1]


def test_a_rank_does_not_train_a_model_of_its_own(monkeypatch):
    for name, value in environment(0, 2, 29500).items():
        monkeypatch.setenv(name, value)
    config = effloop.compose(["parallel=none"])
    with pytest.raises(ConfigError, match=r"parallel: none would train 2 models, .* of the 2 ranks; set parallel=ddp"):
        effloop.build_trainer(config)


@pytest.mark.slow
def test_torchrun_does_the_same(by_two, photos, tmp_path):
    overrides = [word for word in DDP if word != "parallel=ddp"]
    args = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "effloop", f"data.root={photos}", *overrides]
    code, out, err = done(started(args, tmp_path))
    assert code == 0, err
    run = tmp_path / "outputs" / "run"
    assert rows(run) == rows(by_two[0] / "outputs" / "run")
    assert yaml.safe_load((run / "overrides.yaml").read_text())[-1] == "parallel=ddp"
    assert out.count("run: ") == 1


def slurm(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


@pytest.mark.nightly
def test_slurm_does_the_same(by_two, photos, tmp_path):
    port, args = free_port(), ["effloop", f"data.root={photos}", *DDP]
    ended = [done(each) for each in [started(args, tmp_path, **slurm(rank, port)) for rank in (0, 1)]]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert_alike(tmp_path / "outputs" / "run", by_two[0] / "outputs" / "run")
    assert ended[1][1:] == ("", "")


@pytest.fixture
def long(photos: Path, tmp_path: Path) -> Iterator[list[str]]:
    """The command of a run that takes a while, in `tmp_path`."""
    yield ["effloop", f"data.root={photos}", *DDP, "epochs=400"]
    for path in tmp_path.glob("effloop-ranks-*"):
        shutil.rmtree(path, ignore_errors=True)


def epochs_done(folder: Path, count: int) -> bool:
    path = folder / "outputs" / "run" / "metrics.jsonl"
    return path.exists() and f'"epoch": {count}' in path.read_text()


def test_a_killed_rank_takes_the_run_down_with_one_line(long, tmp_path):
    process = started(long, tmp_path)
    wait_until(lambda: epochs_done(tmp_path, 2), process)
    pid = pids(tmp_path)[1]
    os.kill(pid, signal.SIGKILL)
    code, _, err = done(process)
    assert all_gone(process.pid)
    assert code == 2
    (line,) = err.splitlines()
    assert re.fullmatch(
        rf"effloop: rank 1 on \S+ \(pid {pid}\) was killed by SIGKILL \(out of memory\?\); "
        rf"resume with: {PROGRAM} resume outputs/run",
        line,
    )
    assert f"effloop: {read_run(tmp_path / 'outputs/run').reason}" == line
    assert not list(tmp_path.glob("effloop-ranks-*"))


@pytest.mark.nightly
def test_a_killed_launcher_ends_its_ranks(long, tmp_path, capsys):
    process = started([*long, "engine=processes", "num_workers=1"], tmp_path)
    wait_until(lambda: epochs_done(tmp_path, 1), process)
    assert read_run(tmp_path / "outputs/run").state == "running"
    assert main(["resume", str(tmp_path / "outputs/run")]) == 2
    assert "is being trained by process" in capsys.readouterr().err
    os.kill(process.pid, signal.SIGKILL)
    done(process)
    assert all_gone(process.pid)
    assert read_run(tmp_path / "outputs/run").state in ("killed", "stopped")  # one that ends first breaks the other off


def test_ctrl_c(long, tmp_path):
    process = started(long, tmp_path)
    wait_until(lambda: epochs_done(tmp_path, 1), process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does; the launcher sends its ranks another one
    code, _, err = done(process)
    assert code == 130
    assert err == f"effloop: interrupted; resume with: {PROGRAM} resume outputs/run\n"
    assert all_gone(process.pid)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_signals_again_end_a_rank_that_answers_none(number, code, long, tmp_path):
    process = started(long, tmp_path)
    wait_until(lambda: epochs_done(tmp_path, 1), process)
    os.kill(pids(tmp_path)[1], signal.SIGSTOP)
    for _ in range(3 if number == signal.SIGTERM else 2):
        os.kill(process.pid, number)
        time.sleep(2.5 if number == signal.SIGTERM else 1)  # a signal that comes sooner is the same one
    found, _, err = done(process)
    assert (found, err.count("\n")) == (code, 1), err
    assert all_gone(process.pid)


@pytest.mark.slow
def test_max_restarts_go_on_from_the_last_checkpoint(long, tmp_path):
    process = started([*long, "epochs=8", "parallel.max_restarts=1"], tmp_path)
    wait_until(lambda: epochs_done(tmp_path, 2), process)
    os.kill(pids(tmp_path)[1], signal.SIGKILL)
    code, out, err = done(process)
    assert (code, err) == (0, ""), err[-900:]
    assert re.search(r"again from epoch \d+: rank 1 on \S+ \(pid \d+\) was killed by SIGKILL", out)
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["run"]
    assert json.loads((tmp_path / "outputs" / "run" / "summary.json").read_text())["last"]["epoch"] == 7


@pytest.mark.slow
def test_a_stopped_rank_is_named(long, tmp_path):
    process = started([*long, "parallel.timeout_s=3"], tmp_path)
    wait_until(lambda: epochs_done(tmp_path, 1), process)
    pid = pids(tmp_path)[1]
    os.kill(pid, signal.SIGSTOP)
    code, _, err = done(process)
    assert code == 2
    (line,) = err.splitlines()
    assert f"(pid {pid}) has not answered for 3 s: the others wait for it" in line
    assert line.endswith(f"resume with: {PROGRAM} resume outputs/run")
    assert all_gone(process.pid)


SLOW = """
    import hashlib, time, effloop
    from effloop.parallel import watchdog
    watchdog._WINDOW_S = 2
    trainer = effloop.build_trainer(effloop.compose({overrides}))
    step = trainer.train_step.forward
    def slow(*args):
        time.sleep({seconds} * trainer.parallel.rank + 0.01)
        return step(*args)
    trainer.train_step.forward = slow
    trainer.fit()
    digest = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    print(digest.hexdigest())
    trainer.parallel.close()
"""


@pytest.mark.nightly
def test_a_slow_rank_is_named_once_and_changes_nothing(photos, tmp_path):
    overrides = [f"data.root={photos}", *once(*DDP, "epochs=30")]
    found = {}
    for seconds in (0.0, 0.05):
        folder = tmp_path / str(seconds)
        folder.mkdir()
        found[seconds] = run_script(SLOW.format(overrides=overrides, seconds=seconds), folder)
        assert [code for code, _, _ in found[seconds]] == [0, 0], found
    assert [err for _, _, err in found[0.0]] == ["", ""]
    assert [out.splitlines()[-1] for _, out, _ in found[0.05]] == [out.splitlines()[-1] for _, out, _ in found[0.0]]
    (line,) = "".join(err for _, _, err in found[0.05]).splitlines()
    assert re.search(r"warning: rank 1 on \S+ \(pid \d+\) holds the others up: it takes \d+\.\d times as long", line)


MEETS = """
    import os, signal, sys
    from effloop.run.rank import rank_session
    from effloop.parallel.base import detect_launcher
    from effloop.parallel.rendezvous import open_store
    env = detect_launcher()
    if env.rank and {said}:  # what a rank does first when it connects
        import json
        from dataclasses import asdict
        from effloop.parallel.rendezvous import Peer
        open_store(env).set("effloop/hello/1", json.dumps({{"token": "", **asdict(Peer.own({{}}))}}))
    if env.rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    with rank_session(env, timeout_s=2) as session:
        session.run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("said", [False, True])
def test_a_rank_that_is_stopped_before_the_ranks_have_met_is_named(tmp_path, said):
    path, port = tmp_path / "script.py", free_port()
    path.write_text(textwrap.dedent(MEETS.format(said=said)))
    pipes: Any = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [Forked([str(path)], env=environment(rank, 2, port), **pipes) for rank in (0, 1)]
    _, err = ranks[0].communicate(timeout=120)
    os.kill(ranks[1].pid, signal.SIGKILL)
    ranks[1].communicate(timeout=120)
    assert ranks[0].returncode == 2
    (line,) = err.splitlines()
    who = rf"rank 1 on \S+ \(pid {ranks[1].pid}\) of 2 ranks has not" if said else "only 1 of 2 ranks have"
    assert re.search(rf"{who} connected within 2 s; .* parallel.start_timeout_s", line), line


@pytest.mark.nightly
def test_two_machines(by_two, photos, tmp_path):
    """As torchrun starts them, one after the other, though both are this one."""
    words = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    args = ["-m", "effloop", f"data.root={photos}", *DDP]
    starts = [[*TORCHRUN, *words, f"--node-rank={number}", *args] for number in (0, 1)]
    ended = [done(each) for each in [started(start, tmp_path, GLOO_SOCKET_IFNAME="lo") for start in starts]]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert_alike(tmp_path / "outputs" / "run", by_two[0] / "outputs" / "run")

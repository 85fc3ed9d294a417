"""Two machines: how they find each other, and what happens when one of them, or the network between them, is gone."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import NAMES, WHY_NOT, Host, hosts
from kills_train import equal
from ranks import done, wait_until
from runs import TINY, once

from effloop.checkpoint import files
from effloop.runs.reader import read_run

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
slow, nightly = pytest.mark.slow, pytest.mark.nightly

PLUGIN = """
import time
from effloop.train.trainer import Trainer

forward_backward = Trainer.forward_backward

def slow(trainer, batch, **rest):
    with open(f"steps-{trainer.parallel.rank}", "a") as file:
        file.write(".")
    time.sleep(0.05)
    return forward_backward(trainer, batch, **rest)

Trainer.forward_backward = slow
"""
"""Steps that are counted, and slow enough for something to happen in between."""


def command(photos: Path, cwd: Path, *words: str) -> list[str]:
    (cwd / "slow.py").write_text(PLUGIN)
    fixed = ["run=run", "device=cpu", "global_batch=8", "record.tensorboard=false", "plugins=[slow.py]"]
    tiny = [word for word in TINY if not word.startswith("batch_size")]
    return ["effloop", *once(f"data.root={photos}", *tiny, *fixed, "parallel=ddp", *words)]


def by_hand(rank: int, **changed: str) -> dict[str, str]:
    """What a scheduler sets that starts a rank on each host."""
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**own, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", **changed}


def by_slurm(rank: int) -> dict[str, str]:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    own = {"SLURM_JOB_ID": "1", "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)}
    return {**own, **step, "SLURM_STEP_NODELIST": "host[1-2]"}


def begun(pair: list[Host], args: list[str], cwd: Path, env: Callable[[int], dict[str, str]] = by_hand) -> list[Any]:
    return [host.start(*args, cwd=cwd, **env(rank)) for rank, host in enumerate(pair)]


def lines(err: str) -> list[str]:
    """Standard error without what torch says where addresses have no names."""
    return [line for line in err.splitlines() if line and "hostname of the client socket" not in line]


def steps_done(cwd: Path, count: int) -> bool:
    return (cwd / "steps-0").exists() and len((cwd / "steps-0").read_text()) > count


@pytest.mark.parametrize(
    ("names", "env"),
    [
        pytest.param("127.0.1.1 host1 host2\n", by_hand, marks=slow),  # as Debian writes a machine's own name
        pytest.param("", by_hand, marks=nightly),
        pytest.param(NAMES, by_slurm, marks=nightly),
    ],
)
def test_they_find_each_other_whatever_their_names_resolve_to(photos, tmp_path, names, env):
    with hosts(names=names) as pair:
        ended = [done(each) for each in begun(pair, command(photos, tmp_path), tmp_path, env)]
        assert [(code, lines(err)) for code, _, err in ended] == [(0, []), (0, [])]
        assert [host.running() for host in pair] == [[], []]
    assert read_run(tmp_path / "outputs/run").state == "done"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        pytest.param(
            {"MASTER_ADDR": "hots1"}, r"rank 1 on host2 .* hots1:29500 \(.*name resolution\); check", marks=slow
        ),
        pytest.param({"WORLD_SIZE": "3"}, r"WORLD_SIZE: not .*'2' \(rank 0 on host1\); '3' \(rank 1 on h", marks=slow),
        pytest.param({"MASTER_ADDR": "10.77.0.9"}, r"10.77.0.9:29500 \((No route to host|timed out)\)", marks=nightly),
        pytest.param({"MASTER_ADDR": "localhost"}, r"localhost:29500 \(Connection refused\); check", marks=nightly),
        pytest.param({"MASTER_PORT": "29501"}, r"10.77.0.1:29501 \(Connection refused\); check", marks=nightly),
    ],
)
def test_what_one_of_them_has_wrong(photos, tmp_path, changed, line):
    wait_s = 60 if "WORLD_SIZE" in changed else 1  # for the other one, on a busy machine; it is said at once
    args = command(photos, tmp_path, f"parallel.start_timeout_s={wait_s}")
    with hosts() as pair:
        started = begun(pair, args, tmp_path, lambda rank: by_hand(rank, **(changed if rank else {})))
        (first, _, mine), (second, _, other) = map(done, started)
    assert (first, second) == (2, 2)
    said = [*lines(mine), *lines(other)]
    assert [each for each in said if re.search(line, each)], said
    assert len(said) <= 2
    assert not (tmp_path / "outputs").exists()


@pytest.fixture(scope="module")
def unbroken(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two hosts that nothing happens to."""
    cwd = tmp_path_factory.mktemp("unbroken")
    with hosts() as pair:
        for each in begun(pair, command(photos, cwd, "epochs=4"), cwd):
            assert done(each)[0] == 0
    return cwd / "outputs/run"


def assert_equal_end(run: Path, unbroken: Path) -> None:
    ours, theirs = (files.read(folder / "checkpoints/last.ckpt") for folder in (run, unbroken))
    assert not [part for part in ("model", "optimizer", "progress") if not equal(ours[part], theirs[part])]


@pytest.mark.parametrize("gone", [pytest.param(1, marks=slow), pytest.param(0, marks=nightly)])
def test_a_host_that_vanishes(photos, tmp_path, unbroken, gone):
    """Without a word, as nothing of it answers any more; the run is continued when it is back."""
    args = command(photos, tmp_path, "epochs=4", "parallel.timeout_s=5", "resume=auto")
    with hosts() as pair:
        started = begun(pair, args, tmp_path)
        wait_until(lambda: steps_done(tmp_path, 7), started[0])
        pair[gone].stop()
        since = time.monotonic()
        code, _, err = done(started[1 - gone])
        assert code == 2
        assert time.monotonic() - since < 60
        assert re.search(rf"^effloop: rank {gone} on host{gone + 1}[ ,].* has not answered", lines(err)[-1]), err
        assert len(lines(err)) == 1
        assert pair[1 - gone].running() == []
        if gone:
            assert read_run(tmp_path / "outputs/run").reason == lines(err)[-1].removeprefix("effloop: ")
        pair[gone].boot()
        again = begun(pair, args, tmp_path)
        assert [done(each)[0] for each in again] == [0, 0]
    assert_equal_end(tmp_path / "outputs/run", unbroken)


@nightly
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_a_link_that_is_cut_for_a_while_or_slow(photos, tmp_path, unbroken, loss):
    with hosts() as pair:
        started = begun(pair, command(photos, tmp_path, "epochs=4"), tmp_path)
        wait_until(lambda: steps_done(tmp_path, 7), started[0])
        pair[1].link.cut, pair[1].link.delay_s, pair[1].link.loss = not loss, 0.1 * bool(loss), loss
        time.sleep(5)
        pair[1].link.cut = False
        assert [done(each)[0] for each in started] == [0, 0]
    assert_equal_end(tmp_path / "outputs/run", unbroken)


@nightly
def test_a_link_that_stays_cut_ends_both_sides(photos, tmp_path):
    with hosts() as pair:
        started = begun(pair, command(photos, tmp_path, "epochs=400", "parallel.timeout_s=2"), tmp_path)
        wait_until(lambda: steps_done(tmp_path, 7), started[0])
        pair[1].link.cut = True
        (first, _, mine), (second, _, other) = map(done, started)
        assert (first, second) == (2, 2)
        assert "rank 1 on host2" in lines(mine)[-1]
        assert "rank 0 on host1, whose machine has the ranks' store" in lines(other)[-1]
        assert [host.running() for host in pair] == [[], []]
    assert read_run(tmp_path / "outputs/run").state == "failed"

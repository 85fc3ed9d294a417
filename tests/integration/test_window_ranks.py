"""Ranks that train on data of which only some shards are here at a time: real processes, killed and gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kills_train import LEDGER, batches_of, global_order, parallel
from plans import write_as
from ranks import all_gone, done, free_port, group, started, wait_until
from remotes import Server, serving
from runs import TINY, composed, make_photos, once

from effloop.data.source import Tail, sources
from effloop.data.windows import WindowOrder

IMAGES, BATCH, EPOCHS, WINDOW = 48, 6, 3, 3
BATCHES = IMAGES // BATCH
RUN = (*TINY, f"epochs={EPOCHS}", "run=x", "device=cpu", "num_workers=1", "record.tensorboard=false")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of 48 photographs in tar files of about five each."""
    make_photos(tmp_path / "photos", train=IMAGES, val=6)
    (tmp_path / "served").mkdir()
    write_as("tar", tmp_path / "photos", tmp_path / "served/d", shard_bytes=9_000)
    (tmp_path / "ledger.py").write_text(LEDGER)
    with serving(tmp_path / "served") as found:
        yield found


def words_of(server: Server, *words: str) -> list[str]:
    data = ("data=tar", f"data.root={server.url}/d/", f"data.window={WINDOW}")
    return once(*RUN, *data, *words)


def expected(server: Server) -> dict[tuple[int, int], list[int]]:
    """{epoch and position: the samples of the batch}, as a function of the seed."""
    config = composed("data=tar", f"data.root={server.root}/d")
    _, counts = sources.build(config.data, "train").shard_files()
    order = WindowOrder(IMAGES, BATCH, config.seed, Tail.drop, shards=tuple(counts.tolist()), window=WINDOW)
    batches = [(epoch, number) for epoch in range(EPOCHS) for number in range(BATCHES)]
    return {(epoch, number * BATCH): order.batch(epoch, number)[0].tolist() for epoch, number in batches}


class Phases:
    """Starts of one run, in a folder of its own, each with a ledger of its own.

    Args:
        top: the folder of the cache.
        name: of the run's folder in it.
    """

    def __init__(self, top: Path, name: str = "run") -> None:
        self.top, self.folder, self.ledgers = top, top / name, list[Path]()
        self.folder.mkdir()

    def start(self, *words: str) -> subprocess.Popen[str]:
        self.ledgers.append(self.folder / f"start-{len(self.ledgers)}/ledger")
        self.ledgers[-1].mkdir(parents=True)
        env = {"XDG_CACHE_HOME": str(self.top / "cache"), "LEDGER": str(self.ledgers[-1]), "SLOWER": "0.05"}
        return started(["effloop", *words, f"plugins=[{self.top / 'ledger.py'}]"], self.folder, **env)

    def until(self, process: subprocess.Popen[str], batches: int) -> None:
        """Wait until so many batches of a rank were trained on in this start."""
        wait_until(lambda: batches_of(self.ledgers[-1].iterdir()) >= batches, process)

    def seen(self) -> dict[tuple[int, int], list[int]]:
        """{epoch and position: samples}; what a later start has done again is the same."""
        seen: dict[tuple[int, int], list[int]] = {}
        for ledger in self.ledgers:
            for place, ids in global_order(ledger.parent).items():
                if len(ids) == BATCH:  # else not all ranks had come so far when they were killed
                    assert seen.setdefault(place, ids) == ids
        return seen


def fetching(leader: int) -> list[int]:
    """The processes of a group that fetch windows."""
    return [pid for pid in group(leader) if b"window_fetch" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.slow
def test_two_ranks_then_one_then_three_see_the_same(server: Server, tmp_path: Path) -> None:
    """The first are asked to stop, after what fetches was killed; the next is killed; all within an epoch."""
    phases = Phases(tmp_path)
    process = phases.start(*words_of(server, *parallel(2), f"batch_size={BATCH // 2}", "checkpoint.every_steps=2"))
    phases.until(process, 2 * 3)
    (pid,) = fetching(process.pid)
    os.kill(pid, signal.SIGKILL)
    phases.until(process, 2 * (BATCHES + 2))
    os.kill(process.pid, signal.SIGTERM)
    code, _, err = done(process)
    assert code == 75, err
    assert f"the process that fetches (pid {pid}) was killed by SIGKILL" in err
    assert all_gone(process.pid)

    process = phases.start("resume", "outputs/x", "parallel=none", f"batch_size={BATCH}")
    phases.until(process, 5)
    assert fetching(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert all_gone(process.pid)  # forks of the tests' server don't end with their parent, but what fetches does

    three = ["parallel=ddp", "parallel.processes=3", f"batch_size={BATCH // 3}"]
    process = phases.start("resume", "outputs/x", *three)
    code, _, err = done(process)
    assert code == 0, err
    assert phases.seen() == expected(server)
    for epoch in range(EPOCHS):
        ids = [id_ for place, ids in phases.seen().items() for id_ in ids if place[0] == epoch]
        assert sorted(ids) == list(range(IMAGES))


@pytest.mark.slow
def test_two_machines_fetch_for_themselves(server: Server, tmp_path: Path) -> None:
    """Two launchers, each with a cache of its own."""
    port, ledger, processes = free_port(), tmp_path / "ledger", []
    ledger.mkdir()
    words = words_of(server, "parallel=ddp", f"batch_size={BATCH // 2}", f"plugins=[{tmp_path / 'ledger.py'}]")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    for number in range(2):
        place = [f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        env = {"XDG_CACHE_HOME": str(tmp_path / f"cache-{number}"), "LEDGER": str(ledger), "GLOO_SOCKET_IFNAME": "lo"}
        processes.append(started([*torchrun, *place, "-m", "effloop", *words], tmp_path, **env))
    ended = [done(process) for process in processes]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert global_order(tmp_path) == expected(server)
    shards = [path for path in server.fetched() if "train-" in path]
    assert all(shards.count(path) >= 2 for path in shards)
    for number in range(2):
        assert list((tmp_path / f"cache-{number}/effloop/remote/window/objects").iterdir())


@pytest.mark.slow
def test_a_second_run_of_the_same_data_is_refused_and_the_first_goes_on(server: Server, tmp_path: Path) -> None:
    """While the first one trains, and while it fetches what it needs before the first step."""
    first, *others = (Phases(tmp_path, name) for name in "abc")
    words = [*words_of(server, f"batch_size={BATCH}"), "epochs=1000"]
    server.pause_s = 1
    running = first.start(*words)
    wait_until(lambda: bool(server.fetched()), running)
    refused = [others[0].start(*words)]
    first.until(running, 1)
    server.pause_s = 0
    refused.append(others[1].start(*words))
    for process in refused:
        code, _, err = done(process)
        lines = [line for line in err.splitlines() if "is fetching from" not in line]
        assert (code, len(lines)) == (2, 1), err
        assert "data.window: another run fetches the windows of this data; end it, or set data.download_dir" in lines[0]
    first.until(running, batches_of(first.ledgers[0].iterdir()) + 2 * BATCHES)
    os.kill(running.pid, signal.SIGTERM)
    code, _, err = done(running)
    assert code == 75, err
    seen, wanted = first.seen(), expected(server)
    assert all(seen[place] == wanted[place] for place in wanted if place in seen)
    assert all_gone(running.pid)


@pytest.mark.slow
def test_ranks_that_wait_for_a_window_do_not_hang(server: Server, tmp_path: Path) -> None:
    """Longer than `parallel.timeout_s`."""
    phases = Phases(tmp_path)
    process = phases.start(
        *words_of(server, *parallel(2), f"batch_size={BATCH // 2}", "parallel.timeout_s=5", "epochs=2")
    )
    phases.until(process, 2)
    server.pause_s = 12
    asked = len(server.fetched())
    wait_until(lambda: len(server.fetched()) > asked, process)
    server.pause_s = 0
    code, _, err = done(process)
    assert code == 0, err
    wanted = expected(server)
    assert phases.seen() == {place: wanted[place] for place in wanted if place[0] < 2}

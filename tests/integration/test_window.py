"""Training on data behind a URL of which only some shards are on this machine at a time."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from plans import write_as
from remotes import Server, measuring, serving
from runs import TINY, composed, once, rows, stopping_at

import effloop
from effloop.cli.main import main
from effloop.data.loader import Loader
from effloop.data.remote import window_fetch
from effloop.data.remote.fetch import forget
from effloop.data.remote.window_fetch import WindowFetching
from effloop.data.source import Tail, sources
from effloop.data.windows import WindowOrder
from effloop.errors import ConfigError
from effloop.inference.export import calibration_images
from effloop.inference.trained import Trained
from effloop.measure.costs import loader_rate, loading_costs, sample_ids
from effloop.report.page import download_line
from effloop.runs.reader import read_run

SHARD = 9_000
LIMIT = 120_000
"""Bytes: two windows of two shards, and the rest."""
KEPT = ("data.window=2", f"data.download_gb={LIMIT / 1e9}", "data=tar")


@pytest.fixture
def server(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of the photographs in tar files of about five each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    (tmp_path / "served").mkdir()
    write_as("tar", photos, tmp_path / "served/d", shard_bytes=SHARD)
    with serving(tmp_path / "served") as found:
        yield found
    for fetching in [*window_fetch._running.values()]:
        fetching.close()
    forget()


def train(*words: str) -> int:
    forget()
    return main(once("train", *TINY, *words))


def order_of(server: Server, seed: int, batch: int = 8) -> WindowOrder:
    """The order on the local files."""
    source = sources.build(composed("data=tar", f"data.root={server.root}/d").data, "train")
    _, counts = source.shard_files()
    return WindowOrder(int(counts.sum()), batch, seed, Tail.drop, shards=tuple(counts.tolist()), window=2)


def test_two_epochs_in_less_room_than_the_data(server, here, tmp_path):
    whole = sum(path.stat().st_size for path in (server.root / "d").iterdir())
    config = composed("data=tar", f"data.root={server.url}/d/", *KEPT, *TINY)
    order, seen = order_of(server, config.seed), {0: [], 1: []}
    with measuring(tmp_path / "cache/effloop/remote/window/objects") as most:
        loader = effloop.build_loader(config)
        local = effloop.build_loader(composed("data=tar", f"data.root={server.root}/d", *TINY))
        for epoch in range(2):
            for number, batch in enumerate(loader.epoch(epoch)):
                ids = batch.ids.numpy()
                assert np.array_equal(ids, order.batch(epoch, number)[0])
                assert np.array_equal(batch.images.numpy(), local.samples(ids.tolist(), epoch).images.numpy())
                seen[epoch] += ids.tolist()
        loader.close()
    assert len(set(seen[0])) == len(seen[0]) == len(seen[1]) == 40
    assert seen[0] != seen[1]
    assert whole > LIMIT >= most[0] > LIMIT / 2


def test_a_run_that_is_interrupted_goes_on_in_the_same_order(server, here):
    words = (f"data.root={server.url}/d/", *KEPT, "epochs=3", "num_workers=1", "engine=processes")
    assert train(*words, "run=whole") == 0
    assert "data.window: 2 of 10 shards at a time, 20.0% of an epoch" in (here / "outputs/whole/log.txt").read_text()
    told = json.loads((here / "outputs/whole/summary.json").read_text())["download"]
    shards = sum(path.stat().st_size for path in (server.root / "d").glob("train-*.tar"))
    assert 2 * shards < told["window_bytes"] <= 3 * shards  # what an epoch ends with, the next may begin with
    assert told["window_mb_per_s"] > 0 < told["window_wait_s"]
    assert download_line(read_run(here / "outputs/whole")).endswith(f"waited {told['window_wait_s']:,.1f} s")
    with stopping_at(2):
        assert train(*words, "run=cut") != 0
    forget()
    assert main(["resume", "outputs/cut"]) == 0
    assert rows(here / "outputs/cut") == rows(here / "outputs/whole")


def test_what_held_a_run_back_is_measured_on_what_is_here(server, here, monkeypatch):
    monkeypatch.setattr("effloop.measure.review._LEAST_TRAINED_S", 0.0)
    assert train(f"data.root={server.url}/d/", *KEPT, "run=run") == 0
    assert json.loads((here / "outputs/run/efficiency.json").read_text())["verdict"]["bound"]


def test_the_model_is_calibrated_by_images_that_are_here_and_used_with_local_data(server, here):
    assert train(f"data.root={server.url}/d/", *KEPT, "run=run") == 0
    forget()
    trained = Trained.open(here / "outputs/run")
    count = len(trained.source("train").present())
    assert 0 < count < 40
    assert sum(map(len, calibration_images(trained, 40))) == count
    local = Trained.open(here / "outputs/run", [f"data.root={server.root}/d"])  # has no windows
    assert (local.config.data.window, len(local.source("train"))) == (None, 40)


def kill(fetching: WindowFetching) -> None:
    """Kill the process that fetches, and wait for the next one, if there is one."""
    pid, until = fetching.pid, time.monotonic() + 60
    os.kill(pid, signal.SIGKILL)
    while fetching.pid == pid and not list(fetching.state.folder.glob("error")):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_killed_process_that_fetches_is_started_again(server, here, capsys):
    """Twice; the third time is one line, for the run and for who looks at samples."""
    config = composed("data=tar", f"data.root={server.url}/d/", *KEPT, *TINY, "num_workers=1", "engine=processes")
    loader, order = effloop.build_loader(config), order_of(server, config.seed)
    (fetching,) = window_fetch._running.values()
    seen = []
    for number, batch in enumerate(loader.epoch(0)):
        seen += batch.ids.tolist()
        assert np.array_equal(batch.ids.numpy(), order.batch(0, number)[0])
        if number in (0, 2):
            kill(fetching)
    assert sorted(seen) == list(range(40))
    assert len(re.findall(r"that fetches \(pid [0-9]+\) was killed .*started again", capsys.readouterr().err)) == 2
    batches = loader.epoch(1)
    next(batches)
    server.pause_s = 0.5
    kill(fetching)
    with pytest.raises(
        ConfigError, match=r"data\.window: train-.*that fetches .*was killed by SIGKILL.*effloop resume"
    ):
        list(batches)
    with pytest.raises(ConfigError, match=r"data\.window: .*was killed.* of the 40 samples .* are not here: "):
        loader.samples(range(40))
    loader.close()


def windows_loader(server: Server, *words: str) -> tuple[Loader, WindowOrder]:
    config = composed("data=tar", f"data.root={server.url}/d/", *KEPT, *TINY, *words)
    return effloop.build_loader(config), order_of(server, config.seed)


def here_of(loader: Loader) -> set[int]:
    """The samples that are on this machine."""
    found = loader.plan.source.present()
    assert found is not None
    return set(found.holding(np.arange(40)).tolist())


def test_samples_that_no_rank_has_asked_for_are_one_line(server, here):
    """Workers that read ahead wait for them, though."""
    loader, order = windows_loader(server, "num_workers=1", "engine=threads")
    coming = np.concatenate([order.batch(0, number)[0] for number in range(3)]).tolist()
    absent = sorted({*range(40)} - {*coming[:24]} - here_of(loader))
    for number, batch in enumerate(loader.epoch(0)):
        assert np.array_equal(batch.ids.numpy(), order.batch(0, number)[0])
        assert len(loader.samples(batch.ids[:2].tolist())) == 2
        if not number:
            with pytest.raises(ConfigError, match="in none of the windows that are trained on now; of the 2 samples"):
                loader.samples([coming[0], absent[-1]])
            with pytest.raises(ConfigError, match="in none of the windows"):
                loader.plan.source.read(absent[-1])
    loader.close()
    absent = sorted({*range(40)} - here_of(loader))
    with pytest.raises(ConfigError, match=r"only training fetches one window after the other; drop data\.window"):
        loader.plan.source.read(absent[0])


def test_a_look_at_what_loading_costs_reads_what_is_here(server, here):
    """As at the end of a run, and by `diagnose`, while the process that fetches is there."""
    loader, _ = windows_loader(server, "num_workers=1", "engine=processes")
    for _ in loader.epoch(0):
        pass
    assert loading_costs(loader.plan, 0.05).images
    assert loader_rate(loader, 0.05, 2) > 0
    assert set(sample_ids(loader.plan, 512)) <= here_of(loader)
    loader.close()
    assert loader_rate(loader, 0.05, 2) > 0  # which starts it again, as it does workers
    windows_loader(server)[0].close()
    assert loader_rate(loader, 0.05, 2) > 0
    loader.close()
    assert not window_fetch._running


def test_the_last_epoch_fetches_no_window_for_the_next(server, here):
    loader, _ = windows_loader(server)  # of 2 epochs
    (told,) = (here.parent / "cache").glob("effloop/remote/window/locks/*.window")
    following = []
    for epoch in range(3):
        for _ in loader.epoch(epoch):
            following.append(json.loads((told / "rank-0").read_text())["following"])
        assert bool(following[-1]) == (epoch == 0)
    loader.close()


@pytest.mark.parametrize("command", [["verify"], ["convert", "to=memmap", "out=x"], ["bench", "what=storage"]])
def test_a_command_that_reads_all_samples_is_one_line(command, server, here, capsys):
    forget()
    assert main([*command, "data=tar", f"data.root={server.url}/d/", "data.window=2"]) == 2
    assert re.search(r"^effloop: data\.window: .*; drop data.window to fetch all$", capsys.readouterr().err, re.M)
    assert command[0] == "bench" or not server.requests  # nothing is fetched in vain


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.window=0"], "data.window: 0 is not allowed"),
        (["data.window=10"], "data.window: 10 of 10 shards are all of them"),
        (["data.window=5"], r"data.window: 5 needs .* MB.*there is room for .* MB; set data.window=2"),
        (["data.balance=0.5"], "data.balance: 0.5 needs all samples"),
        (["batch_size=20"], "data.window: 2 shards have [0-9]+ samples, fewer than a batch"),
        (["data=memmap"], "data.window: data=memmap can't read some shards"),
        (["on_error=skip"], "on_error: skip can't be used with data.window=2"),
        (["data.root={root}/d"], "data.window: 2 is for data behind a URL"),
    ],
)
def test_what_windows_can_not_do_is_refused(words, said, server, here, capsys):
    words = [word.format(root=server.root) for word in words]
    assert train(f"data.root={server.url}/d/", *KEPT, *words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "data" in line or "on_error" in line]
    assert re.search(said, line), line


def test_a_batch_that_is_larger_than_a_window_of_a_later_epoch_is_refused(photos, server, here):
    """The last shard is smaller: a batch could begin before it and end after it, and there is room for two windows."""
    write_as("tar", photos, server.root / "e", shard_bytes=13_000)
    source = sources.build(composed("data=tar", f"data.root={server.root}/e").data, "train")
    *others, last = source.shard_files()[1].tolist()
    assert last < min(others)
    for seed in range(2 * len(others)):
        words = (
            f"data.root={server.url}/e/",
            *KEPT,
            "data.window=1",
            f"batch_size={last + 1}",
            f"seed={seed}",
            *TINY[3:],
        )
        with pytest.raises(ConfigError, match=f"1 shards have {last} samples, fewer than a batch"):
            effloop.build_loader(composed(*words))

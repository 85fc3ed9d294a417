"""Clusters of Ray, two nodes on this machine: a sweep, and the file of `launch to=ray`; a node goes in the middle."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ROOT
from runs import TINY, once

from effloop.cli.main import main

pytestmark = pytest.mark.nightly

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
WORDS = (*TINY, "epochs=40", "checkpoint.every_steps=5", "record.tensorboard=false", "record.console=false")


@pytest.fixture
def cluster(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of a core each, which `RAY_ADDRESS` leads to; the second one is `cluster.second`."""
    pytest.importorskip("ray.train", reason="pip install 'ray[train]'", exc_type=ImportError)
    from ray.cluster_utils import Cluster

    for name, value in {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]))
    cluster: Any = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        cluster.second = cluster.add_node(**NODE)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    finally:
        cluster.shutdown()
    until = time.monotonic() + 20
    while left(here) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left(here)


def left(here: Path) -> list[str]:
    """What still runs in a folder, where all processes of a cluster begin, but for Python's own helper of this one."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            words = place.with_name("cmdline").read_text()
            if place.readlink() == here and place.parent.name != str(os.getpid()) and "resource_tracker" not in words:
                found.append(words.replace("\0", " "))
    return found


def wait_for(there: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 400
    while not there():
        assert process.poll() is None, process.returncode
        assert time.monotonic() < until
        time.sleep(0.05)


def weights(run: str | Path) -> dict[str, torch.Tensor]:
    state = torch.load(Path("outputs", run, "checkpoints/last.ckpt"), map_location="cpu", weights_only=True)
    assert state["progress"]["epoch"] == 40
    return dict(state["model"])


def equal(one: str | Path, two: str | Path) -> bool:
    ours, theirs = weights(one), weights(two)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("elastic", [True, False], ids=["fewer ranks", "a new node"])
def test_a_training_goes_on_when_a_node_is_lost(photos, cluster, elastic):
    """With `parallel.virtual` on the nodes that are left, else when there are as many again; with the same weights."""
    words = [f"data.root={photos}", *WORDS, "threads=1", *(["parallel.virtual=2"] if elastic else [])]
    assert main(once(*words, "parallel=ddp", "run=whole")) == 0
    options = ["to=ray", "nodes=2", "gpus=0", "file=file.py"]
    assert (
        main(once("launch", *options, *words, "parallel=ddp", f"out={Path('outputs').absolute()}", "run=broken")) == 0
    )
    with (
        open("said.txt", "wb") as said,
        subprocess.Popen([sys.executable, "file.py"], stdout=said, stderr=said) as driver,
    ):
        try:
            wait_for(lambda: [*Path("outputs/broken/checkpoints").glob("step-*")], driver)
            cluster.remove_node(cluster.second)
            if not elastic:
                cluster.add_node(**NODE)
            assert driver.wait(400) == 0, Path("said.txt").read_text()[-3000:]
        finally:
            driver.kill()
    assert "resumed from" in Path("outputs/broken/log.txt").read_text()
    assert equal("whole", "broken")


def test_a_sweeps_job_goes_on_elsewhere(photos, cluster):
    words = [f"data.root={photos}", *WORDS]
    assert main(once(*words, "seed=2", "run=whole")) == 0
    command = [sys.executable, "-m", "effloop", *once("-m", *words, "seed=1,2", "hydra/launcher=ray", "run=jobs")]
    with subprocess.Popen(command) as sweep:
        try:
            jobs = Path("outputs/multirun/jobs")
            wait_for(lambda: len([*jobs.glob("*/checkpoints/last.ckpt")]) == 2, sweep)
            cluster.remove_node(cluster.second)
            assert sweep.wait(400) == 0
        finally:
            sweep.kill()
    assert equal("whole", "multirun/jobs/1")

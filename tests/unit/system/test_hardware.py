import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from effloop.errors import warn
from effloop.system import hardware

MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 27 0:40 / /data rw,relatime shared:1 - ext4 /dev/vdb rw
31 30 0:41 / /data rw,relatime shared:2 master:1 - nfs4 server:/data rw
32 31 0:42 /set /data/my\040sets rw - fuse.sshfs me@host: rw
"""


def test_file_system(tmp_path, monkeypatch):
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr(hardware, "MOUNTS", tmp_path / "mounts")
    kinds = {"/data/x/y": "nfs4", "/data/my sets/x": "fuse.sshfs", "/data/my setsx": "nfs4", "/database": "ext4"}
    assert {path: hardware.file_system(Path(path)) for path in kinds} == kinds  # a later mount hides the earlier one


def test_a_warning_comes_once(capsys):
    for line in ("first", "second", "first"):
        warn(line)
    assert capsys.readouterr().err == "effloop: warning: first\neffloop: warning: second\n"


GB = 10**9


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 50 GB free; its groups are to be made up below."""
    (tmp_path / "meminfo").write_text("MemTotal: 90000000 kB\nMemAvailable: 48828125 kB\n")
    monkeypatch.setattr(hardware, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(hardware, "CGROUP_ROOT", tmp_path / "fs")
    return tmp_path


FIRST = "5:devices:/other\n4:cpu,memory:{}\n1:name=systemd:/\n0::/\n"
"""The groups of a process where the first version of cgroups has both controllers; {} is its own."""
SECOND = "0::{}\n"


def make_group(root: Path, path: str, memory: object, cores: object) -> None:
    """A group that uses 5 GB, of which the kernel can take 3 GB back; limits of None are as the kernel writes them."""
    controller, group = path.split("/")[0], root / "fs" / path
    group.mkdir(parents=True, exist_ok=True)
    files: dict[str, object]
    if controller == "memory":
        files = {"memory.limit_in_bytes": memory or 0x7FFFFFFFFFFFF000, "memory.usage_in_bytes": 5 * GB}
        files["memory.stat"] = f"anon 1\ninactive_file 0\ntotal_inactive_file {3 * GB}"
    elif controller == "cpu":
        files = {"cpu.cfs_quota_us": cores or -1, "cpu.cfs_period_us": 100_000}
    else:
        files = {"memory.max": memory or "max", "memory.current": 5 * GB, "cpu.max": f"{cores or 'max'} 100000"}
        files["memory.stat"] = f"anon 1\ninactive_file {3 * GB}"
    for name, value in files.items():
        (group / name).write_text(f"{value}\n")


MANY = 1000  # cores, so that this machine's own number doesn't come into it


@pytest.mark.parametrize(
    ("listed", "path", "memory", "cores", "free", "count"),
    [
        (SECOND, "/slice/job/step", {}, {}, 50, MANY),
        (SECOND, "/slice/job/step", {"slice/job/step": 9 * GB}, {"slice/job/step": 400_000}, 7, 4),
        (SECOND, "/slice/job/step", {"slice/job": 8 * GB}, {"slice/job": 800_000}, 6, 8),  # of a group above
        (
            *(SECOND, "/slice/job/step", {"slice/job/step": 9 * GB, "slice": 5 * GB}),
            *({"slice/job/step": 800_000, "slice": 300_000}, 3, 3),
        ),
        (SECOND, "/slice/job/step", {"": 4 * GB}, {"": 200_000}, 2, 2),  # a container sees its own group as the root
        (SECOND, "/slice/job/step", {"slice/other": GB}, {"slice/other": 100_000}, 50, MANY),  # somebody else's
        (SECOND, "/slice/job/step", {"slice": GB}, {"slice": 250_000}, 0, 2),  # more is used than allowed; 2.5 cores
        (SECOND, "/slice/job/step", {"slice": 99 * GB}, {"slice": 50_000}, 50, 1),  # half a core, but not none
        (FIRST, "/job/step", {}, {}, 50, MANY),
        (FIRST, "/job/step", {"memory/job/step": 9 * GB}, {"cpu/job/step": 400_000}, 7, 4),
        (FIRST, "/job/step", {"memory/job": 8 * GB}, {"cpu/job": 300_000}, 6, 3),
        (FIRST, "/docker/0123", {"memory": 4 * GB}, {"cpu": 200_000}, 2, 2),  # a path outside of the container
        (FIRST, "/../job", {"memory/job": 4 * GB}, {"cpu/job": 200_000}, 2, 2),
    ],
)
def test_limits_of_groups(listed, path, memory, cores, free, count, groups, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(MANY)))
    (groups / "cgroup").write_text(listed.format(path))
    if listed == SECOND:
        made = ["", "slice", "slice/job", "slice/job/step", "slice/other"]
    else:
        made = [f"{kind}{below}" for kind in ("memory", "cpu") for below in ("", "/job", "/job/step", "/other")]
    for each in made:
        make_group(groups, each, memory.get(each), cores.get(each))
    assert hardware.available_memory() == free * GB
    assert hardware.available_cores() == count


def test_without_groups(groups):
    for _ in range(2):
        assert hardware.available_memory() == 50 * GB
        assert hardware.available_cores() == len(os.sched_getaffinity(0))
        (groups / "cgroup").write_text("0::/a\n")  # no such folder is shown


@pytest.fixture
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")  # what is set below is taken back, too
    yield
    hardware.set_reproducible(deterministic=False, cudnn_benchmark=False)


@pytest.mark.usefixtures("_as_it_was")
def test_reproducible_is_set_both_ways():
    hardware.set_reproducible(deterministic=False, cudnn_benchmark=True)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert torch.backends.cudnn.benchmark
    hardware.set_reproducible(deterministic=True, cudnn_benchmark=False)
    assert torch.are_deterministic_algorithms_enabled()
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))  # which of two writes is last
    hardware.set_reproducible(deterministic=False, cudnn_benchmark=True)
    assert not torch.are_deterministic_algorithms_enabled()
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (False, True)
    torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))


@pytest.mark.usefixtures("_as_it_was")
def test_reproducible_leaves_what_the_user_has_set(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    hardware.set_reproducible(deterministic=True, cudnn_benchmark=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"

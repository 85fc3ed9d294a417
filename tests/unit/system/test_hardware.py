from __future__ import annotations

import os
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data", "nfs4"),  # the later mount hides the earlier one
        ("/data/x/y", "nfs4"),
        ("/data/my sets/x", "fuse.sshfs"),
        ("/data/my setsx", "nfs4"),
        ("/database", "ext4"),
        ("/", "ext4"),
    ],
)
def test_file_system(path: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr(hardware, "MOUNTS", tmp_path / "mounts")
    assert hardware.file_system(Path(path)) == kind


def test_file_system_of_this_machine() -> None:
    assert hardware.file_system(Path("/proc/self")) == "proc"


def test_file_system_without_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "MOUNTS", tmp_path / "none")
    assert hardware.file_system(tmp_path) == ""


def test_a_warning_comes_once(capsys: pytest.CaptureFixture[str]) -> None:
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


def make_group(root: Path, path: str, limit: object, used: int, given_back: int = 0) -> None:
    group = root / "fs" / path
    first = path.split("/")[0] == "memory"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
    group.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (group / name).write_text(f"{value}\n")
    total = f"total_inactive_file {given_back}\n" if first else ""
    own = 0 if first else given_back
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {own}\n{total}")


def test_memory_without_groups(groups: Path) -> None:
    assert hardware.available_memory() == 50 * GB
    (groups / "cgroup").write_text("0::/a\n")  # no such folder is shown
    assert hardware.available_memory() == 50 * GB


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        ({"slice/job/step": 9 * GB}, 7 * GB),
        ({"slice/job": 8 * GB}, 6 * GB),  # of a group above
        ({"slice/job/step": 9 * GB, "slice": 5 * GB}, 3 * GB),
        ({"": 4 * GB}, 2 * GB),  # a container sees its own group as the root
        ({"slice/other": 1 * GB}, 50 * GB),  # somebody else's
        ({"slice": 1 * GB}, 0),  # more is used than is allowed
        ({"slice": 99 * GB}, 50 * GB),
    ],
)
def test_memory_in_groups(limits: dict[str, int], free: int, groups: Path) -> None:
    (groups / "cgroup").write_text("0::/slice/job/step\n")
    for path in ("", "slice", "slice/job", "slice/job/step", "slice/other"):
        make_group(groups, path, limits.get(path, "max"), 5 * GB, 3 * GB)
    assert hardware.available_memory() == free


@pytest.mark.parametrize(
    ("path", "limits", "free"),
    [
        ("/job/step", {"memory/job/step": 9 * GB}, 7 * GB),
        ("/job/step", {"memory/job": 8 * GB}, 6 * GB),
        ("/docker/0123", {"memory": 4 * GB}, 2 * GB),  # a path outside of the container
        ("/../job", {"memory/job": 4 * GB}, 2 * GB),
        ("/job/step", {}, 50 * GB),
    ],
)
def test_memory_in_groups_of_the_first_version(path: str, limits: dict[str, int], free: int, groups: Path) -> None:
    (groups / "cgroup").write_text(f"5:devices:/other\n4:cpu,memory:{path}\n1:name=systemd:/\n0::/\n")
    for group in ("memory", "memory/job", "memory/job/step", "memory/other"):
        make_group(groups, group, limits.get(group, 0x7FFFFFFFFFFFF000), 5 * GB, 3 * GB)
    assert hardware.available_memory() == free


def test_available_memory_of_this_machine() -> None:
    assert 1 << 20 < hardware.available_memory() < 1 << 50


MANY = 1000  # cores, so that this machine's own number doesn't come into it


@pytest.fixture
def many_cores(groups: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(MANY)))
    return groups


def limit_cores(root: Path, path: str, quota: object, period: int = 100_000) -> None:
    group = root / "fs" / path
    group.mkdir(parents=True, exist_ok=True)
    if path.split("/")[0] == "cpu":
        (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (group / "cpu.cfs_period_us").write_text(f"{period}\n")
    else:
        (group / "cpu.max").write_text(f"{quota} {period}\n")


@pytest.mark.parametrize(
    ("quotas", "cores"),
    [
        ({}, MANY),
        ({"slice/job/step": 400_000}, 4),
        ({"slice/job": 800_000}, 8),  # of a group above
        ({"slice/job/step": 800_000, "slice": 300_000}, 3),
        ({"": 200_000}, 2),  # a container sees its own group as the root
        ({"slice/other": 100_000}, MANY),  # somebody else's
        ({"slice": 250_000}, 2),  # two and a half
        ({"slice": 50_000}, 1),  # half a core, but not none
    ],
)
def test_cores_in_groups(quotas: dict[str, int], cores: int, many_cores: Path) -> None:
    (many_cores / "cgroup").write_text("0::/slice/job/step\n")
    for path in ("slice", "slice/job", "slice/job/step", "slice/other"):  # the machine's own root has no such file
        limit_cores(many_cores, path, "max")
    for path, quota in quotas.items():
        limit_cores(many_cores, path, quota)
    assert hardware.available_cores() == cores


@pytest.mark.parametrize(
    ("path", "quotas", "cores"),
    [
        ("/job/step", {"cpu/job/step": 400_000}, 4),
        ("/job/step", {"cpu/job": 300_000}, 3),
        ("/docker/0123", {"cpu": 200_000}, 2),  # a path outside of the container
        ("/../job", {"cpu/job": 200_000}, 2),
        ("/job/step", {}, MANY),
    ],
)
def test_cores_in_groups_of_the_first_version(path: str, quotas: dict[str, int], cores: int, many_cores: Path) -> None:
    (many_cores / "cgroup").write_text(f"5:devices:/other\n4:cpu,cpuacct:{path}\n3:cpuset:/other\n0::/\n")
    for group in ("cpu", "cpu/job", "cpu/job/step", "cpu/other"):
        limit_cores(many_cores, group, quotas.get(group, -1))
    assert hardware.available_cores() == cores


def test_cores_without_groups(groups: Path) -> None:
    assert hardware.available_cores() == len(os.sched_getaffinity(0))
    (groups / "cgroup").write_text("0::/a\n")  # no such folder is shown
    assert hardware.available_cores() == len(os.sched_getaffinity(0))


@pytest.fixture
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")  # what is set below is taken back, too
    yield
    hardware.set_reproducible(deterministic=False, cudnn_benchmark=False)


@pytest.mark.usefixtures("_as_it_was")
def test_reproducible_is_set_both_ways() -> None:
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
def test_reproducible_leaves_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    hardware.set_reproducible(deterministic=True, cudnn_benchmark=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_importing_sets_nothing() -> None:
    code = (
        "import os, torch, effloop.system.hardware, effloop.assemble.compiling, effloop.precision;"
        "assert not torch.are_deterministic_algorithms_enabled();"
        "assert 'CUBLAS_WORKSPACE_CONFIG' not in os.environ"
    )
    environment = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)

from __future__ import annotations

from pathlib import Path

import pytest

from effloop import hardware
from effloop.errors import warn

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

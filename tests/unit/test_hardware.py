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

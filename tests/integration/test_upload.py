"""`effloop convert` to a URL, with a server of this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from remotes import Fault, Server, serving
from runs import TINY, once, rows, start

from effloop.cli.main import main
from effloop.data.remote import send as sending
from effloop.data.remote.fetch import forget, local_root
from effloop.data.remote.location import Url
from effloop.data.remote.manifest import UPLOADING
from effloop.data.remote.send import Sent, look, send
from effloop.errors import ConfigError, DataError

PART = 1 << 16
SECRET = "not-a-secret"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with the empty bucket `b`, which gets 64 KiB at a time."""
    monkeypatch.setattr(sending, "PART_BYTES", PART)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "served/b").mkdir(parents=True)
    forget()
    with serving(tmp_path / "served") as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, SECRET)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield found
    forget()


def run(*words: str) -> int:
    forget()
    return main(list(words))


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a conversion which fails prints."""
    capsys.readouterr()
    assert run("convert", *words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert SECRET not in err
    return err.removeprefix("effloop: ").removesuffix("\n")


def tree(root: Path) -> dict[str, bytes]:
    if root.is_file():
        return {"": root.read_bytes()}
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def made(root: Path, count: int = 4, size: int = 150_000) -> dict[str, bytes]:
    """A folder of shards and an index."""
    root.mkdir()
    files = {f"s-{number}.tar": os.urandom(size + number) for number in range(count)} | {"s.index": b"index"}
    for name, data in files.items():
        (root / name).write_bytes(data)
    return files


def sent(path: Path, url: str = "s3://b/set", job: str = "job") -> Sent:
    return send(path, Url(url), job)


@pytest.mark.parametrize(("to", "words"), [("tar", ["shard_mb=1"]), ("memmap", ["max_side=20,24"])])
def test_what_is_uploaded_is_what_is_written_here(to, words, server, photos, here, capsys):
    assert run("convert", f"data.root={photos}", f"to={to}", "out=set", *words) == 0
    capsys.readouterr()
    assert run("convert", f"data.root={photos}", f"to={to}", "out=s3://b/deep/set", *words) == 0
    out = capsys.readouterr().out
    names = sorted(path.name for path in here.iterdir())
    assert names == (["set-20", "set-24"] if to == "memmap" else ["set"])
    for name in names:
        assert tree(server.root / "b/deep" / name) == tree(here / name)
        assert f"s3://b/deep/{name}: {len(tree(here / name))} files, " in out
        assert f"s3://b/deep/{name} is written\n" in out
    assert not [*here.parent.rglob("*.partial")]
    assert not [*server.root.rglob("*.part"), *server.root.rglob(UPLOADING)]
    for root, name in ((f"{here}/{names[0]}", "local"), (f"s3://b/deep/{names[0]}", "remote")):
        assert run(*once("train", *TINY, "record.tensorboard=false", f"data.root={root}", f"run={name}")) == 0
    assert rows(here / "outputs/remote") == rows(here / "outputs/local")


def test_from_a_bucket_to_a_bucket(server, photos, here, capsys):
    assert run("convert", f"data.root={photos}", "to=parquet", "out=s3://b/one") == 0
    assert run("convert", "data.root=s3://b/one", "to=folder", "out=s3://b/two/") == 0
    assert len(tree(server.root / "b/two")) == 53
    assert run("verify", "data.root=s3://b/two") == 0
    assert not [*here.iterdir()]


def test_what_is_there_is_refused_before_anything_else(server, photos, here, capsys):
    (server.root / "b/set").mkdir()
    (server.root / "b/set/mine.txt").write_text("precious")
    wanted = "out: s3://b/set is there already, and nothing is overwritten; remove it or set out=URL"
    words = ("data.root=s3://b/absent", "to=tar")
    assert failure(capsys, *words, "out=s3://b/set") == wanted
    (server.root / "b/file").write_text("precious")
    assert failure(capsys, *words, "out=s3://b/file") == wanted.replace("set is", "file is")
    assert not server.put()
    assert "no such bucket" in failure(capsys, *words, "out=s3://absent/set")
    server.faults = [Fault(403, times=99, method="PUT")]
    said = failure(capsys, *words, "out=s3://b/new")
    assert said.startswith("s3://b/new.part can't be written: 403 Forbidden (set them")


def test_more_files_than_can_be_read(server, photos, here, capsys, monkeypatch):
    monkeypatch.setattr("effloop.convert.upload.MOST_FILES", 52)
    wanted = "to: a folder of 53 files can't be read behind a URL, which may have 52; set to=tar"
    assert failure(capsys, f"data.root={photos}", "to=folder", "out=s3://b/set") == wanted
    assert not tree(server.root / "b")


@pytest.mark.parametrize(
    ("out", "wanted"),
    [
        ("https://host/set", "out: https://host/set can't be written, web servers are read only; set out=s3://"),
        ("s3://b", "out: s3://b has no name; set out=s3://b/NAME"),
        ("s3://b/{a,b}", "has wildcards or braces"),
        ("s3://key:word@b/set", "out: 's3://***@b/set' has a user or a password"),
        ("s4://b/set", "out: 's4://b/set' is of no scheme"),
        ("hf://datasets/a/b", "set to=parquet out=FOLDER, and upload that by hf upload"),
    ],
)
def test_urls_that_nothing_is_written_to(out, wanted, photos, here, capsys):
    assert wanted in failure(capsys, f"data.root={photos}", "to=tar", f"out={out}")


def test_faults_that_pass_are_survived(server, tmp_path):
    files = made(tmp_path / "set")
    server.faults = [
        Fault(503, times=2, of="s-0.tar", method="PUT"),
        Fault(cut=10_000, times=3, of="s-1.tar", method="PUT"),
        Fault(500, of="s-2.tar", method="POST"),
        Fault(429, of="s.index", method="PUT"),
        Fault(503, of="/b", on_listing=True),
        Fault(500, of=UPLOADING, method="DELETE"),
    ]
    found = sent(tmp_path / "set")
    assert tree(server.root / "b/set") == files
    assert (found.files, found.bytes, found.sent_bytes) == (5, *[sum(map(len, files.values()))] * 2)
    assert not any(fault.times for fault in server.faults)
    assert server.put()[0].endswith(UPLOADING)
    assert server.put()[-1].endswith("s.index")  # when all others are there


@pytest.mark.parametrize(("status", "wanted"), [(403, "403 Forbidden"), (400, "400 Bad Request")])
def test_faults_that_stay_are_one_line_and_leave_nothing_to_read(status, wanted, server, tmp_path):
    files = made(tmp_path / "set")
    server.faults = [Fault(status, times=99, of="s-3.tar", method="PUT")]
    with pytest.raises(DataError, match=rf"^s3://b/set/s-3\.tar can't be written: {wanted}") as error:
        sent(tmp_path / "set")
    assert "\n" not in str(error.value)
    assert not look(Url("s3://b/set")).whole
    for root in ("s3://b/set", "s3://b/set/s-{0,1}.tar", "s3://b/"):
        with pytest.raises(DataError, match=r"s3://b/set/ isn't complete: .* give its command again"):
            fetch(root, tmp_path / "kept")
    server.faults = []
    with pytest.raises(ConfigError, match="what another conversion has uploaded and not completed"):
        sent(tmp_path / "set", job="another")
    server.requests.clear()
    assert sent(tmp_path / "set").sent_bytes < sum(map(len, files.values()))
    assert tree(server.root / "b/set") == files
    server.requests.clear()
    assert sent(tmp_path / "set").sent_bytes == 0  # as if it had been killed before it could tell
    assert not server.put()
    (server.root / "b/set/s-1.tar").write_bytes(files["s-1.tar"][:-1] + b"x")
    with pytest.raises(ConfigError, match="is there already, and nothing is overwritten"):
        sent(tmp_path / "set")


def fetch(root: str, kept: Path) -> None:
    forget()
    local_root(root, kept)


def until(server: Server, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(server.put()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_conversion_goes_on_with_the_upload(server, photos, here, capsys):
    words = (f"data.root={photos}", "to=folder", "out=s3://b/set")
    server.pause_s = 0.2
    with start("convert", *words, cwd=here) as process:
        until(server, 30)
        os.killpg(process.pid, signal.SIGKILL)
    server.pause_s = 0
    time.sleep(0.3)
    assert (server.root / "b/set" / UPLOADING).exists()
    there = len(tree(server.root / "b/set"))
    said = failure(capsys, f"data.root={photos}", "to=folder", "out=s3://b/set", "max_side=20")
    assert said.endswith("what another conversion has uploaded and not completed; remove it or set out=URL")
    server.requests.clear()
    assert run("convert", *words) == 0
    assert "MB were there, " in capsys.readouterr().out
    assert run("convert", f"data.root={photos}", "to=folder", "out=set") == 0
    assert tree(server.root / "b/set") == tree(here / "set")
    assert len(server.put()) <= 54 + 2 - there + 1
    assert not [*here.parent.rglob("*.partial")]


def test_ctrl_c_while_it_uploads(server, photos, here):
    server.pause_s = 0.2
    with start("convert", f"data.root={photos}", "to=folder", "out=s3://b/set", cwd=here) as process:
        until(server, 20)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, err) == (
        130,
        "effloop: interrupted; running the same command again continues from there\n",
    )


def test_a_killed_uploader_is_started_again(server, photos, here):
    server.pause_s = 0.1
    with start("convert", f"data.root={photos}", "to=folder", "out=s3://b/set", cwd=here) as process:
        until(server, 20)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        _, err = process.communicate()
    assert process.returncode == 0
    assert f"(pid {child}) was killed by SIGKILL" in err
    assert "it is started again" in err
    assert UPLOADING not in tree(server.root / "b/set")
    assert len(tree(server.root / "b/set")) == 53

"""`effloop convert` to a URL, with a server of this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from remotes import Fault, Server
from runs import TINY, once, rows, start
from uploads import SECRET, bucket, tree, until

from effloop.cli.main import main
from effloop.data.remote.fetch import forget
from effloop.data.remote.manifest import UPLOADING


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with bucket(tmp_path, monkeypatch) as found:
        yield found


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


@pytest.mark.parametrize(("to", "words"), [("tar", ["shard_mb=1"]), ("memmap", ["max_side=20,24"])])
@pytest.mark.slow
def test_what_is_uploaded_is_what_is_written_here(to, words, server, photos, here, capsys):
    assert run("convert", f"data.root={photos}", f"to={to}", "out=set", *words) == 0
    capsys.readouterr()
    assert run("convert", f"data.root={photos}", f"to={to}", "out=s3://b/deep/set", *words) == 0
    out = capsys.readouterr().out
    names = sorted(path.name for path in here.iterdir())
    assert names == (["set-20", "set-24"] if to == "memmap" else ["set"])
    for name in names:
        assert tree(server.root / "b/deep" / name) == tree(here / name)
        assert re.search(rf"s3://b/deep/{name}: {len(tree(here / name))} files?, ", out)
        assert f"s3://b/deep/{name} is written\n" in out
    assert not [*here.parent.rglob("*.partial")]
    assert not [*server.root.rglob("*.part"), *server.root.rglob(UPLOADING)]
    for root, name in ((f"{here}/{names[0]}", "local"), (f"s3://b/deep/{names[0]}", "remote")):
        assert run(*once("train", *TINY, "record.tensorboard=false", f"data.root={root}", f"run={name}")) == 0
    assert rows(here / "outputs/remote") == rows(here / "outputs/local")


@pytest.mark.nightly
def test_from_a_bucket_to_a_bucket(server, photos, here, capsys):
    (server.root / "b/one.part").write_text("precious")
    assert run("convert", f"data.root={photos}", "to=parquet", "out=s3://b/one") == 0
    assert tree(server.root / "b/one.part") == {"": b"precious"}
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
    assert said.startswith("s3://b/new can't be written: 403 Forbidden; set AWS_ACCESS_KEY_ID")


def test_more_files_than_can_be_read(server, photos, here, capsys, monkeypatch):
    monkeypatch.setattr("effloop.convert.convert.MOST_FILES", 52)
    wanted = "to: a folder of 53 files can't be read behind a URL, which may have 52; set to=tar"
    assert failure(capsys, f"data.root={photos}", "to=folder", "out=s3://b/set") == wanted
    assert not tree(server.root / "b")


@pytest.mark.parametrize(
    ("out", "wanted"),
    [
        ("https://host/set", "out: https://host/set can't be written; set out=s3://BUCKET/NAME, gs:// or az://"),
        ("s3://b", "out: s3://b has no name; set out=s3://b/NAME"),
        ("s3://b/{a,b}", "has wildcards or braces"),
        ("s3://key:word@b/set", "out: 's3://***@b/set' has a user or a password"),
        ("s4://b/set", "out: s4://b/set can't be written; set out=s3://"),
        ("hf://datasets/a/b", "or out=PATH, and copy that by another program, as hf upload or rclone"),
    ],
)
def test_urls_that_nothing_is_written_to(out, wanted, photos, here, capsys):
    assert wanted in failure(capsys, f"data.root={photos}", "to=tar", f"out={out}")


@pytest.mark.nightly
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


def test_a_kill_while_what_was_uploaded_is_removed_here(server, photos, here, monkeypatch):
    words = ("convert", f"data.root={photos}", "to=folder", "out=s3://b/set")
    remove = shutil.rmtree

    def half(path, *args, **options):
        found = list(Path(path).rglob("*.jpg"))
        if len(found) == 53 and UPLOADING not in (there := tree(server.root / "b/set")) and len(there) == 53:
            found[0].unlink()
            raise KeyboardInterrupt
        remove(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        assert run(*words) == 130
    assert run(*words) == 0
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


@pytest.mark.slow
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

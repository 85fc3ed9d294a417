"""Runs on data behind a URL, from servers of this machine."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from disks import fill, small_disk
from plans import open_source, write_as
from remotes import Fault, Server, serving
from runs import TINY, composed, once, rows

from effloop.cli.main import main
from effloop.data.remote import fetch, stores
from effloop.data.remote.cache import PART
from effloop.data.remote.fetch import fetched_before, fetched_of, forget, local_root
from effloop.data.remote.location import Location
from effloop.data.remote.stores import store_of
from effloop.data.source.root import files_in
from effloop.errors import ConfigError, DataError
from effloop.measure.bench_loader import original_photos

CHUNK = 1 << 16
SECRET = os.urandom(8).hex()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of an empty folder, asked for 64 KiB at a time; what is known of it is forgotten before and after."""
    monkeypatch.setattr(fetch, "CHUNK_BYTES", CHUNK)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "served").mkdir()
    forget()
    with serving(tmp_path / "served") as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, SECRET)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield found
    forget()


def train(*words: str) -> int:
    """Train in this process, which lists anew."""
    forget()
    return main(once("train", *TINY, "record.tensorboard=false", *words))


def shards(server: Server, count: int = 3, size: int = 300_000) -> dict[str, bytes]:
    """Files of noise in the folder `d`."""
    found = {f"s-{number:03}.tar": os.urandom(size + number) for number in range(count)}
    (server.root / "d").mkdir(exist_ok=True)
    for name, data in found.items():
        (server.root / "d" / name).write_bytes(data)
    return found


def web(server: Server) -> str:
    """The URL of `shards`."""
    return f"{server.url}/d/s-{{000..002}}.tar"


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_training_from_a_bucket_is_training_from_the_disk(server, photos, here, capsys):
    (server.root / "b").mkdir()
    write_as("tar", photos, server.root / "b/set", shard_bytes=20_000)
    assert train(f"data.root={server.root}/b/set", "run=local") == 0
    assert train("data.root=s3://b/set", "run=remote") == 0
    assert rows(here / "outputs/remote") == rows(here / "outputs/local")
    summary = json.loads((here / "outputs/remote/summary.json").read_text())["download"]
    assert summary["hit_rate"] == 0
    assert summary["fetched_bytes"] == summary["bytes"] > 10_000
    assert main(["predict", "outputs/remote", "s3://b/set"]) == 2
    assert "predict: 's3://b/set' is a URL, not a path; write data.root=s3://b/set" in capsys.readouterr().err
    kept = json.loads((here / "outputs/remote/remote.json").read_text())
    assert {"set/train-000000.tar", "set/train-000001.tar", "set/train.index"} < {file["key"] for file in kept["files"]}
    texts = [path.read_text() for path in here.rglob("*.*") if path.suffix not in (".ckpt", ".png")]
    assert SECRET not in "".join(texts)
    server.requests.clear()
    forget()
    assert main(["verify", "data.root=s3://b/set/{train,val}-00000*"]) == 0
    assert server.fetched() == ["/b"]  # a listing


@pytest.mark.parametrize(("name", "engine"), [("parquet", "threads"), ("tfrecord", "processes")])
def test_formats_from_a_web_server(name, engine, server, photos, here):
    write_as(name, photos, server.root / "set")
    names = [str(path.relative_to(server.root / "set")) for path in files_in(server.root / "set")]
    (server.root / "set/index.json").write_text(json.dumps(names))
    words = [f"engine={engine}", f"num_workers={int(engine == 'processes')}"]
    assert train(f"data.root={server.url}/set/index.json", *words) == 0


def test_resume_notices_a_changed_bucket(server, photos, here, capsys):
    (server.root / "b").mkdir()
    write_as("tar", photos, server.root / "b/set")
    assert train("data.root=s3://b/set", "run=run") == 0
    (server.root / "b/set/LICENSE").write_text("new")  # the samples are the same
    forget()
    assert main(["resume", "outputs/run", "epochs=3"]) == 2
    assert re.search(r"remote: 5 files, .* then, 6 files, .* now", capsys.readouterr().err)


@pytest.mark.parametrize("root", ["s3://b/a b", "{url}/b/a%20b/{{{names}}}"])
def test_each_name_has_its_own_content(root, server):
    files = {
        name: os.urandom(1000) for name in ("100%.tar", "a%20b.tar", "a b.tar", "a+b.tar", "ü#1?x=2.tar", "[1].tar")
    }
    (server.root / "b/a b").mkdir(parents=True)
    for name, data in files.items():
        (server.root / "b/a b" / name).write_bytes(data)
    names = ",".join(map(quote, files))
    assert read(local_root(root.format(url=server.url, names=names), server.root.parent / "kept")) == files


def test_what_is_half_or_compressed_is_not_taken(server):
    shards(server)
    kept = server.root.parent / "kept"
    server.encoding = "gzip"
    (server.root / "d/x.tar.gz").write_bytes(b"more")
    local_root(f"{server.url}/d/x.tar.gz", kept)
    (server.root / "d/x.tar").write_bytes(b"other")
    with pytest.raises(DataError, match=r"/d/x\.tar can't be fetched: the server sends it compressed \(gzip\)"):
        local_root(f"{server.url}/d/x.tar", kept)


@pytest.mark.parametrize("root", ["s3://d", "{url}/d/s-{{000..002}}.tar"])
def test_a_server_that_is_busy_is_asked_again(root, server, monkeypatch):
    monkeypatch.setattr(stores, "PAUSE_S", 0.001)
    shards(server)
    location = Location.of(root.format(url=server.url))
    server.faults = [Fault(503, times=3, on_listing=True)]
    assert len(store_of(location).manifest().files) == 3
    server.faults = [Fault(503, times=99, on_listing=True)]
    with pytest.raises(DataError, match=r"503 Service Unavailable \(4 attempts\)"):
        store_of(location).manifest()


@pytest.mark.parametrize("root", ["{url}/d/s-000.tar", "s3://d/s-000.tar"])
def test_what_has_come_is_there_before_the_rest(root, server):
    shards(server, size=500_000)
    found = store_of(Location.of(root.format(url=server.url)))
    (file,) = found.manifest().files
    server.pause_s = 0.1
    assert len(next(found.read(file, 0, file.size))) < 300_000


@pytest.mark.slow
def test_tables_and_their_images_behind_urls(server, photos, here, capsys):
    bucket = server.root / "b"
    shutil.copytree(photos, bucket / "images")
    for split in ("train", "val"):
        source = open_source("folder", photos, split)
        lines = [f"{source.name(index)},{source.classes[label]}" for index, label in enumerate(source.labels)]
        (bucket / f"{split}.csv").write_text("\n".join(["path,label", *lines, ""]))
    for run, place in (("local", bucket), ("remote", "s3://b")):
        words = [f"data.root={place}/train.csv", f"data.val_root={place}/val.csv", f"data.images={place}/images"]
        assert train("data=csv", *words, f"run={run}") == 0
    assert rows(here / "outputs/remote") == rows(here / "outputs/local")
    listed = [
        json.loads((here / f"outputs/remote/remote{end}.json").read_text()) for end in ("", "-val_root", "-images")
    ]
    assert [len(each["files"]) for each in listed[:2]] == [1, 1]
    facts = json.loads((here / "outputs/remote/summary.json").read_text())["download"]
    assert facts["files"] == sum(len(each["files"]) for each in listed)
    with open(bucket / "val.csv", "a") as table:
        table.write("\n")  # the samples are the same
    forget()
    assert main(["resume", "outputs/remote", "epochs=3"]) == 2
    assert re.search(r"remote-val_root: 1 files, \d+ bytes, .* then, ", capsys.readouterr().err)


def test_baselines_read_photographs_behind_a_url(server, photos):
    shutil.copytree(photos, server.root / "set")
    root = original_photos(composed("data.root=s3://set"), "", "pillow")
    assert len([*root.glob("*/*.jpg")]) == 40


@pytest.mark.nightly
def test_faults_of_other_keys_name_them(server, here, capsys):
    (server.root / "b").mkdir()
    (server.root / "b/t.csv").write_text("path,label\n0.jpg,a\n")
    assert main(["verify", "data=csv", "data.root=s3://b/t.csv", "split=train"]) == 2
    assert "set data.images=URL" in capsys.readouterr().err
    forget()
    for url in ("s3://b/none.csv", "s3://me:hidden@b/val.csv"):
        assert train("data=csv", "data.root=s3://b/t.csv", f"data.val_root={url}") == 2
        assert re.search(
            r"^effloop: (?!.*hidden).*(data\.val_root|none\.csv can't be fetched)", capsys.readouterr().err, re.M
        )


def test_faults_that_pass_are_survived(server):
    files = shards(server)
    server.faults = [
        Fault(503, times=2, of="s-000.tar"),
        Fault(429, of="s-001.tar"),
        Fault(cut=10_000, times=3, of="s-002.tar"),
    ]
    assert read(local_root(web(server), server.root.parent / "kept")) == files
    assert not any(fault.times for fault in server.faults)


@pytest.mark.parametrize(
    ("root", "fault", "words"),
    [
        (
            "{url}/d/s-{{000..002}}.tar",
            Fault(403, times=99, of="s-001.tar"),
            r"/d/s-001\.tar can't be fetched: 403 Forbidden; set EFFLOOP_HTTP",
        ),
        (
            "s3://d",
            Fault(403, times=99, of="s-001.tar"),
            r"/d/s-001\.tar can't be fetched: 403 Forbidden; set AWS_ACCESS_KEY_ID",
        ),
        ("s3://d", Fault(400, times=99, of="/d", on_listing=True), r"^s3://d/ can't be fetched: 400 Bad Request$"),
    ],
)
def test_faults_that_stay_are_one_line(root, fault, words, server):
    shards(server)
    server.faults = [fault]
    with pytest.raises(DataError, match=words) as error:
        local_root(root.format(url=server.url), server.root.parent / "kept")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("root", ["s3://d", "{url}/d/s-{{000..002}}.tar"])
def test_a_file_that_changes_while_it_is_fetched(root, server):
    files, kept, root = shards(server), server.root.parent / "kept", root.format(url=server.url)
    (server.root / "new").write_bytes(b"new")
    server.faults = [Fault(of="s-001.tar", act=lambda: (server.root / "new").replace(server.root / "d/s-001.tar"))]
    with pytest.raises(DataError, match="changed since it was listed"):
        local_root(root, kept)
    forget()
    assert read(local_root(root, kept)) == {**files, "s-001.tar": b"new"}


def test_a_file_that_is_written_over_while_it_is_sent(server, monkeypatch):
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 16 << 20)
    files, kept, root = (
        shards(server, count=1, size=2_000_000),
        server.root.parent / "kept",
        f"{server.url}/d/s-000.tar",
    )
    now = os.urandom(len(files["s-000.tar"]))
    server.faults = [Fault(after=lambda: (server.root / "d/s-000.tar").write_bytes(now), of="s-000.tar")]
    with pytest.raises(DataError, match="changed since it was listed"):
        local_root(root, kept)
    assert not [*kept.glob("objects/*.done")]
    forget()
    assert local_root(root, kept).read_bytes() == now


def test_a_server_without_parts(server):
    files = shards(server)
    server.ranges = False
    server.faults = [Fault(cut=100_000, of="s-001.tar")]
    assert read(local_root(web(server), server.root.parent / "kept")) == files


_FETCH = """
import sys
from pathlib import Path
from effloop.data.remote import fetch
fetch.CHUNK_BYTES = 1 << 16
fetch.this_process.run = sys.argv[3]
print(fetch.local_root(sys.argv[1], Path(sys.argv[2])))
print(fetch.fetched_of(sys.argv[1], Path(sys.argv[2]))[0].fetched_bytes, flush=True)
"""


def start(root: str, kept: Path, run: str = "") -> subprocess.Popen[str]:
    """A process that fetches, maybe as a rank of a run, and prints where to and how many bytes."""
    command = [sys.executable, "-c", _FETCH, root, str(kept), run]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(server: Server, count: int) -> None:
    """Wait for so many requests for content."""
    while len(server.fetched()) < count:
        time.sleep(0.01)


@pytest.mark.nightly
def test_kills_lose_little_and_two_runs_share_what_is_fetched(server):
    files, kept, root = shards(server, count=2, size=3_000_000), server.root.parent / "kept", "s3://d"
    server.pause_s = 0.02
    killed = start(root, kept)
    until(server, 40)
    killed.kill()
    killed.communicate()
    left = sum(path.stat().st_blocks * 512 for path in kept.glob(f"objects/*{PART}"))
    assert left > 10 * CHUNK
    server.requests.clear()
    ranks, said = [start(root, kept, run) for run in ("of ranks", "of ranks", "")], []
    for rank in ranks:
        out, err = rank.communicate(timeout=60)
        assert (rank.returncode, err.count("Traceback")) == (0, 0)
        path, came = out.split()
        assert read(Path(path)) == files
        said.append(int(came))
    assert server.fetched().count("/d") == 1  # listed for all of them
    assert said[0] == said[1]
    assert min(said[1:]) == 0  # by one of the two runs
    assert 0 < max(said) <= 6_000_000 - left + 16 * CHUNK  # 16 were under way
    assert len(server.fetched()) - 1 <= 6_000_000 // CHUNK + 2 - left // CHUNK + 16


@pytest.mark.slow
def test_a_downloader_that_is_killed_is_one_line(server):
    shards(server)
    server.pause_s = 0.2
    run = start("s3://d", server.root.parent / "kept")
    until(server, 3)
    (child,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert re.search(rf"\(pid {child}\) was killed by SIGKILL .*; start again: what was fetched is kept\n$", err)


@pytest.mark.parametrize(
    "last", [{"name": "d-1", "files": 1, "of_bytes": 2}, {"error": "no such host", "kind": "data"}]
)
def test_a_report_after_the_result_is_ignored(monkeypatch, last):
    report = {"total": 0, "bytes": 0}
    command = [sys.executable, "-c", f"for line in {[*map(json.dumps, [report, report | last, report])]}: print(line)"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    monkeypatch.setattr(fetch.processes, "start_child", lambda *_, **__: subprocess.Popen(command, **pipes))
    with open(os.devnull) as lock:
        if "name" in last:
            assert fetch._run_child({"root": "s3://d"}, lock) == report | last
        else:
            with pytest.raises(DataError, match="no such host"):
                fetch._run_child({"root": "s3://d"}, lock)


def test_room_is_made_of_what_nobody_uses(server):
    kept = server.root.parent / "kept"
    files = shards(server, count=4, size=1_000_000)
    first = local_root("s3://d/s-00[01].tar", kept, limit_gb=0.0045)
    with pytest.raises(
        ConfigError, match=r"data\.root: .* has 4\.0 MB in 4 files, 2\.0 MB of them .* room for [45]\d\d\.\d kB"
    ):
        local_root("s3://d/s-00*.tar", kept, limit_gb=0.0025)
    local_root("s3://d/s-00[12].tar", kept, limit_gb=0.0045)
    assert read(first)["s-000.tar"] == files["s-000.tar"]  # both are in use
    forget()
    last = local_root("s3://d/s-00[123].tar", kept, limit_gb=0.0032)
    assert len(read(last)) == 3
    assert not first.exists()
    assert len([*kept.glob("objects/*")]) == 3


def test_what_another_process_has_fetched_is_used_when_that_has_ended(server, monkeypatch):
    kept, files = server.root.parent / "kept", shards(server, size=1_000_000)
    roots = [f"{server.url}/d/s-00{number}.tar" for number in range(2)]
    first, second = (local_root(root, kept) for root in roots)
    found = os.environ["EFFLOOP_REMOTE"]
    forget()
    monkeypatch.setenv("EFFLOOP_REMOTE", found)
    server.requests.clear()
    monkeypatch.setenv(*fetched_before().popitem())  # as a sweep does for all but its first job
    assert [local_root(root, kept) for root in roots] == [first, second]
    assert not server.requests
    facts, _ = fetched_of(roots[0], kept)
    assert (facts.bytes, facts.fetched_bytes, facts.hit_rate) == (len(files["s-000.tar"]), 0, 1)
    with pytest.raises(ConfigError, match=r"room for 0 bytes"):
        local_root(f"{server.url}/d/s-002.tar", kept, limit_gb=0.002)
    assert first.read_bytes() == files["s-000.tar"]


def test_a_full_disk_is_one_line(server, tmp_path):
    shards(server, size=1_500_000)
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "2m"):
        with pytest.raises(ConfigError, match=r"has 4\.5 MB .* room for 1\.\d MB \(80 % of the free disk\)"):
            local_root("s3://d", disk / "kept")
        server.faults = [Fault(of="s-000.tar", act=lambda: fill(disk))]
        with pytest.raises(ConfigError, match=r"^data\.download_dir: .*No space left on device; 0 bytes are free"):
            local_root(f"{server.url}/d/s-000.tar", disk / "kept")


def test_what_was_fetched_is_said(server):
    files, kept, root = shards(server), server.root.parent / "kept", "s3://d"
    local_root(root, kept)
    found, line = fetched_of(root, kept)
    assert (found.files, found.bytes, found.hit_rate) == (3, sum(map(len, files.values())), 0)
    assert line.startswith(f"remote {root}: 3 files, 0.9 MB; 0.9 MB fetched in ")

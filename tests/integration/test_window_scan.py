"""Training on a window of shards that have no index beside them: each is fetched and scanned once, then as with one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from images import encode, photo
from masked import NAMES, mask_of
from plans import Listed
from remotes import Fault, Server, measuring, serving
from runs import TINY, composed, once
from shards import write_shards

import effloop
from effloop.cli.main import main
from effloop.data.image.mask import encode_mask, mask_digest
from effloop.data.remote import window_fetch
from effloop.data.remote.fetch import forget
from effloop.data.source import Kind, Source, Tail, sources
from effloop.data.source.root import expand_root
from effloop.data.source.storage.targets import Targets
from effloop.data.source.storage.writing import Dataset, Record, writers
from effloop.data.windows import WindowOrder
from effloop.errors import ConfigError, DataError

WINDOW = 2
SAID = "no index beside the shards"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of an empty folder, by HTTP and as S3."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "served/b").mkdir(parents=True)
    forget()
    with serving(tmp_path / "served") as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "not-a-secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield found
    for fetching in [*window_fetch._running.values()]:
        fetching.close()
    forget()


def limit(folder: Path) -> int:
    """Bytes of two windows, the validation split and a little."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    blocks = {path: -(-size // 4096) * 4096 + 4096 for path, size in sizes.items()}
    train = sorted(size for path, size in blocks.items() if "train" in str(path.relative_to(folder)))
    return sum(train[-2 * WINDOW :]) + sum(blocks.values()) - sum(train)


def kept(folder: Path) -> tuple[str, ...]:
    return (f"data.window={WINDOW}", f"data.download_gb={(limit(folder) + 8192) / 1e9}", *TINY)


def order_of(source, seed: int) -> WindowOrder:
    """The order on the local files."""
    _, counts = source.shard_files()
    return WindowOrder(int(counts.sum()), 8, seed, Tail.drop, shards=tuple(counts.tolist()), window=WINDOW)


def fetched(server: Server) -> list[str]:
    """Names of the shards of the training split that were asked for."""
    return [Path(path).name for path in server.fetched() if "train" in path and not path.endswith("/")]


def opened(*words: str) -> Source:
    """The training split, as the first that a process opens."""
    forget()
    return sources.build(composed(*words).data, "train")


@pytest.mark.parametrize(
    ("layout", "root", "words"),
    [
        ("tar", "s3://b/d/pets-{{train-{{000..009}},val-000}}.tar", []),
        ("tfrecord", "s3://b/d", ["data=tfrecord"]),
        ("recordio", "{url}/b/d/", []),
    ],
)
def test_shards_without_an_index_are_scanned_once(layout, root, words, server, photos, here, tmp_path, capsys):
    local = write_shards(layout, photos, server.root / "b/d")
    config = composed(*words, f"data.root={root.format(url=server.url)}", *kept(local))
    with measuring(tmp_path / "cache/effloop/remote/window/objects") as most:
        loader, full = (
            effloop.build_loader(config),
            effloop.build_loader(composed(f"data.root={local}", "data.index=none", *TINY)),
        )
        assert loader.classes == full.classes
        order, seen = order_of(full.plan.source, config.seed), []
        for number, batch in enumerate(loader.epoch(0)):
            ids = batch.ids.tolist()
            assert ids == order.batch(0, number)[0].tolist()
            expected = full.samples(ids)
            assert np.array_equal(batch.images.numpy(), expected.images.numpy())
            assert np.array_equal(batch.targets.numpy(), expected.targets.numpy())
            assert loader.plan.source.key(ids[0]) == full.plan.source.key(ids[0])
            seen += ids
        loader.close()
    assert sorted(seen) == [*range(40)]
    assert 0 < most[0] <= limit(local) + 8192
    assert capsys.readouterr().err.count(SAID) == 1
    assert len({*fetched(server)}) == 10
    server.requests.clear()
    forget()
    effloop.build_loader(config).close()
    assert len(fetched(server)) <= 1
    assert SAID not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tar"])
def test_masks_in_shards_are_where_they_are(name, server, tmp_path):
    masks = [mask_of(30, 40, number) for number in range(11)]
    records = [
        Record(b"%d.jpg" % number, 0, encode(photo(30, 40, number), "JPEG"), mask_digest(mask), mask=encode_mask(mask))
        for number, mask in enumerate(masks)
    ]
    splits, targets = {"train": Listed(records[:9]), "val": Listed(records[9:])}, Targets(Kind.masks, NAMES)
    writers[name](server.root / "b/d", Dataset(NAMES, splits, {"payload": "original"}, targets), 1_000)
    for path in (server.root / "b/d").glob("*.index"):
        path.unlink()
    words = [f"data={name}", "data.window=1"]
    found = opened(f"data.root={server.url}/b/d/", *words)
    local = opened(f"data={name}", f"data.root={server.root}/b/d")
    assert found.classes == local.classes
    assert found.fingerprint() == local.fingerprint()
    assert np.array_equal(found.target_rows, local.target_rows)
    here = found.present()
    assert 0 < len(here) < 9
    for row in here[np.arange(len(here))].tolist():
        assert bytes(found.read(row)) == bytes(local.read(row))
        assert bytes(found.read_mask(row)) == bytes(local.read_mask(row))


def test_an_interrupted_scan_goes_on_and_a_changed_shard_is_scanned_anew(server, photos, tmp_path, capsys):
    local = write_shards("tar", photos, server.root / "b/d")
    words = ("data=tar", f"data.root={server.url}/b/d/", *kept(local))
    server.faults = [Fault(403, of="train-007.tar")]
    with pytest.raises(ConfigError, match=r"train-007\.tar can't be fetched: 403"):
        opened(*words)
    capsys.readouterr()
    found = opened(*words)
    assert re.search(r"; [34] \(.*\) are fetched and scanned now, once, 2 at a time", capsys.readouterr().err)
    assert found.fingerprint() == sources.build(composed("data=tar", f"data.root={local}").data, "train").fingerprint()
    shard = local / "pets-train-003.tar"
    (local / "pets-train-004.tar").rename(shard)
    server.requests.clear()
    assert len(opened(*words)) == 36
    assert re.search(rf"{SAID} of .* says what is in them; 1 \(", capsys.readouterr().err)
    assert shard.name in fetched(server)
    assert len(fetched(server)) <= 2
    (parts,) = tmp_path.glob("cache/**/*.shards")
    before = len([*parts.iterdir()])
    shard.unlink()
    assert len(opened(*words)) == 32
    assert len([*parts.iterdir()]) == before - 1


def test_one_scans_and_others_wait(server, photos, capsys):
    write_shards("tar", photos, server.root / "b/d")
    data = composed("data=tar", f"data.root={server.url}/b/d/", "data.window=2").data
    expand_root(data)
    server.pause_s = 0.05
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: sources.build(data, "train"), range(2))
    assert first.fingerprint() == second.fingerprint()
    assert len(first) == 40
    assert capsys.readouterr().err.count(SAID) == 1
    assert sorted(fetched(server)) == [f"pets-train-{number:03}.tar" for number in range(10)]


@pytest.mark.parametrize(
    ("layout", "words", "said"),
    [
        ("snappy", ["data=parquet"], r"data\.window: .* has no train\.index, which `convert to=parquet` writes"),
        (
            "tar",
            ["data.root={url}/b/d/pets-train-000.tar"],
            r"data\.window: '.*000\.tar' has no shards of the split 'train'",
        ),
        ("tar", ["data=tar", "data.train_split=cats"], r"data\.window: .* has no shards of the split 'cats'"),
        (
            "tar",
            ["data=hf", "data.root=zoo/animals"],
            r"data\.window: 2 .*set data=parquet .*data\.root=hf://datasets/zoo",
        ),
        ("tar", ["data.window=10"], r"data\.window: 10 of 10 shards are all of them"),
        ("tar", ["data.window=5"], r"data\.window: 5 needs .* MB.*set data\.window=2"),
    ],
)
def test_what_can_not_be_scanned_is_one_line(layout, words, said, server, photos, here, capsys):
    local = write_shards(layout, photos, server.root / "b/d")
    words = [word.format(url=server.url) for word in words]
    assert main(once("train", f"data.root={server.url}/b/d/", *kept(local), *words)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "data." in line and SAID not in line]
    assert len(lines) == 1
    assert re.search(said, lines[0]), lines


def test_what_was_found_in_a_shard_and_is_damaged_is_scanned_anew(server, photos, tmp_path):
    write_shards("tar", photos, server.root / "b/d")
    words = ("data=tar", f"data.root={server.url}/b/d/", f"data.window={WINDOW}")
    opened(*words)
    for index in (tmp_path / "cache/effloop").glob("*.index"):
        index.unlink()
    next((tmp_path / "cache/effloop").glob("*.shards/*")).write_bytes(b"")
    with pytest.raises(DataError, match="was damaged, and is removed; start again"):
        opened(*words)
    server.requests.clear()
    assert len(opened(*words)) == 40
    assert len({*fetched(server)}) <= 3


def test_another_training_split_leaves_what_was_found_for_the_first_one(server, photos):
    local = write_shards("tar", photos, server.root / "b/d")
    for number in range(5, 10):
        (local / f"pets-train-{number:03}.tar").rename(local / f"pets-extra-{number:03}.tar")
    words = ("data=tar", f"data.root={server.url}/b/d/", f"data.window={WINDOW}")
    for split in ("train", "extra"):
        assert len(opened(*words, f"data.train_split={split}")) == 20
    (local / "pets-train-003.tar").write_bytes((local / "pets-train-004.tar").read_bytes())
    (local / "pets-train-004.tar").unlink()
    server.requests.clear()
    assert len(opened(*words, "data.train_split=train")) == 16
    assert len({*fetched(server)}) <= 2

"""Datasets of Hugging Face's hub, by huggingface_hub itself, from a server in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hubs import COMMIT, NAME, Hub, served
from plans import open_source, read_bytes, write_as
from runs import make_photos

from effloop.cli.main import main
from effloop.config import compose, from_dict, to_dict
from effloop.data.source import Source
from effloop.data.source.folder import FolderSource
from effloop.data.source.formats.parquet import ParquetSource
from effloop.data.source.formats.tar import TarSource
from effloop.data.source.hub import HubConfig
from effloop.errors import ConfigError, DataError


@pytest.fixture
def hub(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = write_as("parquet", photos, tmp_path / "repository", 20_000)
    (folder / "secret.txt").write_text("isn't fetched")
    with served(folder, tmp_path / "cache", monkeypatch) as hub:
        yield hub


def opened(split: str = "train", root: str = NAME, **options: str) -> Source:
    return open_source("hf", root, split, **options)  # type: ignore[arg-type]


def test_the_same_as_the_folder(hub, photos, tmp_path):
    for split in ("train", "val"):
        source, wanted = opened(split), open_source("folder", photos, split)
        assert type(source) is ParquetSource
        assert source.fingerprint() == wanted.fingerprint()
        assert [read_bytes(source, index) for index in range(3)] == [read_bytes(wanted, index) for index in range(3)]
    snapshot = tmp_path / "cache/datasets--zoo--animals/snapshots" / COMMIT
    assert source.where == f"{snapshot}:val"
    assert not (snapshot / "secret.txt").exists()
    assert opened(root=f"hf://datasets/{NAME}", revision="v1").where == f"{snapshot}:train"


def test_a_run_keeps_the_commit(hub):
    config = compose(["data=hf", f"data.root={NAME}"])
    assert isinstance(config.data, HubConfig)
    assert config.data.revision == COMMIT
    opened(revision=COMMIT)
    hub.asked.clear()
    opened("val", revision=COMMIT)
    assert hub.asked == []
    tagged = compose(["data=hf", f"data.root={NAME}", "data.revision=v1"]).data
    assert isinstance(tagged, HubConfig)
    assert tagged.revision == COMMIT


def test_without_a_network(hub, tmp_path, monkeypatch):
    """What the cache has is read; otherwise a line says so."""
    wanted = opened().fingerprint()
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert opened().fingerprint() == wanted
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"^data\.root: 'zoo/animals' is not in the cache .*/empty, or not all of it"):
        opened()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"^data\.root: 'zoo/animals' is not in the cache .*HF_HUB_OFFLINE"):
        opened()


@pytest.mark.parametrize(
    ("root", "revision", "refuses", "message"),
    [
        ("zoo/nothing", None, "", r"^data\.root: 'zoo/nothing' is not on http://127.*, or not for everybody; correct"),
        (NAME, "v2", "", r"^data\.revision: 'v2' is no branch, tag or commit of 'zoo/animals' on http"),
        (
            NAME,
            None,
            "GatedRepo",
            r"^data\.root: 'zoo/animals' is not on http.*, or not for everybody; .* accept its conditions there",
        ),
        (NAME, COMMIT[::-1], "", r"^data\.revision: '7654"),
        ("a/b/c", None, "", r"^data\.root: 'a/b/c' is no name of a dataset; set data\.root=ORG/NAME$"),
        ("", None, "", r"^data\.root is missing; data=hf needs it: set data\.root=ORG/NAME$"),
    ],
)
def test_one_line(root, revision, refuses, message, hub):
    hub.refuses = refuses
    with pytest.raises(ConfigError, match=message) as caught:
        opened(root=root, **{"revision": revision} if revision else {})
    assert "\n" not in str(caught.value)


def test_other_formats(hub, photos, tmp_path):
    hub.folder = write_as("tar", photos, tmp_path / "shards")
    assert type(opened()) is TarSource
    hub.folder, hub.commit = make_photos(tmp_path / "images", train=6, val=3), "1" * 40
    assert type(opened()) is FolderSource
    hub.folder, hub.commit = tmp_path / "none", "2" * 40
    hub.folder.mkdir()
    (hub.folder / "data.bin").write_bytes(b"")
    with pytest.raises(DataError, match="has no parquet files, tar shards or images"):
        opened()


def test_only_the_subset_is_fetched(hub, photos, tmp_path):
    hub.folder = tmp_path / "several"
    for name in ("one", "two"):
        write_as("parquet", photos, hub.folder / name)
    with pytest.raises(DataError, match=r"has no parquet files of data\.subset=three; name another one, or see"):
        opened(subset="three")
    assert len(opened(subset="two")) == 40
    assert not [*(tmp_path / "cache").rglob("one")]
    with pytest.raises(ConfigError, match=r"^data\.subset: 'zoo/animals' has several: one, two; set data=hf data\."):
        opened()


def test_verify(hub, here, capsys):
    assert main(["verify", "data=hf", f"data.root={NAME}"]) == 0
    assert main(["verify", "data=hf", "data.root=zoo/nothing"]) == 2
    assert "'zoo/nothing' is not on http" in capsys.readouterr().err


def test_the_name_stays_in_a_saved_config(hub, here):
    config = compose(["data=hf", f"data.root={NAME}"])
    assert to_dict(config)["data"]["root"] == NAME
    assert from_dict(to_dict(config), (), "the config").data == config.data


def test_an_address_of_fsspec_leads_there(hub):
    assert opened(root=f"hf://datasets/{NAME}").where == opened().where
    with pytest.raises(ConfigError, match=r"hub; set data=hf data\.root=a/b data\.revision=v1$"):
        compose(["data.root=hf://datasets/a/b@v1"])

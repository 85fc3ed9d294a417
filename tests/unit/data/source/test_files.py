"""Images that are no dataset."""

import os
from pathlib import Path

import pytest

from effloop.data.source.files import Images, Unlabelled, find_images
from effloop.errors import DataError


def touched(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def found(*paths: Path | str) -> list[str]:
    return [os.fsdecode(path) for path in find_images([Path(path) for path in paths]).names]


def test_folders_files_and_patterns(here):
    """In the order given, each image once; in folders only what is named like an image, hidden ones left out."""
    touched(here, "p/b.JPG", "p/a.png", "p/q/c.gif", "p/notes.txt", "p/.hidden.jpg", "p/.cache/d.jpg", "scan")
    assert found("p") == ["p/a.png", "p/b.JPG", "p/q/c.gif"]
    assert found("scan", "p/q", "p", "scan") == ["scan", "p/q/c.gif", "p/a.png", "p/b.JPG"]
    assert found("p/*.[JP]*") == ["p/b.JPG"]
    assert found("p/**/*.gif") == ["p/q/c.gif"]
    source = find_images([Path("p")])
    assert (source.where, source.name(1), len(source), source.classes) == ("p", "p/b.JPG", 3, ())
    assert bytes(source.read(1)) == b"p/b.JPG"
    assert source.size(1) == 7
    assert list(source.file_paths()) == source.names


def test_a_name_with_brackets_is_no_pattern_if_it_is_there(here):
    touched(here, "a[1].jpg", "a1.jpg")
    assert found("a[1].jpg") == ["a[1].jpg"]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("nowhere", "'nowhere' is not there; name images"),
        ("*.jpg", "'*.jpg' matches nothing; name images"),
        ("empty", "'empty' has no images (looked for"),
    ],
)
def test_nothing_found(here, path, line):
    (here / "empty").mkdir()
    with pytest.raises(DataError) as error:
        found(path)
    assert str(error.value).startswith(line)


def test_what_is_no_regular_file_is_refused_when_it_is_read(tmp_path):
    """A FIFO that nobody writes to would block for ever."""
    os.mkfifo(tmp_path / "fifo.jpg")
    (tmp_path / "link.jpg").symlink_to("nothing")
    source = Images([os.fsencode(tmp_path / name) for name in ("fifo.jpg", "link.jpg")], "here")
    with pytest.raises(DataError, match="is not a regular file"):
        source.read(0)
    with pytest.raises(DataError, match="can't be read: No such file"):
        source.read(1)


def test_images_in_memory():
    source = Images([b"first", b"second"], "here", [b"abc", b"d"])
    assert (bytes(source.read(1)), source.size(0), source.name(1), len(source)) == (b"d", 3, "second", 2)
    assert source.fingerprint()["bytes"] == 4


def test_without_targets(photos):
    source = Unlabelled(find_images([photos / "val"]))
    assert (source.classes, set(source.targets.tolist()), len(source)) == ((), {0}, 13)

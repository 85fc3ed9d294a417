import os
import pickle
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from images import encode, photo
from plans import Copied, line, open_source, read_bytes, write_as, write_records
from torchvision.datasets import ImageFolder

from effloop.data.image.header import pnm_header
from effloop.data.source import printable
from effloop.data.source.base import classes_without_samples
from effloop.data.source.storage.columns import ColumnFile
from effloop.data.source.storage.writing import Dataset, writers
from effloop.errors import ConfigError, DataError

JPEG = encode(photo(8, 9), "JPEG")
SOUGHT = "looked for .jpg, .png, .webp, .gif, .tif and the like"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes, with folders inside; names that sort differently by part than as a whole."""
    root = tmp_path / "root"
    add(root, "cat/b.jpg", "cat/a.JPEG", "cat/b/1.png", "cat/b-c/2.jpg", "cat/b/deep/er/0.bmp", "cat/B.jpg")
    add(root, "Dog/10.webp", "Dog/9.jpg", "Dog/ä.jpg", "Dog/z/one.jpg", "Dog/\U0001f415.jpg", "Dog/\ufffd.jpg")
    return root


def add(root: Path, *names: str) -> None:
    for number, name in enumerate(names):
        path = root / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(JPEG + bytes(number))  # each of its own length


def age(root: Path) -> None:
    """Let the folders' last change be long ago, so that a scan of them is trusted."""
    for folder, _, _ in os.walk(root):
        os.utime(folder, (1_600_000_000, 1_600_000_000))


def keys(root: Path) -> list[str]:
    source = open_source("folder", root)
    return [source.key(i) for i in range(len(source))]


def kept(cache: Path) -> list[tuple[str, int, int]]:
    """What tells a kept scan from one that was written anew."""
    return [(path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(cache.iterdir())]


def refusal(root: Path, error: type[Exception] = DataError, **options: str) -> str:
    with pytest.raises(error) as caught:
        open_source("folder", root, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_order_and_labels_are_those_of_image_folder(root):
    source, reference = open_source("folder", root), ImageFolder(str(root / "train"))
    assert list(source.classes) == reference.classes == ["Dog", "cat"]
    assert [f"{source.where}/{source.key(i)}" for i in range(len(source))] == [path for path, _ in reference.samples]
    assert source.labels.tolist() == reference.targets
    assert [read_bytes(source, i) for i in range(len(source))] == [Path(p).read_bytes() for p, _ in reference.samples]


def test_order_of_names_that_are_not_text(root):
    for part in ("cat/{}.jpg", "cat/{}/1.jpg", "{}/1.jpg"):
        add(
            root, *(part.format(os.fsdecode(name)) for name in (b"\xff", b"\xc3", "\ufffd".encode(), "\ue000".encode()))
        )
    source, reference = open_source("folder", root), ImageFolder(str(root / "train"))
    paths = [printable(os.fsencode(path)) for path, _ in reference.samples]
    assert [f"{source.where}/{source.key(i)}" for i in range(len(source))] == paths
    assert source.labels.tolist() == reference.targets


def test_what_is_no_image_is_left_out(root):
    before = keys(root)
    add(root, ".hidden/1.jpg", "cat/.hidden/1.jpg", "cat/._1.jpg", "cat/notes.txt", "cat/jpg", "cat/a.jpg.part")
    (root / "train" / "readme.jpg").write_bytes(JPEG)  # not in a class
    assert keys(root) == before


def test_links_are_followed(root, tmp_path):
    add(tmp_path / "else", "owl/1.jpg")
    (root / "train" / "owl").symlink_to(tmp_path / "else" / "train" / "owl")
    (root / "train" / "cat" / "link.jpg").symlink_to(tmp_path / "else" / "train" / "owl" / "1.jpg")
    add(root, "cat/folder.jpg/1.jpg")  # a folder may be called like an image
    assert {"owl/1.jpg", "cat/link.jpg", "cat/folder.jpg/1.jpg"} <= set(keys(root))


def test_names_that_are_not_text(root, tmp_path):
    strange = tmp_path / os.fsdecode(b"\xff\n")
    root.rename(strange)
    cat = os.fsencode(strange / "train" / "cat")
    for name in (b"\xff\xfe.jpg", b"two\nlines.jpg"):
        with open(os.path.join(cat, name), "wb") as file:
            file.write(JPEG + name)
    source = open_source("folder", strange)
    assert source.where == rf"{tmp_path}/\xff\n/train"
    found = {source.key(i): read_bytes(source, i) for i in range(len(source))}
    assert found[r"cat/\xff\xfe.jpg"] == JPEG + b"\xff\xfe.jpg"
    assert found[r"cat/two\nlines.jpg"] == JPEG + b"two\nlines.jpg"


def test_fingerprint_is_that_of_the_same_data_elsewhere(root, photos, tmp_path):
    memmap = write_as("memmap", photos, tmp_path / "photos.effloop")
    for split in ("train", "val"):
        wanted = open_source("folder", photos, split).fingerprint()
        assert open_source("memmap", memmap, split).fingerprint() == wanted
        assert wanted["bytes"] == sum(path.stat().st_size for path in (photos / split).rglob("*.jpg"))
    assert open_source("folder", shutil.copytree(root, tmp_path / "copy")).fingerprint() == (
        open_source("folder", root).fingerprint()
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda train: (train / "cat" / "b.jpg").rename(train / "cat" / "c.jpg"),
        lambda train: (train / "cat" / "b.jpg").rename(train / "Dog" / "b.jpg"),
        lambda train: (train / "cat" / "b.jpg").write_bytes(JPEG + b"longer"),
    ],
)
def test_fingerprint_tells_names_labels_and_sizes(root, change):
    before = open_source("folder", root).fingerprint()
    change(root / "train")
    after = open_source("folder", root).fingerprint()
    assert after["samples"] == before["samples"]
    assert after["sha256"] != before["sha256"]


def test_a_scan_is_kept(root, tmp_path):
    age(root)
    cache = tmp_path / "cache"
    first = open_source("folder", root, index_dir=str(cache))
    before = kept(cache)
    second = open_source("folder", root, index_dir=str(cache))
    assert kept(cache) == before
    assert len(before) == 1
    np.testing.assert_array_equal(second.labels, first.labels)
    assert second.fingerprint() == first.fingerprint()


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda root: add(root, "cat/b/deep/er/new.jpg"), {"cat/b/deep/er/new.jpg"}),
        (lambda root: add(root, "owl/new.jpg"), {"owl/new.jpg"}),
        (lambda root: (root / "train/cat/b.jpg").rename(root / "train/cat/c.jpg"), {"cat/b.jpg", "cat/c.jpg"}),
        (lambda root: shutil.rmtree(root / "train/cat/b-c"), {"cat/b-c/2.jpg"}),
    ],
)
def test_a_change_is_noticed(root, change, difference):
    age(root)
    before = keys(root)
    change(root)
    assert set(keys(root)) ^ set(before) == difference


def test_other_content_with_the_same_times_is_noticed(root, tmp_path):
    """`cp -a` and `rsync -t` give the folders that they make the times of those that they copy."""
    other = tmp_path / "other"
    add(other, *(name.replace("9", "8").replace("b", "c") for name in keys(root)))
    age(root)
    age(other)
    before = keys(root)
    shutil.rmtree(root)
    subprocess.run(["cp", "-a", other, root], check=True)
    assert keys(root) == keys(other) != before


def test_a_change_within_the_clocks_tick_is_noticed(root):
    folder = root / "train" / "cat"
    before = keys(root)
    at_the_scan = folder.stat().st_mtime_ns
    add(root, "cat/new.jpg")
    os.utime(folder, ns=(at_the_scan, at_the_scan))  # as if both fell into one tick
    assert len(keys(root)) == len(before) + 1


@pytest.mark.parametrize("damage", [b"text", b"EFFLOOP\0" + bytes(100)])
def test_a_damaged_scan_is_made_again(root, tmp_path, damage):
    age(root)
    wanted = open_source("folder", root, index_dir=str(tmp_path / "cache")).fingerprint()
    (index,) = (tmp_path / "cache").iterdir()
    index.write_bytes(damage)
    assert open_source("folder", root, index_dir=str(tmp_path / "cache")).fingerprint() == wanted


@pytest.mark.parametrize("column", ["label", "key_end", "folder_ctime_ns"])
def test_a_flipped_byte_of_a_scan_is_noticed(root, tmp_path, column, capsys):
    age(root)
    wanted = open_source("folder", root, index_dir=str(tmp_path / "cache"))
    labels = wanted.labels.tolist()
    (index,) = (tmp_path / "cache").iterdir()
    damaged = bytearray(index.read_bytes())
    damaged[ColumnFile(index).place(column)[2]] ^= 1
    index.unlink()  # what is mapped stays what it was
    index.write_bytes(damaged)
    found = open_source("folder", root, index_dir=str(tmp_path / "cache"))
    assert (found.labels.tolist(), found.fingerprint()) == (labels, wanted.fingerprint())
    differs = f"{index} is damaged: its column '{column}' doesn't match the checksum that it was written with"
    assert capsys.readouterr().err == f"effloop: warning: {differs}; it is made again\n"


def test_a_source_is_not_unpickled_over_other_data(root):
    """A worker process that starts late would otherwise number the samples differently."""
    pickled = pickle.dumps(open_source("folder", root))
    assert len(pickle.loads(pickled)) == 12
    add(root, "cat/new.jpg")
    open_source("folder", root)  # another run scans again
    with pytest.raises(
        DataError, match=line(f"{root}/train has changed since this run opened it; start the run again")
    ):
        pickle.loads(pickled)


def test_index_dir_that_cannot_be_written(root, tmp_path):
    (tmp_path / "file").write_text("")
    got = refusal(root, ConfigError, index_dir=str(tmp_path / "file" / "below"))
    assert got.startswith(f"data.index_dir: {tmp_path}/file/below/folder-")
    assert got.endswith(".index can't be written: Not a directory; set data.index_dir=PATH")


def test_a_file_that_is_gone_when_read(root):
    source = open_source("folder", root)
    (root / "train" / source.key(3)).unlink()
    with pytest.raises(DataError, match=line("can't be read: No such file or directory")):
        source.read(3)


def test_missing_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    got = refusal(Path("nowhere"), ConfigError)
    assert got == f"data.root: 'nowhere' is not there (looked at {tmp_path}/nowhere); set data.root=PATH"
    assert refusal(Path("~nobody-here/x"), ConfigError).startswith("data.root: '~nobody-here/x' is not there")
    assert refusal(Path("x" * 300), ConfigError).startswith("data.root: 'xxx")


def test_home_is_found(root, monkeypatch):
    monkeypatch.setenv("HOME", str(root.parent))
    assert len(open_source("folder", Path("~/root"))) == 12


def test_what_a_root_lacks(root, tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    got = refusal(file, ConfigError)
    assert got == f"data.root: '{file}' is a file; data=folder reads a folder: set data.root=FOLDER"
    got = refusal(root, split="no/where")
    assert got == f"data.root: '{root}' has no folder 'no/where'; it has train: set split to one of them"
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty") == (
        f"data.root: '{tmp_path}/empty' has no folder 'train'; it has no folders at all, where SPLIT/CLASS/ with "
        f"images should be ({SOUGHT}): set data.root=PATH"
    )


def test_no_class_folders(tmp_path):
    train = tmp_path / "train"
    train.mkdir()
    (train / "1.jpg").write_bytes(JPEG)
    wanted = f"{train} has no class folders with images ({SOUGHT}); it should hold one folder per class"
    assert refusal(tmp_path) == f"{wanted}: set data.root=PATH"


def test_empty_class_folder(root):
    (root / "train" / "empty" / "inner").mkdir(parents=True)
    (root / "train" / "empty" / "note.txt").write_text("text")
    wanted = f"{root}/train: the class folder 'empty' has no images ({SOUGHT}); remove it, fill it, or set "
    assert refusal(root) == f"{wanted}data.allow_missing_classes=true"
    source = open_source("folder", root, allow_missing_classes=True)
    assert "empty" in source.classes
    assert classes_without_samples(source) == ["empty"]


def test_files_without_a_byte_are_known(root):
    (root / "train" / "cat" / "b" / "1.png").write_bytes(b"")
    (root / "train" / "cat" / "link.jpg").symlink_to("nowhere")
    source = open_source("folder", root)
    assert [source.key(index) for index in source.bad_samples().tolist()] == ["cat/link.jpg", "cat/b/1.png"]
    with pytest.raises(DataError, match=r"^can't be read: No such file or directory \(it is a link to nowhere\)$"):
        source.read(source.bad_samples()[0])


def test_link_to_itself(root):
    (root / "train" / "cat" / "loop").symlink_to("loop")
    wanted = f"{root}/train/cat/loop is a symbolic link that leads back to itself (loop); remove the link"
    assert refusal(root) == wanted


def test_keys_that_are_no_paths_are_numbered(tmp_path):
    jpeg, raw = encode(photo(), "JPEG"), pnm_header(1, 2, 1) + b"ab"
    keys = [b"b/fine.jpg", b"a/../b.jpg", b"a/x\0.jpg", b"/a.jpg", b"a/noextension", b"a/.hidden.jpg", b"a//b.jpg", b""]
    records = [(key, int(key.startswith(b"b")), raw if i == 4 else jpeg) for i, key in enumerate(keys)]
    write_records("folder", tmp_path / "out", ["a", "b"], train=records)
    names = sorted(path.relative_to(tmp_path).as_posix() for path in (tmp_path / "out").rglob("*.*"))
    numbered = [f"out/train/a/{i:09}.{'pgm' if i == 4 else 'jpg'}" for i in range(1, 8)]
    assert names == [*numbered, "out/train/b/fine.jpg"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "a" * 256])
def test_class_names_that_are_no_folders(tmp_path, name):
    wanted = f"the class name {name!r} can't be a folder's; convert to another format"
    with pytest.raises(DataError, match=line(wanted)):
        write_records("folder", tmp_path / "out", [name], train=[(b"k", 0, encode(photo(), "JPEG"))])


def test_two_samples_of_one_name(tmp_path):
    jpeg = encode(photo(), "JPEG")
    wanted = f"{tmp_path}/out/train/a/000000001.jpg would be written twice; its key is another sample's"
    with pytest.raises(DataError, match=line(wanted)):
        write_records("folder", tmp_path / "out", ["a"], train=[(b"a/000000001.jpg", 0, jpeg), (b"", 0, jpeg)])


@pytest.mark.parametrize(
    ("classes", "pair"), [(["b", "a"], "'b' comes before 'a'"), (["a", "a"], "'a' comes before 'a'")]
)
def test_classes_out_of_order(tmp_path, classes, pair):
    jpeg = encode(photo(), "JPEG")
    wanted = (
        f"the class {pair}, but folders are read in the order of their names, and labels would change; "
        "convert to another format"
    )
    with pytest.raises(DataError, match=line(wanted)):
        write_records("folder", tmp_path / "out", classes, train=[(b"", 0, jpeg), (b"", 1, jpeg)])
    assert list(tmp_path.iterdir()) == []


LACKING: dict[str, list[tuple[bytes, int, bytes]]] = {
    "train": [(b"0", 0, JPEG), (b"1", 1, JPEG)],
    "val": [(b"9", 1, JPEG)],
}
LACKS = (
    "the class 'a' has no samples in the split 'val', so it would have no folder, and labels would change; "
    "convert to another format"
)


def test_a_class_without_samples_is_known_before_anything_is_written(tmp_path):
    packed = write_records("memmap", tmp_path / "packed", ["a", "b"], **LACKING)
    records = {split: Copied(open_source("memmap", packed, split)) for split in LACKING}
    with pytest.raises(DataError, match=line(LACKS)):
        writers["folder"](tmp_path / "out", Dataset(["a", "b"], records, {}))
    assert not (tmp_path / "out").exists()


def test_label_without_a_class(tmp_path):
    with pytest.raises(DataError, match=line("k has the label 2; allowed are 0 to 1")):
        write_records("folder", tmp_path / "out", ["a", "b"], train=[(b"k", 2, encode(photo(), "JPEG"))])


@pytest.mark.slow
def test_folders_below_each_other_by_the_thousand(root):
    """More than Python's limit of recursion; and a path that is longer than the system's calls take."""
    top = root / "train" / "cat" / "d"
    deep = top / "/".join("d" * 1199)
    subprocess.run(["mkdir", "-p", deep], check=True)
    (deep / "1.jpg").write_bytes(JPEG)
    assert any(name.endswith("d/d/1.jpg") for name in keys(root))
    script = 'cd "$0" && for _ in 1 2 3 4 5 6 7 8 9; do mkdir $1 && cd $1; done'
    subprocess.run(["bash", "-c", script, deep, "e" * 250], check=True)
    got = refusal(root)
    subprocess.run(["rm", "-r", top], check=True)  # Python's rmtree recurses
    assert got.endswith(" can't be read: File name too long")
    assert len(got) < 500

import re
import shutil
from pathlib import Path

import pytest
from masked import make_masks
from plans import line, make_plan, open_source, write_as, write_rows

from effloop.data.check import check_samples, copied
from effloop.data.plan import Plan
from effloop.data.source import sources
from effloop.data.source.splits import open_split
from effloop.errors import PROGRAM, DataError

VERIFY = f"{PROGRAM} verify data.root=PATH checks every sample"
FIX = f"set on_error=skip max_errors=1 to do without it; {VERIFY}"


@pytest.fixture
def plan(photos: Path, tmp_path: Path) -> Plan:
    """Of a copy of the photographs, so that they may be damaged."""
    return make_plan(open_source("folder", shutil.copytree(photos, tmp_path / "copy")))


def file(plan: Plan, index: int) -> Path:
    return Path(plan.source.where, plan.source.key(index))


@pytest.mark.parametrize("num_threads", [0, 4])
def test_truncated(plan, num_threads):
    bad = file(plan, 39)  # the last one
    bad.write_bytes(bad.read_bytes()[:-9])
    wanted = f"{bad} is a truncated JPEG: ends after {bad.stat().st_size:,} bytes without its end marker; {FIX}"
    with pytest.raises(DataError, match=line(wanted)):
        check_samples({"train": plan}, 40, num_threads)


def test_what_is_no_image_anymore(plan):
    bad, whole = file(plan, 20), file(plan, 20).read_bytes()
    for spoil, why in (
        (lambda: bad.write_text("<html>"), "is not an image that Pillow reads; starts with b'<html>'"),
        (lambda: bad.write_bytes(b""), "is empty (0 bytes)"),
        (bad.unlink, "can't be read: No such file or directory"),
    ):
        spoil()
        with pytest.raises(DataError, match=line(f"{bad} {why}; {FIX}")):
            check_samples({"train": plan}, 40, 2)
        bad.write_bytes(whole)


def test_bytes_behind_the_end_are_no_damage(plan):
    with file(plan, 5).open("ab") as behind:
        behind.write(bytes(50))
    check_samples({"train": plan}, 40, 2)


def test_several_are_named_in_order(plan):
    for index in (31, 17, 18):
        file(plan, index).write_text("not an image")
    why = "is not an image that Pillow reads; starts with b'not an image'"
    fix = f"set on_error=skip max_errors=3 to do without them; {VERIFY}:"
    wanted = [f"3 of the 40 samples looked at can't be used (3 of train); {fix}"]
    wanted += [f"  {file(plan, index)} {why}" for index in (17, 18, 31)]
    for _ in range(5):
        with pytest.raises(DataError) as caught:
            check_samples({"train": plan}, 40, 4)
        assert str(caught.value).splitlines() == wanted


def test_twenty_are_named(plan):
    for index in range(30):
        file(plan, index).unlink()
    with pytest.raises(DataError) as caught:
        check_samples({"train": plan}, 40, 2)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(
        "30 of the 40 samples looked at can't be used (30 of train); set on_error=skip max_errors=30 "
    )
    assert (len(lines), lines[20].split()[0], lines[-1]) == (22, str(file(plan, 19)), "  and 10 more")


def test_empty_ones_are_found_wherever_they_are(photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "copy")
    for name in ("a/003.jpg", "b/004.jpg"):
        (root / "train" / name).write_bytes(b"")
    plan = make_plan(open_source("folder", root))
    with pytest.raises(DataError, match=r"^2 of the 4 samples .*\n.*a/003.jpg is empty .*\n.*b/004.jpg is empty "):
        check_samples({"train": plan}, 2, 2)
    check_samples({"train": plan}, 0, 2)


def test_no_more_than_the_limit_is_looked_at(plan):
    for index in set(range(40)) - {0, 19, 39}:
        file(plan, index).unlink()
    check_samples({"train": plan}, 3, 2)  # the first, the middle, the last
    check_samples({"train": plan}, 1, 2)
    check_samples({"train": plan}, 0, 2)
    with pytest.raises(DataError):
        check_samples({"train": plan}, 4, 2)


def test_both_splits_are_counted(photos, tmp_path):
    """The quota in the message is one that both keep: of a part of the samples a guess that is rather too high."""
    root = shutil.copytree(photos, tmp_path / "copy")
    plans = {split: make_plan(open_source("folder", root, split)) for split in ("train", "val")}
    for index in (1, 2):
        file(plans["train"], index).write_bytes(b"")
    file(plans["val"], 0).write_bytes(b"")
    of = "3 of the 53 samples looked at can't be used (2 of train, 1 of val)"
    with pytest.raises(DataError, match=f"^{re.escape(of)}; set on_error=skip max_errors=2 to do without them; "):
        check_samples(plans, 99, 2)
    with pytest.raises(DataError, match=f"^{re.escape(of)}; set on_error=skip max_errors=2 to do without them; "):
        check_samples(plans, 99, 2, max_errors=1)
    assert check_samples(plans, 99, 2, max_errors=2)[0].startswith(f"on_error=skip: {of}: {file(plans['train'], 1)} ")
    with pytest.raises(DataError, match=r" is empty .* set on_error=skip max_errors=13 to do without it; "):
        check_samples({"val": plans["val"]}, 2, 2)
    assert check_samples({"val": plans["val"]}, 99, 2, max_errors=0.01)[0].endswith(
        f"{file(plans['val'], 0)} is empty (0 bytes)"
    )


def test_where_none_is_left_nothing_is_skipped(plan):
    for index in range(40):
        file(plan, index).write_text("text")
    with pytest.raises(DataError, match=rf"^40 of the 40 .* \(40 of train\); {re.escape(VERIFY)}:\n"):
        check_samples({"train": plan}, 40, 2)


@pytest.fixture
def leaky(photos: Path, tmp_path: Path) -> Path:
    """The photographs, with three of the training split in the validation split, too, and one of the same size."""
    root = shutil.copytree(photos, tmp_path / "leaky")
    for number in ("000", "003", "006"):
        shutil.copy(root / f"train/a/{number}.jpg", root / f"val/b/copy-{number}.jpg")
    other = (root / "train/a/009.jpg").read_bytes()
    (root / "val/b/other.jpg").write_bytes(other[:-3] + bytes([other[-3] ^ 1]) + other[-2:])
    return root


@pytest.mark.parametrize("form", ["folder", "lmdb", "tar", "tar of others"])
def test_images_in_both_splits(photos, leaky, tmp_path, form):
    """Without checksums as many are read as may be, and those first that few others are as large as."""
    name, _, foreign = form.partition(" ")
    root = leaky if name == "folder" else write_as(name, leaky, tmp_path / "packed")
    for index in root.glob("*.index") if foreign else ():
        index.unlink()
    train, val = (open_source(name, root, split) for split in ("train", "val"))
    pair = f"{val.where}/b/copy-000.jpg = {train.where}/a/000.jpg"
    assert copied(train, val, 99, 2) == f"the training split has 3 of 17 validation images, to the byte ({pair})"
    found = copied(train, val, 4, 2)
    assert re.match(r"the training split has [12] of \d+ validation images that were compared, ", found)
    assert copied(train, val, 0, 2) == ""
    assert copied(train, open_source("folder", photos, "val"), 99, 2) == ""


def test_copies_of_what_is_no_image_or_gone(leaky):
    train, val = (open_source("folder", leaky, split) for split in ("train", "val"))
    (leaky / "train/a/000.jpg").unlink()
    assert copied(train, val, 99, 2).startswith("the training split has 2 of 17 ")
    (leaky / "val/b/copy-003.jpg").unlink()
    assert copied(train, val, 99, 2).startswith("the training split has 1 of 17 ")
    for path in ("train/a/006.jpg", "val/b/copy-006.jpg", "val/b/other.jpg"):
        (leaky / path).write_bytes(b"")
    assert copied(*(open_source("folder", leaky, split) for split in ("train", "val")), 99, 2) == ""


def test_copies_in_parts_masks_and_tables(photos, tmp_path):
    paths = ["train/a/000.jpg", "train/b/001.jpg", "train/a/003.jpg", "val/b/001.jpg"]
    rows = [{"image": path, "label": path[-9], "split": ("train", "val")[row > 1]} for row, path in enumerate(paths)]
    root = shutil.copytree(photos, tmp_path / "photos")
    for number in range(3, 40, 3):
        shutil.copy(root / "train/a/000.jpg", root / f"train/a/{number:03}.jpg")
    for name, at, options, found in (
        ("masks", make_masks(tmp_path / "masked"), {}, r"2 of 2 .*val/images/a.png = .*train/images/a.png"),
        ("csv", write_rows(root / "table.csv", rows), {}, r"1 of 2 .*train/a/003.jpg = .*train/a/000.jpg"),
        ("folder", root, {"val": 0.5, "val_split": None}, r"7 of 21 .*/a/\d+.jpg = .*/a/\d+.jpg"),
    ):
        config = sources[name].config(name=name, root=str(at), **options)
        said = copied(open_split(config, "train"), open_split(config, "val"), 99, 2)
        assert re.fullmatch(rf"the training split has {found}\)", said)

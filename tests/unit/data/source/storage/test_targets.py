import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import encode, photo
from plans import Listed, line, make_decoder, open_source
from tfrecord.reader import tfrecord_loader
from webdataset.autodecode import basichandlers

from effloop.convert.verify import verify
from effloop.data.source import Kind, Source
from effloop.data.source.splits import check_same_classes
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter, Comparing, comparing
from effloop.data.source.storage.targets import Targets, row_of
from effloop.data.source.storage.writing import Dataset, Record, writers
from effloop.data.source.view import View
from effloop.errors import DataError

FLAGS, NUMBERS = Targets(Kind.flags, ("cat", "dog")), Targets(Kind.numbers, ("age", "height"))
JPEG = encode(photo(40, 40), "JPEG")
LIKE = 'it should be like {"kind": "flags" or "numbers", "names": ["name of each value", ...]}'


def write(name: str, path: Path, targets: Targets = FLAGS, rows: list[list[float]] | None = None) -> Path:
    rows = rows or [[1, 0], [1, 1], [0, 0]]
    records = [Record(b"%d.jpg" % number, 0, JPEG, row_of(row, targets)) for number, row in enumerate(rows)]
    writers[name](path, Dataset(targets.classes, {"train": Listed(records)}, {}, targets))
    return path


@pytest.mark.parametrize(
    ("targets", "values", "wanted"),
    [
        (FLAGS, [0, 2], "has 2 for 'dog'; allowed are 0 and 1"),
        (FLAGS, [0.5, 1], "has 0.5 for 'cat'; allowed are 0 and 1"),
        (NUMBERS, [0.5, 1e39], "has inf for 'height'; allowed are finite numbers"),
        (NUMBERS, [float("nan"), 10**400], "has nan for 'age'; allowed are finite numbers"),
        (NUMBERS, [1], "has 1 values, not 2 by targets.json or the first sample; correct either of them"),
        (NUMBERS, {"age": 1}, "holds no list of 2 numbers, as targets.json or the first sample says"),
        (FLAGS, ["1", "0"], "holds no list of 2 numbers, as targets.json or the first sample says"),
    ],
)
def test_values_that_no_sample_has(targets, values, wanted):
    with pytest.raises(DataError, match=line(wanted)):
        row_of(values, targets)


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Write a memmap again with another header of its split."""
    file = ColumnFile(path)
    columns = {name: file[f"train/{name}"].copy() for name in ("target", "key", "key_end", "end", "crc32c", "payload")}
    header = file.meta["splits"]["train"]
    edit(header)
    with ColumnWriter(path, {"splits": {"train": header}}) as writer:
        for name, values in columns.items():
            writer.add(f"train/{name}", values)


@pytest.mark.parametrize(
    "said",
    [
        None,
        {"kind": "classes", "names": ["cat", "dog"]},
        {"kind": "flags", "names": []},
        {"kind": "flags", "names": ["dog", "cat"]},  # not the classes
        {"kind": "numbers", "names": ["cat", "dog"]},
    ],
)
def test_damaged_header(said, tmp_path):
    path = write("memmap", tmp_path / "set")
    change(path, lambda header: header.update(targets=said))
    wanted = f"{path}:train is damaged: its header doesn't say what its targets are; convert it again"
    with pytest.raises(DataError, match=line(wanted)):
        open_source("memmap", path)


def test_rows_of_another_length(tmp_path):
    path = write("memmap", tmp_path / "set")
    names = ["a", "b", "c", "d"]
    change(path, lambda header: header.update(targets={"kind": "flags", "names": names}, classes=names))
    with pytest.raises(
        DataError, match=line(f"{path}:train is damaged: its targets are no rows of 4; convert it again")
    ):
        open_source("memmap", path)


def test_verify_names_what_no_sample_may_have(tmp_path):
    path = write("memmap", tmp_path / "set")
    _, _, offset = ColumnFile(path).place("train/target")
    with path.open("r+b") as file:
        file.seek(offset + 3)
        file.write(b"\x07")
    problems: list[str] = []
    with comparing(Comparing.kept):
        source = open_source("memmap", path)
    (report,) = verify({"train": source}, make_decoder(), 1, problems).values()
    assert problems == [
        f"{path} is damaged: its column 'train/target' doesn't match the checksum that it was written with; "
        "convert it again",
        f"{path}:train/1.jpg has 7 for 'dog'; allowed are 0 and 1",
    ]
    assert report.decoded == 3


@pytest.mark.parametrize("text", ["", '{"kind": "flags"}', '{"kind": "other", "names": ["a"]}'])
def test_a_file_that_does_not_say_what_targets_are(text, tmp_path):
    root = write("tar", tmp_path / "set")
    (root / "train.index").unlink()
    (root / "targets.json").write_text(text)
    with pytest.raises(DataError, match=line(f"{root}/targets.json doesn't say what targets are; {LIKE}")):
        open_source("tar", root)


def test_what_targets_are_may_be_said_of_any_files(tmp_path):
    """Of archives that another program wrote; and it is noticed when it changes."""
    with tarfile.open(tmp_path / "train-0.tar", "w") as archive:
        for name, data in (
            ("a.jpg", JPEG),
            ("a.JSON", b"[1, 0]"),
            ("a.cls", b"7"),
            ("b.jpg", JPEG),
            ("b.json", b"[0, 0]"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    (tmp_path / "targets.json").write_text(json.dumps(FLAGS.header()))
    assert open_source("tar", tmp_path).targets.tolist() == [[1, 0], [0, 0]]
    (tmp_path / "targets.json").write_text(json.dumps(NUMBERS.header()))
    found = open_source("tar", tmp_path)
    assert (found.kind, found.target_names, found.targets.tolist()) == (Kind.numbers, NUMBERS.names, [[1, 0], [0, 0]])
    none = r"train-0\.tar: 'a\.cls' holds no list of 2 numbers, as targets\.json or the first sample says$"
    with pytest.raises(DataError, match=none):
        open_source("tar", tmp_path, label="CLS")
    (tmp_path / "targets.json").unlink()
    with pytest.raises(DataError, match=r"the sample 'b' has no label \(looked for \.cls\)"):
        open_source("tar", tmp_path)


def test_a_class_that_no_flag_is_of(tmp_path):
    root = write("tfrecord", tmp_path / "set", Targets(Kind.flags, ("a", "b", "c")), [[0, 1, 1]])
    (root / "train.index").unlink()
    (root / "targets.json").write_text(json.dumps(FLAGS.header()))
    with pytest.raises(DataError, match=r": record 0 \(0\.jpg\) has the label 2; allowed are 0 to 1$"):
        open_source("tfrecord", root)
    (root / "targets.json").write_text(json.dumps(NUMBERS.header()))
    with pytest.raises(DataError, match=r"has integers in 'image/class/label', not floats; set data=tfrecord"):
        open_source("tfrecord", root)


def test_other_programs_read_them(tmp_path):
    rows = [[1.0, 0.25], [-3.0, 1e-9]]
    tar = write("tar", tmp_path / "tar", NUMBERS, rows)
    with tarfile.open(tar / "train-000000.tar") as archive:
        texts = [archive.extractfile(name).read() for name in ("0.json", "1.json")]  # type: ignore[union-attr]
    found = [basichandlers("json", text) for text in texts]
    np.testing.assert_array_equal(np.array(found, np.float32), np.float32(rows))
    records = write("tfrecord", tmp_path / "tfrecord") / "train-00000-of-00001.tfrecord"
    labels = [record["image/class/label"].tolist() for record in tfrecord_loader(str(records), None)]
    assert labels == [[0], [0, 1], []]
    rec = write("recordio", tmp_path / "recordio", NUMBERS, rows)
    assert (rec / "train.lst").read_text() == "0\t1\t0.25\t0.jpg\n1\t-3\t9.99999972e-10\t1.jpg\n"


def test_flags_of_some_of_more_classes(tmp_path):
    source = open_source("memmap", write("memmap", tmp_path / "set"))
    wider = View(source, classes=["dog", "bird", "cat"])
    assert wider.targets.tolist() == [[0, 0, 1], [1, 0, 1], [0, 0, 0]]
    assert wider.target_names == ("dog", "bird", "cat")
    assert wider.fingerprint() != source.fingerprint()


def test_splits_with_other_targets(tmp_path):
    def opened(name: str, targets: Targets) -> Source:
        return open_source("memmap", write("memmap", tmp_path / name, targets))

    flags, numbers = opened("flags", FLAGS), opened("numbers", NUMBERS)
    with pytest.raises(DataError, match=r"has flags, .* has numbers; give both the same$"):
        check_same_classes(flags, numbers)
    with pytest.raises(DataError, match=r"different numbers .*only in val: weight; give both the same numbers$"):
        check_same_classes(numbers, opened("others", Targets(Kind.numbers, ("age", "weight"))))

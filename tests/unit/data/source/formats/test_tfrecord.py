import base64
import gzip
import json
import mmap
import random
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import samples
from images import encode, photo
from nvidia.dali import Pipeline, fn, tfrecord, types
from plans import line, make_decoder, open_source, write_as, write_records
from tfrecord import TFRecordWriter, example_pb2
from tfrecord.reader import tfrecord_loader
from tfrecord.tools.tfrecord2idx import create_index

from effloop.data.source import Source, sources
from effloop.data.source.formats.tfrecord import Example, TFRecordSource, encode_example
from effloop.data.source.splits import find_split
from effloop.data.source.storage.writing import Record
from effloop.errors import DataError

TRAIN: list[tuple[bytes, int, bytes]] = [
    (b"a/1.jpg", 0, b"one"),
    (b"b/\xff\n", 2, b""),
    (b"c" * 200, 1, b"three" * 100),
    (b"b/png", 255, encode(photo(8, 9), "PNG")),
    (b"a/last", 300, bytes(range(256)) * 80),
]
CLASSES = [f"class {label}" for label in range(301)]
DESCRIPTION = {
    "image/encoded": "byte",
    "image/class/label": "int",
    "image/class/text": "byte",
    "image/filename": "byte",
    "image/format": "byte",
}


def write_examples(path: Path, *examples: dict[str, tuple[Any, str]]) -> Path:
    """A file that the `tfrecord` package writes; returns its folder."""
    writer = TFRecordWriter(str(path))
    for example in examples:
        writer.write(example)
    writer.close()
    return path.parent


def image(data: Any = b"data", label: Any = 1, **more: tuple[Any, str]) -> dict[str, tuple[Any, str]]:
    features = {"image/encoded": (data, "byte"), "image/class/label": (label, "int")}
    return {**features, **{name.replace("_", "/"): value for name, value in more.items()}}


def write_raw(path: Path, *records: bytes) -> Path:
    """A file of these records with right checksums; returns its folder."""
    with open(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            checksums = TFRecordWriter.masked_crc(length), TFRecordWriter.masked_crc(record)
            file.write(length + checksums[0] + record + checksums[1])
    return path.parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    records = {"train": TRAIN, "val": TRAIN[:2]}
    return write_records("tfrecord", tmp_path / "set", CLASSES, **records)


def test_what_is_written(path):
    assert sorted(file.name for file in path.iterdir()) == [
        "classes.txt",
        "train-00000-of-00001.tfrecord",
        "train-00000-of-00001.tfrecord.idx",
        "train.index",
        "val-00000-of-00001.tfrecord",
        "val-00000-of-00001.tfrecord.idx",
        "val.index",
    ]
    assert (path / "classes.txt").read_text().splitlines() == CLASSES


@pytest.mark.parametrize(("shard_bytes", "files"), [(1, 40), (5000, 7)])
def test_files_end_with_the_record_that_fills_them(photos, tmp_path, shard_bytes, files):
    root = write_as("tfrecord", photos, tmp_path / "set", shard_bytes)
    shards = sorted(root.glob("train-*.tfrecord"))
    assert [file.name for file in shards] == [f"train-{i:05}-of-{files:05}.tfrecord" for i in range(files)]
    assert all(file.stat().st_size >= shard_bytes for file in shards[:-1])
    source, wanted = open_source("tfrecord", root), open_source("folder", photos)
    assert samples(source) == samples(wanted)
    assert source.fingerprint() == wanted.fingerprint()


@pytest.mark.parametrize("index", ["idx", "foreign"])
def test_dali_reads_it(photos, tmp_path, index):
    root = write_as("tfrecord", photos, tmp_path / "set", 5000)
    files = sorted(root.glob("train-*.tfrecord"))
    for file in files:
        create_index(str(file), f"{file}.foreign")
        assert Path(f"{file}.foreign").read_bytes() == Path(f"{file}.idx").read_bytes()
    pipeline = Pipeline(batch_size=40, num_threads=1, device_id=None)
    with pipeline:
        features = fn.readers.tfrecord(
            path=[str(file) for file in files],
            index_path=[f"{file}.{index}" for file in files],
            features={
                "image/encoded": tfrecord.FixedLenFeature([], tfrecord.string, ""),
                "image/class/label": tfrecord.FixedLenFeature([], tfrecord.int64, -1),
                "image/filename": tfrecord.FixedLenFeature([], tfrecord.string, ""),
            },
        )
        pipeline.set_outputs(*(fn.cast(part, dtype=types.INT64) for part in features.values()))
    data, labels, keys = pipeline.run()
    got = [
        (bytes(keys.at(i).astype(np.uint8)), int(labels.at(i)), bytes(data.at(i).astype(np.uint8))) for i in range(40)
    ]
    assert got == samples(open_source("folder", photos))


def test_the_tfrecord_package_reads_it(path):
    file = path / "train-00000-of-00001.tfrecord"
    got = list(tfrecord_loader(str(file), None, DESCRIPTION))
    assert [
        (bytes(e["image/filename"]), int(e["image/class/label"][0]), bytes(e["image/encoded"])) for e in got
    ] == TRAIN
    assert [bytes(e["image/format"]) for e in got] == [b"", b"", b"", b"PNG", b""]
    assert [bytes(e["image/class/text"]).decode() for e in got] == [CLASSES[label] for _, label, _ in TRAIN]


def test_files_of_the_tfrecord_package(tmp_path):
    write_examples(
        tmp_path / "train-00000-of-00002",
        image(b"x" * 1000, 3, image_filename=(b"n/1.JPEG", "byte"), image_object_bbox=([0.5, 0.25], "float")),
        image(b"", 0, image_filename=(b"n/2.JPEG", "byte"), image_height=([7], "int")),
    )
    write_examples(
        tmp_path / "train-00001-of-00002", image(b"last", (1 << 20) - 1, image_filename=(b"n/3.JPEG", "byte"))
    )
    source = open_source("tfrecord", tmp_path)
    assert samples(source) == [
        (b"n/1.JPEG", 3, b"x" * 1000),
        (b"n/2.JPEG", 0, b""),
        (b"n/3.JPEG", (1 << 20) - 1, b"last"),
    ]
    assert source.has_checksums
    assert len(source.classes) == 1 << 20


def test_a_sample_without_a_name_is_called_by_its_number(tmp_path):
    nameless = image(image_filename=([], "byte")), image(), image(image_filename=(b"", "byte"))
    write_examples(tmp_path / "train.tfrecord", *nameless)
    source = open_source("tfrecord", tmp_path)
    assert [source.key(i) for i in range(3)] == [f"train.tfrecord/{i}" for i in range(3)]


def test_other_features_can_be_chosen(tmp_path):
    other = {"jpg": (b"jpg", "byte"), "cls": (5, "int"), "name": (b"me", "byte")}
    write_examples(tmp_path / "train.tfrecord", image(b"data", 1, **other))
    assert samples(open_source("tfrecord", tmp_path)) == [(b"train.tfrecord/0", 1, b"data")]
    assert samples(open_source("tfrecord", tmp_path, image="jpg", label="cls", key="name")) == [(b"me", 5, b"jpg")]


@pytest.mark.parametrize("name", ["train.tfrecords", "set-train.tfrecord-00000-of-00001", "train/1.tfrecord"])
def test_names_of_files(tmp_path, name):
    (tmp_path / "train").mkdir()
    write_examples(tmp_path / name, image())
    write_examples(tmp_path / "val.tfrecord", image())
    for other in (f"{name}.idx", "train.index.bak", "train-0-of-1"):
        (tmp_path / other).write_bytes(b"not records")
    assert len(open_source("tfrecord", tmp_path)) == 1
    assert TFRecordSource.claims(tmp_path)
    assert samples(open_source("auto", tmp_path)) == samples(open_source("tfrecord", tmp_path))


def test_what_is_not_claimed(photos, tmp_path):
    (tmp_path / "train.tfrecord").write_bytes(b"something else that is long enough")
    assert not any(map(TFRecordSource.claims, (tmp_path, tmp_path / "train.tfrecord", tmp_path / "nothing", photos)))


def test_a_missing_file(tmp_path):
    for number in (0, 2):
        write_examples(tmp_path / f"train-{number:05}-of-00003.tfrecord", image())
    wanted = (
        f"{tmp_path}/train-00001-of-00003.tfrecord is missing, 2 of 3 are there; put it back, or name the files "
        "otherwise if they are meant to be a part"
    )
    with pytest.raises(DataError, match=line(wanted)):
        open_source("tfrecord", tmp_path)


def test_empty_files(tmp_path):
    (tmp_path / "train-00000-of-00002").write_bytes(b"")
    wanted = f"{tmp_path}:train has no samples; set data.train_split or data.val_split to a split that has"
    (tmp_path / "train-00001-of-00002").write_bytes(b"")
    with pytest.raises(DataError, match=line(wanted)):
        open_source("tfrecord", tmp_path)
    write_examples(tmp_path / "train-00001-of-00002", image(b"data", 0))
    assert samples(open_source("tfrecord", tmp_path)) == [(b"train-00001-of-00002/0", 0, b"data")]


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (flip(57 + 3), "record 1 is damaged: its length doesn't match its checksum; copy the file again"),
        (flip(57 + 30), "record 1 is damaged: its data doesn't match its checksum; copy the file again"),
        (flip(-1), "record 1 is damaged: its data doesn't match its checksum; copy the file again"),
        (lambda data: data[:-1], "record 1 is cut: data and checksum have 45 bytes, 44 are left; copy the file again"),
        (lambda data: data[:64], "record 1 is cut: 7 bytes are left; copy the file again"),
    ],
)
def test_damaged_files(tmp_path, damage, wanted):
    file = tmp_path / "train.tfrecord"
    write_raw(file, example({"image/encoded": b"data", "l": 1}), example({"image/encoded": b"data", "l": 1}))
    assert file.stat().st_size == 2 * 57
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=line(f"{file}: {wanted}")):
        open_source("tfrecord", tmp_path, label="l")


def example(features: dict[str, bytes | int]) -> bytes:
    """An Example in protobuf's own bytes, in this order."""
    made = example_pb2.Example()
    for name, value in features.items():
        if isinstance(value, bytes):
            made.features.feature[name].bytes_list.value.append(value)
        else:
            made.features.feature[name].int64_list.value.append(value)
    return bytes(made.SerializeToString(deterministic=True))


ENCODED, LABEL = "image/encoded", "image/class/label"


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        (b"\xff\xd8\xff\xe0 a JPEG", " holds no tf.train.Example: its protobuf can't be parsed; data=tfrecord reads"),
        (b"\x0a\x05abc", " holds no tf.train.Example"),
        (b"", " has no feature 'image/encoded', or an empty one; it has none: set data=tfrecord data.image=NAME"),
        (example({"jpg": b"", "image/filename": b"a\nb"}), r" (a\nb) has no feature 'image/encoded', or an empty one"),
        (example({ENCODED: b"", "cls": 2}), "it has cls, image/encoded: set data=tfrecord data.label=NAME"),
        (example({ENCODED: b"", LABEL: b"dog"}), " has bytes in 'image/class/label', not integers; set data=tfrecord "),
        (example({ENCODED: b"", LABEL: -1, "image/filename": b"k"}), " (k) has the label -1; allowed are 0 to"),
        (image(label=[1, 2]), " has 2 values in 'image/class/label', not one; set data=tfrecord data.label=NAME"),
        ({**image(), LABEL: (1.0, "float")}, " has floats in 'image/class/label', not integers; set data=tfrecord"),
        (image(image_filename=(7, "int")), " has integers in 'image/filename', not bytes; set data=tfrecord data.key="),
    ],
)
def test_records_that_cannot_be_taken(tmp_path, record, wanted):
    file = tmp_path / "train.tfrecord"
    if isinstance(record, bytes):
        write_raw(file, record)
    else:
        write_examples(file, record)
    with pytest.raises(DataError, match=f"^{file}: record 0.*{re.escape(wanted)}"):
        open_source("tfrecord", tmp_path)


def test_the_same_name_twice(tmp_path):
    write_examples(tmp_path / "train.tfrecord", *[image(image_filename=(b"a.jpg", "byte"))] * 2)
    wanted = (
        f"{tmp_path}/train.tfrecord: the key 'a.jpg' comes twice; remove one of the two, or set data=tfrecord "
        "data.key=NAME (of no feature, to number the samples)"
    )
    with pytest.raises(DataError, match=line(wanted)):
        open_source("tfrecord", tmp_path)
    source = open_source("tfrecord", tmp_path, key="none")
    assert [source.key(i) for i in range(2)] == ["train.tfrecord/0", "train.tfrecord/1"]


def test_examples_are_what_protobuf_reads():
    rng = random.Random(5)
    for size in (0, 1, 100, 127, 128, 20_000, 1 << 21):
        record = Record(rng.randbytes(rng.randrange(300)), rng.randrange(301), rng.randbytes(size))
        made = encode_example(record, CLASSES)
        theirs = example_pb2.Example.FromString(made).features.feature
        assert set(theirs) == set(DESCRIPTION)
        assert list(theirs["image/encoded"].bytes_list.value) == [record.data]
        assert list(theirs["image/filename"].bytes_list.value) == [record.key]
        assert list(theirs["image/class/label"].int64_list.value) == [record.label]


def test_an_image_behind_a_feature_that_begins_alike():
    data = bytes(1 << 20) + b"1"
    made = encode_example(Record(bytes(1 << 20), 0, data), CLASSES)
    assert Example(made).span("image/encoded") == (len(made) - len(data), len(made))


def test_an_image_too_large_for_a_protobuf():
    image = mmap.mmap(-1, 1 << 31)  # hardly touched, so it takes no memory
    image.write(encode(photo(4, 4), "JPEG"))
    record = Record(b"k", 0, memoryview(image))
    wanted = (
        "k has 2,147,483,648 bytes; a tf.train.Example takes 2,147,483,647 in all: leave it out, or convert to "
        "another format"
    )
    with pytest.raises(DataError, match=line(wanted)):
        encode_example(record, ["a"])


def test_3000_flips_in_an_example():
    """What is no such message any more is refused; nothing else is raised, and no place is outside."""
    rng, refused = random.Random(3), 0
    whole = encode_example(Record(b"key", 1, b"data" * 8), ["a", "b"])
    for _ in range(3000):
        at = rng.randrange(len(whole))
        record = whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]
        try:
            read = Example(record)
            assert -(1 << 63) <= read.value("image/class/label", "int64_list", "label") < 1 << 63
            start, end = read.span("image/encoded")
            assert 0 <= start <= end <= len(record)
        except DataError:
            refused += 1
    assert 1000 < refused < 2900


def test_a_label_too_large_to_name_all_below_it(tmp_path):
    write_examples(tmp_path / "train.tfrecord", image(label=3), image(label=30_000_000), image(label=4))
    wanted = (
        f"{tmp_path}:train/train.tfrecord/1 has the label 30000000; without {tmp_path}/classes.txt, which names the "
        "classes one a line, 1048575 is the largest: correct the label or write that file"
    )
    with pytest.raises(DataError, match=line(wanted)):
        open_source("tfrecord", tmp_path)


FEATURES: dict[str, dict[str, Any]] = {
    "id": {"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text", "text": {}},
    "picture": {"pythonClassName": "tensorflow_datasets.core.features.image_feature.Image", "image": {}},
    "label": {"pythonClassName": "tensorflow_datasets.core.features.class_label_feature.ClassLabel"},
    "coarse": {"pythonClassName": "tensorflow_datasets.core.features.class_label_feature.ClassLabel"},
}


@pytest.fixture
def tfds(tmp_path: Path) -> Path:
    """A folder as TensorFlow Datasets writes it: 3.0.1 of photos."""
    (tmp_path / "features.json").write_text(json.dumps({"type": "…", "content": json.dumps({"features": FEATURES})}))
    (tmp_path / "label.labels.txt").write_text("cat\ndog\nemu\n")
    (tmp_path / "coarse.labels.txt").write_text("bird\npet\n")
    for split, labels in (("train", (1, 0, 2)), ("test", (2, 1))):
        examples = [
            {
                "picture": (b"%d" % label, "byte"),
                "label": (label, "int"),
                "coarse": (int(label < 2), "int"),
                "id": (name, "byte"),
            }
            for label, name in zip(labels, (b"x", b"y", b"z"), strict=False)
        ]
        write_examples(tmp_path / f"photos-{split}.tfrecord-00000-of-00001", *examples)
    return tmp_path


def test_tensorflow_datasets(tfds):
    """The features are those that `features.json` describes, and classes have their names."""
    source = open_source("auto", tfds)
    assert source.classes == ("cat", "dog", "emu")
    assert samples(source) == [(b"x", 1, b"1"), (b"y", 0, b"0"), (b"z", 2, b"2")]
    assert [source.target_name(index) for index in range(3)] == ["dog", "cat", "emu"]
    val = find_split(sources["tfrecord"].config(name="tfrecord", root=str(tfds)), "val")
    assert (val.classes, samples(val)) == (source.classes, [(b"x", 2, b"2"), (b"y", 1, b"1")])
    chosen = open_source("tfrecord", tfds, label="coarse", key="none")
    assert (chosen.classes, chosen.labels.tolist()) == (("bird", "pet"), [1, 1, 0])
    (tfds / "label.labels.txt").write_text("cat\n\ndo\x85g \nemu\n\n", encoding="utf-8")
    assert open_source("tfrecord", tfds).classes == ("cat", "do\x85g", "emu")
    (tfds / "label.labels.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match="z has the label 2; allowed are 0 to 1"):
        open_source("tfrecord", tfds)


BY_TFDS = tuple(
    zlib.decompress(base64.b85decode(data))
    for data in (
        (
            rb"c-m`bfPl>#C%)urVB`wqV$IA=OivZ^;Bw<~=?w65=jD>(0xID3^l%9R(#$~2#K8n4g~UGk0x51!7sn8enaK$USQr>Y7#LH(wnu_Y^mO%eS?83{#K"
            rb"p(Onv<B6nj^$2#mvRXz$MMa2ev{#Ei)%IFEKY&h?9$*i`77{ATNDpN7JTWsFUpZ8xpy?7`dWhP72}*;PNBJNup3EnHU)*C4fOv1JL3V46~ki&1J;"
            rb"nI7VEKGXy!#Mpi_fdXDq)^h`uJPBetkV9m2n(&U7k5y)|0Gp~LI00?zu(*"
        ),
        (
            rb"c-pm-PfNrw5XJBP6w917qF%)7%7P$!+M7s;?X(-npVCaxrS!YoOm|n8CM$~Ol+1hZev?W1Y%wmVP*T^Te^3R%{i5gUiE>h9MHyM+to)6{a!I=;$j"
            rb"~WEcW@DRp)FjgY`t==k%0;tTc^x^E1PuUl&TC`ubd6NJSTnZy}V8Y{lIYxN&O|N472JmkAP-JTW6PAdcT&2uaU;STw7`PmY0&GNAjX@EsDeN1P>("
            rb"NAH^e&Cp(igP4KEx8toL){}Bn{I~_qb;~{d55KJL+ILoNzE9y8}5ul!uI(uwqn4RA?+`#|cKGWokdu)CANtneS!L-{${4V&g$;<Iyi`Capo(&(oZ"
            rb"ud3"
        ),
    )
)
"""TFRecords and `features.json` by TensorFlow Datasets 4.9.10: PNG (2, 3, 3) of one value, cat or dog, and names."""


def test_what_tensorflow_datasets_wrote(tmp_path):
    for name, data in zip(("zoo-train.tfrecord-00000-of-00001", "features.json"), BY_TFDS, strict=True):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "label.labels.txt").write_text("cat\ndog\n")
    source = open_source("auto", tmp_path)
    found = [(source.classes[source.labels[i]], source.key(i), int(decoded(source, i).max())) for i in range(3)]
    assert sorted(found) == [("cat", "0.png", 0), ("cat", "2.png", 100), ("dog", "1.png", 50)]


def decoded(source: Source, index: int) -> np.ndarray[Any, Any]:
    return make_decoder().decode(source.read(index))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "zoo-train.array_record-00000-of-00001",
            "is an ArrayRecord file, which isn't read; prepare the dataset with ",
        ),
        ("train-00000-of-00001", "is compressed (gzip); write it again without compression"),
        ("train.tfrecord.gz", "is compressed (gzip); write it again without compression"),
    ],
)
def test_refused_by_name(name, message, tmp_path):
    """What `data=auto` knows, and can't read."""
    (tmp_path / name).write_bytes(gzip.compress(b"records"))
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / name} {message}")):
        open_source("tfrecord" if name.endswith("gz") else "auto", tmp_path)


@pytest.mark.parametrize(
    ("features", "wanted"),
    [
        ("[]", "features.json doesn't describe features as TensorFlow Datasets does; remove or correct it"),
        ({"label": FEATURES["label"]}, "features.json has none of the kind Image; set data=tfrecord data.image=NAME"),
        (
            {"image": FEATURES["picture"], "a": FEATURES["label"], "b": FEATURES["label"]},
            "features.json has a, b of the kind ClassLabel; set data=tfrecord data.label=NAME of one feature",
        ),
    ],
)
def test_features_that_are_not_described(tfds, features, wanted):
    text = features if isinstance(features, str) else json.dumps({"featuresDict": {"features": features}})
    (tfds / "features.json").write_text(text)
    with pytest.raises(DataError, match=wanted):
        open_source("tfrecord", tfds)

"""LMDB environments of other programs: read where the images lie, with the pixels and labels of the folder."""

from __future__ import annotations

import base64
import mmap
import os
import pickle
import random
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from PIL import Image
from plans import open_source, read_bytes, write_as
from runs import train

from effloop.cli.main import main
from effloop.data.source import NoSplitError, Source
from effloop.data.source.formats.arrow_values import read_serialized
from effloop.data.source.storage.pickled_arrays import Bytes
from effloop.errors import ConfigError, DataError

Samples = list[tuple[str, bytes, int]]
Write = Callable[[Path, str, Samples], object]


def samples_of(photos: Path, split: str) -> Samples:
    """Path below the split, encoded image and label, in the folder's order."""
    source = open_source("folder", photos, split)
    return [(source.key(i), read_bytes(source, i), int(source.labels[i])) for i in range(len(source))]


def put(path: Path, records: Mapping[bytes, bytes], *, subdir: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(path), subdir=subdir, map_size=1 << 26) as opened, opened.begin(write=True) as transaction:
        for key, value in records.items():
            transaction.put(key, value)
    return path


def folder2lmdb(protocol: int) -> Write:
    """As Efficient-PyTorch's tools/folder2lmdb.py writes a split, with pickle for its pyarrow."""

    def write(root: Path, split: str, samples: Samples) -> None:
        dumps = lambda value: pickle.dumps(value, protocol)  # noqa: E731
        keys = [str(number).encode() for number in range(len(samples))]
        records = {key: dumps((image, label)) for key, (_, image, label) in zip(keys, samples, strict=True)}
        put(root / f"{split}.lmdb", {**records, b"__keys__": dumps(keys), b"__len__": dumps(len(keys))})

    return write


def folder_2_lmdb(root: Path, split: str, samples: Samples) -> None:
    """As pytorch-lmdb's folder_2_lmdb.py writes a split: what a `DataLoader` gives for a batch of one."""
    records = {b"%d" % n: pickle.dumps(([data], np.array([y]))) for n, (_, data, y) in enumerate(samples)}
    put(root / f"{split}.lmdb", {**records, b"__len__": pickle.dumps(len(samples))})


SERIALIZED = zlib.decompress(
    base64.b85decode(
        rb"c-oayJ5B>J5FPIt)(TeSB0^h4DCHIuOT+<a5E9jvxd25ZsFETF-~bdHB1hl=lsNzeM?si3_IR~ei-3vznVC0lW;`3B@8ThQMdX4uAxp<"
        rb"}L<TpA($EQ-!LDV8S<cr_@1ad=+!taiur2{;M898ewoLWp1GdMI@R(?~Gu-O|zZ2ZWlIR0@+K8LZVLKOGiS^7mIH%aw+q(w}HFGDi@|3"
        rb"q6<Yn&1$XRf%xx^>`QaB7%!a?c^+e?hm95c&exQ0Fa?-8TMFfG;reg}_1g;jWAC+{C)>X8^7esNwq6?s`Koyx>)V4_lo_*FmQ33MB#$1"
        rb"^?1+p57ga5A_jyY$@G;j-_>Ww=_-G}}eyZ?gC%^S5%I$=PN2F2l1_Ss!DP`-^|#f727E8X@Lh{M&7Jee=^Edr1F7`h$D{tj$ey"
    )
)
"""`pyarrow.serialize((b"\\xff\\xd8JPEG" * 5, 7)).to_buffer()` of pyarrow 10.0.1."""


def serialized(value: Any) -> bytes:
    """What `pyarrow.serialize` made of (image, label) or a number: the same but for padding, as pyarrow 12 lost it."""
    arrow = pytest.importorskip("pyarrow")

    def union(*children: tuple[int, Any]) -> Any:
        codes, places = (
            arrow.array(each, kind)
            for each, kind in (([c for c, _ in children], arrow.int8()), ([0] * len(children), arrow.int32()))
        )
        known = [0, *(code for code, _ in children)]
        arrays = [arrow.nulls(0), *(child for _, child in children)]
        return arrow.UnionArray.from_dense(codes, places, arrays, [str(code) for code in known], known)

    if isinstance(value, int):
        column = union((2, arrow.array([value], arrow.int64())))
    else:
        image, label = value
        items = union((4, arrow.array([image], arrow.binary())), (2, arrow.array([label], arrow.int64())))
        column = union((12, arrow.ListArray.from_arrays(arrow.array([0, 2], arrow.int32()), items)))
    stream = arrow.BufferOutputStream()
    batch = arrow.record_batch([column], names=["list"])
    with arrow.ipc.new_stream(stream, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(16) + bytes(stream.getvalue())


def by_pyarrow(root: Path, split: str, samples: Samples) -> None:
    """As folder2lmdb.py writes a split with pyarrow up to 11."""
    records = {b"%d" % n: serialized((data, label)) for n, (_, data, label) in enumerate(samples)}
    put(root / f"{split}.lmdb", {**records, b"__len__": serialized(len(samples))})


def _datum_class() -> Any:
    """Caffe's message (caffe/src/caffe/proto/caffe.proto), by protobuf itself."""
    file = descriptor_pb2.FileDescriptorProto(name="caffe.proto", package="caffe", syntax="proto2")
    message = file.message_type.add(name="Datum")
    of = descriptor_pb2.FieldDescriptorProto
    kinds = {"channels": of.TYPE_INT32, "height": of.TYPE_INT32, "width": of.TYPE_INT32, "data": of.TYPE_BYTES}
    kinds |= {"label": of.TYPE_INT32, "float_data": of.TYPE_FLOAT, "encoded": of.TYPE_BOOL}
    for number, (name, kind) in enumerate(kinds.items(), 1):
        label = of.LABEL_REPEATED if name == "float_data" else of.LABEL_OPTIONAL
        message.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("caffe.Datum"))


Datum = _datum_class()


def datum(data: bytes, label: int, shape: tuple[int, int, int] | None = None) -> bytes:
    """As convert_imageset writes an image; with a shape its data is raw pixels."""
    if shape is None:
        return bytes(Datum(data=data, label=label, encoded=True).SerializeToString())
    channels, height, width = shape
    found = Datum(channels=channels, height=height, width=width, data=data, label=label)
    return bytes(found.SerializeToString())


def caffe(root: Path, split: str, samples: Samples) -> None:
    """As convert_imageset -encoded writes it."""
    records = {b"%08d_%s" % (n, name.encode()): datum(data, y) for n, (name, data, y) in enumerate(samples)}
    put(root / f"photos_{split}_lmdb", records, subdir=True)


def caffe_raw(root: Path, split: str, samples: Samples) -> None:
    """As convert_imageset writes it: planes of B, G and R."""
    records = {}
    for number, (name, data, label) in enumerate(samples):
        pixels = pixels_of(data)
        raw = np.ascontiguousarray(pixels[:, :, ::-1].transpose(2, 0, 1)).tobytes()
        records[b"%08d_%s" % (number, name.encode())] = datum(raw, label, (3, *pixels.shape[:2]))
    put(root / split, records, subdir=True)


def dicts(root: Path, split: str, samples: Samples) -> None:
    """Dicts, and the count as text under another key."""
    records = {b"%05d" % n: pickle.dumps({"label": y, "image": data}) for n, (_, data, y) in enumerate(samples)}
    put(root / f"{split}.lmdb", {**records, b"length": b"%d" % len(samples), b"__len__": b"%d" % len(samples)})


def bare_dicts(root: Path, split: str, samples: Samples) -> None:
    """Dicts by protocol 1, which begin with a brace, and nothing else."""
    records = {b"%05d" % n: pickle.dumps({"img": x, "y": y}, 1) for n, (_, x, y) in enumerate(samples)}
    put(root / f"{split}.lmdb", records)


def planes(root: Path, split: str, samples: Samples) -> None:
    """Pixels with their channels first."""
    of = [np.ascontiguousarray(pixels_of(data).transpose(2, 0, 1)) for _, data, _ in samples]
    put(root / f"{split}.lmdb", {b"%05d" % n: pickle.dumps((of[n], y)) for n, (_, _, y) in enumerate(samples)})


def pickled_pixels(root: Path, split: str, samples: Samples) -> None:
    records = {b"%05d" % n: pickle.dumps((pixels_of(data), np.int64(y))) for n, (_, data, y) in enumerate(samples)}
    put(root / f"{split}.lmdb", records)


def named(root: Path, split: str, samples: Samples) -> None:
    """Images alone, by their path."""
    put(root / split, {name.encode(): data for name, data, _ in samples}, subdir=True)


WRITERS: dict[str, Write] = {
    **{f"folder2lmdb, protocol {n}": folder2lmdb(n) for n in range(6)},
    "folder_2_lmdb": folder_2_lmdb,
    "folder2lmdb, pyarrow": by_pyarrow,
    "caffe": caffe,
    "names": named,
    "dicts": dicts,
    "bare dicts, protocol 1": bare_dicts,
}
PIXELS: dict[str, Write] = {"caffe, raw": caffe_raw, "pickled pixels": pickled_pixels, "planes": planes}


def pixels_of(data: bytes) -> np.ndarray[Any, Any]:
    import io

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("name", [*WRITERS, *PIXELS])
def test_the_images_and_labels_of_the_folder(name: str, photos: Path, tmp_path: Path) -> None:
    write = {**WRITERS, **PIXELS}[name]
    for split in ("train", "val"):
        samples = samples_of(photos, split)
        write(tmp_path, split, samples)
        source = open_source("auto", tmp_path, split)
        assert source.labels.tolist() == [label for _, _, label in samples]
        found = [read_bytes(source, index) for index in range(len(source))]
        if name in PIXELS:
            for made, (_, data, _) in zip(found, samples, strict=True):
                np.testing.assert_array_equal(pixels_of(made), pixels_of(data))
        else:
            assert found == [data for _, data, _ in samples]
        assert [bytes(image) for image in source.read_run(np.arange(len(source))[::-1])] == found[::-1]
        source.will_need(range(len(source)))
        source.verify_index()
        again = pickle.loads(pickle.dumps(source))
        assert read_bytes(again, 3) == found[3]


def test_images_are_read_in_place(photos: Path, tmp_path: Path) -> None:
    folder2lmdb(4)(tmp_path, "train", samples_of(photos, "train"))
    assert isinstance(open_source("lmdb", tmp_path).read(0), memoryview)


def test_what_pyarrow_10_wrote(tmp_path: Path) -> None:
    put(tmp_path / "train.lmdb", {b"0": SERIALIZED})
    source = open_source("lmdb", tmp_path)
    assert (read_bytes(source, 0), source.labels.tolist()) == (b"\xff\xd8JPEG" * 5, [7])


def test_500_mutations_of_what_pyarrow_wrote(tmp_path: Path) -> None:
    """Refused with a line, or read within the value."""
    rng, refused = random.Random(5), list[str]()
    for _ in range(500):
        value = bytearray(SERIALIZED)
        for _ in range(rng.randrange(1, 4)):
            value[rng.randrange(16, len(value))] = rng.randrange(256)
        if rng.random() < 0.3:
            del value[rng.randrange(len(value)) :]
        data = mmap.mmap(-1, max(1, len(value)))  # not closed: what is read may still refer to it
        data.write(bytes(value))
        try:
            found = read_serialized(data, 0, len(value))
        except DataError as error:
            refused.append(str(error))
        else:
            image = found[0] if isinstance(found, list) and found else None
            assert not isinstance(image, Bytes) or 0 <= image.offset <= image.offset + image.size <= len(value)
    assert len(refused) > 100
    assert not [line for line in refused if "\n" in line]


def test_trained_and_converted_as_the_folder(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same losses and scores to the bit, and the same files when converted to a folder."""
    for split in ("train", "val"):
        folder2lmdb(5)(here / "others", split, samples_of(photos, split))
    assert train(photos, "run=a", "epochs=1") == 0
    assert train(here / "others", "run=b", "epochs=1") == 0
    metrics = [(here / "outputs" / run / "metrics.jsonl").read_text() for run in "ab"]
    assert metrics[0] == metrics[1] != ""
    assert main(["convert", "data.root=others", "to=memmap", "out=packed"]) == 0
    assert main(["verify", "data.root=packed"]) == 0
    capsys.readouterr()
    packed, source = open_source("memmap", here / "packed"), open_source("folder", photos)
    assert [read_bytes(packed, i) for i in range(len(packed))] == [read_bytes(source, i) for i in range(len(source))]


def test_a_single_environment(photos: Path, here: Path) -> None:
    """A file or a folder that has no splits is divided."""
    samples = samples_of(photos, "train")
    folder2lmdb(4)(here, "all", samples)
    caffe(here / "set", "train", samples)
    for root in (here / "all.lmdb", here / "set/photos_train_lmdb"):
        assert main(["show", f"data.root={root}", "data.val=0.2", "batch_size=8", "out=shown.png"]) == 0
        assert len(open_source("lmdb", root, ".")) == len(samples)
        with pytest.raises(DataError, match="has no files of the split 'train'; it "):
            open_source("lmdb", root)


LABELS: dict[str, Callable[[Samples], str]] = {
    "labels.csv": lambda samples: "file_name,label\n" + "".join(f"{n},{'xyz'[y]}\n" for n, _, y in samples),
    "labels.tsv": lambda samples: "".join(f"{name}\t{label}\n" for name, _, label in samples),
    "val.txt": lambda samples: "".join(f"{name} {label}\n" for name, _, label in reversed(samples)),
    "other.csv": lambda samples: "class,id\n" + "".join(f"{'xyz'[y]},{n[:-4]}\n" for n, _, y in samples),
}


@pytest.mark.parametrize("name", LABELS)
def test_a_file_of_labels(name: str, photos: Path, tmp_path: Path) -> None:
    samples = [(each.replace("/", "_"), data, label) for each, data, label in samples_of(photos, "train")]
    named(tmp_path, "train", samples)
    labels = tmp_path / name
    labels.write_text(LABELS[name](samples))
    source = open_source("lmdb", tmp_path, labels=str(labels))
    expected = {each: label for each, _, label in samples}
    assert source.classes == (("x", "y", "z") if labels.suffix == ".csv" else ("0", "1", "2"))
    assert {source.key(i): int(source.labels[i]) for i in range(len(source))} == expected
    labels.write_text(LABELS[name](samples[1:]))
    with pytest.raises(DataError, match=f"{name} has no label for '{samples[0][0]}'; add a row"):
        open_source("lmdb", tmp_path, labels=str(labels))


def test_names_of_classes(photos: Path, tmp_path: Path) -> None:
    """`data.classes` names numbers, and orders texts, folders and what a file of labels says; it has to name all."""
    samples = samples_of(photos, "train")
    (tmp_path / "labels.csv").write_text("name,label\n" + "".join(f"{n},{'xyz'[y]}\n" for n, _, y in samples))
    for name, value in (("numbers", lambda y: y), ("texts", lambda y: "xyz"[y])):
        put(
            tmp_path / name / "train.lmdb",
            {b"%d" % n: pickle.dumps((data, value(y))) for n, (_, data, y) in enumerate(samples)},
        )
    named(tmp_path / "folders", "train", samples)
    order = {"numbers": "xyz", "texts": "zyx", "folders": "cba", "labels": "yxz"}
    for name, names in order.items():
        root = tmp_path / ("folders" if name == "labels" else name)
        labels = {"labels": str(tmp_path / "labels.csv")} if name == "labels" else {}
        source = open_source("lmdb", root, classes=[*names], **labels)
        assert source.classes == tuple(names)
        of = "abc" if name == "folders" else "xyz"
        found = {read_bytes(source, i): source.classes[int(source.labels[i])] for i in range(len(source))}
        assert found == {data: of[y] for _, data, y in samples}
        with pytest.raises((DataError, ConfigError)) as error:
            open_source("lmdb", root, classes=[*names[:2]], **labels)
        assert "\n" not in str(error.value)
        assert name == "numbers" or "which data.classes doesn't name; add it" in str(error.value)


def test_a_column_where_a_file_is_meant(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`data.label` is a column, `data.labels` a file: each refusal names the other."""
    named(here / "set", "train", samples_of(photos, "train"))
    for choice in ((), ("data=lmdb",)):
        assert main(["show", *choice, "data.root=set", "data.label=labels.csv"]) == 2
        assert "set data.labels=FILE" in capsys.readouterr().err
    for root, choice in ((photos, ()), (photos, ("data=tar",))):
        assert main(["show", *choice, f"data.root={root}", "data.labels=label"]) == 2
        err = capsys.readouterr().err
        assert ("set data.label=NAME" in err) == bool(choice)
        assert "data.labels" in err
    assert main(["show", "data.root=set", "data.labels=label", "data.val=0.2"]) == 2
    assert "a column, of other formats, is data.label" in capsys.readouterr().err


JPEG = b"\xff\xd8\xff\xe0 a JPEG"
REFUSED: dict[str, tuple[dict[bytes, Any], str]] = {
    "other count": ({b"0": (b"x", 1), b"__len__": 2}, "says 2 samples in __len__, it holds 1; write it again"),
    "code": ({b"0": os.system}, "the value of '0' holds posix.system, which is never run"),
    "code behind": (
        {b"0": (b"x", 1), b"1": (b"x", os.system)},
        "the value of '1' holds posix.system, which is never run",
    ),
    "code as length": ({b"0": (b"x", 1), b"__len__": os.system}, "the value of '__len__' holds posix.system"),
    "a dict": ({b"0": {"photo": b"x", "label": 1}}, "holds 2 values, not (image, label)"),
    "a text as label": (
        {b"0": (b"x", "cat")},
        "has the label 'cat'; allowed are whole numbers from 0, or set data=lmdb data.labels=FILE",
    ),
    "a number": ({b"0": (b"x", 1.5)}, "has the label 1.5; allowed are whole numbers"),
    "another array": (
        {b"0": (np.zeros((5, 4, 2), np.uint8), 1)},
        "holds an array of uint8 and shape (5, 4, 2); allowed",
    ),
    "floats": ({b"0": (np.zeros((3, 4)), 1)}, "holds an array of float64 and shape (3, 4); allowed are uint8 pixels"),
    "mixed": ({b"0": (b"x", 1), b"1": (np.zeros((3, 4), np.uint8), 1)}, "'1' isn't stored as the first one is"),
    "no labels": ({b"a": JPEG}, "holds images without labels: set data=lmdb data.labels=FILE"),
    "nothing": ({}, "has no samples in its main database, which alone is read (no named one)"),
    "floats of Caffe": ({b"a": Datum(float_data=[0.5, 1]).SerializeToString()}, "is a Datum of floats (float_data)"),
    "another size of Caffe": ({b"a": datum(b"12345", 1, (1, 2, 2))}, "is a Datum of 5 bytes for 1 x 2 x 2"),
    "something else": ({b"a": b"\x01\x02 what"}, "is no image, no pickle of (image, label) and no Datum"),
    "lz4": (
        {b"0": b"\x04\x22\x4d\x18" + b"x" * 9},
        "the value of '0' is written by lz4, which isn't read; write images",
    ),
    "zlib": ({b"0": zlib.compress(b"x" * 99)}, "is written by zlib, which isn't read"),
    "msgpack": ({b"0": b"\x92\xc4\x03abc\x01"}, "is written by msgpack, which isn't read"),
    "no image": ({b"a": b"\x08\x01"}, "is a Datum without data, or none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    records, wanted = REFUSED[name]
    put(
        tmp_path / "train.lmdb",
        {key: value if isinstance(value, bytes) else pickle.dumps(value) for key, value in records.items()},
    )
    with pytest.raises(DataError, match=re.escape(wanted)) as error:
        open_source("lmdb", tmp_path)
    assert str(tmp_path / "train.lmdb") in str(error.value)
    assert "\n" not in str(error.value)


def test_labels_that_are_not_there(tmp_path: Path) -> None:
    put(tmp_path / "train.lmdb", {b"a": JPEG})
    with pytest.raises(ConfigError, match=r"data\.labels: .* is not there; set data.labels=FILE"):
        open_source("lmdb", tmp_path, labels=str(tmp_path / "none.csv"))


def test_two_environments_of_a_split(tmp_path: Path) -> None:
    for name in ("a_train.lmdb", "b_train.lmdb"):
        put(tmp_path / name, {b"0": pickle.dumps((JPEG, 0))})
    with pytest.raises(DataError, match="may both be of the split 'train'; rename one of them"):
        open_source("lmdb", tmp_path)


def test_an_environment_of_two_splits(tmp_path: Path) -> None:
    """Isn't trained on and validated with."""
    put(tmp_path / "photos_train_val.lmdb", {b"0": pickle.dumps((JPEG, 0))})
    for split in ("train", "val"):
        with pytest.raises(NoSplitError, match=f"has no files of the split '{split}'; it has photos_train_val"):
            open_source("lmdb", tmp_path, split)
    assert len(open_source("lmdb", tmp_path, "train_val")) == 1


@pytest.fixture
def damaged(photos: Path, tmp_path: Path) -> tuple[Path, Source]:
    """Opened, with values that a pickle makes images of, and then overwritten."""
    folder2lmdb(2)(tmp_path, "train", samples_of(photos, "train"))
    source = open_source("lmdb", tmp_path)
    return tmp_path / "train.lmdb", source


def test_damage_after_opening(damaged: tuple[Path, Source]) -> None:
    """What is made of a value is made within its bounds, whatever it has become."""
    path, source = damaged
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(bytes(len(whole) - 8192))
    for index in range(len(source)):
        with pytest.raises(DataError):
            source.read(index)


def test_labels_of_its_own(photos: Path, tmp_path: Path) -> None:
    root = write_as("lmdb", photos, tmp_path / "set.lmdb")
    (tmp_path / "labels.csv").write_text("name,label\nx,1\n")
    with pytest.raises(ConfigError, match=r"^data\.labels: .* has labels of its own; leave it out$"):
        open_source("lmdb", root, labels=str(tmp_path / "labels.csv"))

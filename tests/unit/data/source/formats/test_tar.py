import gzip
import io
import mmap
import random
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
import webdataset
from archives import Members, edited, make, pairs, with_checksum
from images import encode, photo
from nvidia.dali import Pipeline, fn
from plans import line, open_source, read_bytes, write_as, write_records

from effloop.data.source import Source
from effloop.data.source.formats.tar import END, TarSource, members, tar_header
from effloop.errors import DataError

JPEG = encode(photo(8, 9), "JPEG")
PNG = encode(photo(8, 9), "PNG")
LONG = "long-" + "x" * 90 + "/" + "y" * 90  # 186 bytes
TRAIN: list[tuple[bytes, int, bytes]] = [
    (b"a/1.jpg", 0, JPEG + b"first"),
    (LONG.encode() + b".jpg", 2, JPEG + b"long" * 300),
    (b"b/\xff\n.jpg", 1, JPEG),
    (b"b/last.JPEG", 12, JPEG + bytes(513)),
]
CLASSES = [str(label) for label in range(13)]


def contents(source: Source) -> list[tuple[str, int, bytes]]:
    return [(source.key(i), int(label), read_bytes(source, i)) for i, label in enumerate(source.labels)]


def refusal(root: Path, **options: object) -> str:
    """The one line that opening fails with."""
    with pytest.raises(DataError) as caught:
        open_source("tar", root, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write_records("tar", tmp_path / "set", CLASSES, train=TRAIN, val=TRAIN[:1])


def test_the_same_without_the_index(written):
    (written / "train.index").unlink()
    source = open_source("tar", written)
    keys = ["a/1.jpg", f"{LONG}.jpg", "000000002.jpg", "b/last.JPEG"]
    assert contents(source) == [(name, label, data) for name, (_, label, data) in zip(keys, TRAIN, strict=True)]
    assert source.classes == tuple(CLASSES)


def test_headers_are_plain_ustar(written):
    with tarfile.open(written / "train-000000.tar") as archive:
        for info in archive:
            fields = (info.type, info.mode, info.uid, info.gid, info.mtime, info.uname, info.gname, info.pax_headers)
            assert fields == (b"0", 0o644, 0, 0, 0, "", "", {})
    assert (written / "train-000000.tar").stat().st_size == info.offset_data + 512 + 1024


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (b"a/b.jpg", "a/b.jpg"),
        (b"a.b/c.JPEG", "a.b/c.JPEG"),
        ("é/ü.jpg".encode(), "é/ü.jpg"),
        (b"a/b.png", "a/b.jpg"),  # by content
        (b"a/b.txt", "000000001.jpg"),
        (b"a/b.c.jpg", "000000001.jpg"),
        (b".jpg", "000000001.jpg"),
        (b"a/../b.jpg", "000000001.jpg"),
        (b"./b.jpg", "000000001.jpg"),
        (b"/a/b.jpg", "000000001.jpg"),
        (b"__a__/b.jpg", "000000001.jpg"),
        (b"a b/c.jpg", "000000001.jpg"),
        (b"a/\xff.jpg", "000000001.jpg"),
        (b"a/\n.jpg", "000000001.jpg"),
        (b"000000002.jpg", "000000001.jpg"),
        (b"x" * 97 + b".jpg", "000000001.jpg"),
        (b"x/" * 130 + b"y.jpg", "000000001.jpg"),
        (b"first.png", "000000001.jpg"),  # has the stem of first.jpg
    ],
)
def test_names_that_every_reader_cuts_alike(tmp_path, key, name):
    records = [(b"first.jpg", 0, JPEG), (key, 0, JPEG), (b"last.jpg", 0, JPEG)]
    write_records("tar", tmp_path / "set", ["a"], train=records)
    with tarfile.open(tmp_path / "set" / "train-000000.tar") as archive:
        names = archive.getnames()
    stem = name.rpartition(".")[0]
    assert names == ["first.jpg", "first.cls", name, f"{stem}.cls", "last.jpg", "last.cls"]
    assert list(map(open_source("tar", tmp_path / "set").raw_key, range(3))) == [key for key, _, _ in records]
    (tmp_path / "set" / "train.index").unlink()
    assert open_source("tar", tmp_path / "set").key(1) == name


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (PNG, "000000000.png"),
        (encode(photo(8, 9), "WEBP"), "000000000.webp"),
        (encode(photo(8, 9), "BMP"), "000000000.bmp"),
        (b"P6\n1 1\n255\nabc", "000000000.ppm"),
        (b"P5\n1 1\n255\na", "000000000.pgm"),
        (b"nothing of the kind", "000000000.jpg"),
    ],
)
def test_extensions_by_content(tmp_path, data, name):
    write_records("tar", tmp_path / "set", ["a"], train=[(b"\xff", 0, data)])
    (tmp_path / "set" / "train.index").unlink()
    assert contents(open_source("tar", tmp_path / "set")) == [(name, 0, data)]


def test_sample_that_no_header_can_hold(tmp_path):
    with open(tmp_path / "sparse", "wb+") as file:
        file.truncate(1 << 33)
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    with pytest.raises(DataError, match=line("'k.jpg' has 8,589,934,592 bytes; a tar holds members below 8 GiB")):
        write_records("tar", tmp_path / "set", ["a"], train=[(b"k.jpg", 0, data)])


# Others read ours.


@pytest.mark.filterwarnings("ignore")  # it leaves closing its file to the collector
def test_webdataset_reads_ours(written):
    dataset = webdataset.WebDataset(
        str(written / "train-000000.tar"), shardshuffle=False, empty_check=False, nodesplitter=None
    ).to_tuple("jpg;jpeg", "cls")
    assert [(data, int(label)) for data, label in dataset] == [(data, label) for _, label, data in TRAIN]


@pytest.mark.parametrize("with_index", [False, True])
def test_dali_reads_ours(photos, tmp_path, with_index):
    path = write_as("tar", photos, tmp_path / "set", 20_000)
    write_records("tar", tmp_path / "more", CLASSES, train=TRAIN)
    shards = [*sorted(path.glob("train-*.tar")), tmp_path / "more" / "train-000000.tar"]
    indexes = []
    if with_index:
        from wds2idx import IndexCreator

        for shard in shards:
            indexes.append(str(shard.with_suffix(".idx")))
            with IndexCreator(str(shard), indexes[-1], verbose=False) as creator:
                creator.create_index()
    source = open_source("folder", photos)
    wanted = [(data, label) for _, label, data in [*contents(source), *TRAIN]]
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None)
    with pipeline:
        ends = ["jpg;jpeg;JPEG", "cls"]
        pipeline.set_outputs(
            *fn.readers.webdataset(
                paths=[str(shard) for shard in shards],
                index_paths=indexes,
                ext=ends,
                missing_component_behavior="error",
            )
        )
    pipeline.build()
    got = []
    for _ in wanted:
        data, label = (output.at(0) for output in pipeline.run())
        got.append((data.tobytes(), int(label.tobytes())))
    assert got == wanted


# Ours reads others'.


def test_shard_writer_of_webdataset(tmp_path):
    (tmp_path / "train").mkdir()
    with webdataset.ShardWriter(str(tmp_path / "train" / "%03d.tar"), maxcount=3, verbose=0) as writer:
        for i in range(8):
            writer.write({"__key__": f"dir/{i:03}", "jpg": JPEG + b"%d" % i, "cls": i % 3, "json": {"no": i}})
    source = open_source("tar", tmp_path)
    assert contents(source) == [(f"dir/{i:03}.jpg", i % 3, JPEG + b"%d" % i) for i in range(8)]
    assert source.classes == ("0", "1", "2")


def in_json(root: Path, **splits: list[object]) -> Path:
    """Shards of each split as webdataset writes them, with these values as JSON, and another class in `cls`."""
    for split, values in splits.items():
        root.mkdir(exist_ok=True)
        with webdataset.ShardWriter(str(root / f"{split}-%06d.tar"), maxcount=3, verbose=0) as writer:
            for i, value in enumerate(values):
                writer.write({"__key__": f"{i:03}", "jpg": JPEG, "cls": 7, "json": value})
    return root


@pytest.mark.parametrize(
    ("train", "val", "classes", "targets"),
    [
        (["b", "a", "b", "c"], ["a", "d"], "a b c d", [1, 0, 1, 2]),
        ([3, 0, 3, 1], [4], "0 1 2 3 4", [3, 0, 3, 1]),
        ([["b"], [], ["b", "a"], ["a"]], [["c"]], "a b c", [[0, 1, 0], [0] * 3, [1, 1, 0], [1, 0, 0]]),
        ([[1], [], [2, 0], [0, 2]], [[3]], "0 1 2 3", [[0, 1, 0, 0], [0] * 4, [1, 0, 1, 0], [1, 0, 1, 0]]),
        ([0.5, 1, 2, 3], [4, 5], "", [[0.5], [1], [2], [3]]),
    ],
)
def test_labels_in_json(tmp_path, train, val, classes, targets):
    """At a key, also below another one; classes are counted over both splits; what is kept is that of both."""
    root = in_json(tmp_path / "set", train=[{"meta": {"y": y}} for y in train], val=[{"meta": {"y": y}} for y in val])
    source = open_source("tar", root, label="json.meta.y")
    assert source.classes == tuple(classes.split())
    assert source.targets.tolist() == targets
    assert open_source("tar", root, "val", label="json.meta.y").classes == source.classes
    assert set(open_source("tar", root).labels.tolist()) == {7}
    if train[0] == "b":
        in_json(root, val=[{"meta": {"y": y}} for y in "az"])
        assert open_source("tar", root, label="json.meta.y").classes == ("a", "b", "c", "z")
        (root / "classes.txt").write_text("z\nc\nb\na\n")
        assert open_source("tar", root, label="json.meta.y").targets.tolist() == [2, 3, 2, 1]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (
            [{"y": 0}, {"x": 0}],
            "/train-000000.tar: '001.json' has no text, number or list at 'y', or another of these ",
        ),
        ([{"y": 0}, {"y": None}], "/train-000000.tar: '001.json' has no text, number or list at 'y'"),
        ([{"y": 0}, {"y": {}}], "'001.json' has no text, number or list at 'y'"),
        ([{"y": 0}, [{"y": 0}]], "'001.json' has no text, number or list at 'y'"),
        ([{"y": 0}, {"y": 0}, {"y": 0}, {"y": "a"}], "/set:train: y and the labels of other splits have different"),
        ([{"y": 0}, {"y": "a"}], "'001.json' has no text, number or list at 'y', or another of these than the first"),
        ([{"y": [0, "a"]}], "/set:train: y has lists with other than texts alone or whole numbers alone"),
        ([{"y": [{"z": 0}]}], "y has lists with other than texts alone or whole numbers alone"),
        ([{"y": [0, 1, 1]}], "y has lists of numbers without names; name the classes in a targets.json"),
        ([{"y": -1}], "y has the label -1; allowed are 0 to "),
        ([{"y": 1 << 40}], "y has the label 1,099,511,627,776; 1,048,575 is the largest of a class"),
    ],
)
def test_refused_labels_in_json(tmp_path, values, wanted):
    assert wanted in refusal(in_json(tmp_path / "set", train=values), label="json.y")


def test_a_sample_without_its_json(tmp_path):
    make(tmp_path / "train.tar", [("a.jpg", JPEG), ("a.json", b'{"y": 0}'), *pairs("b")])
    assert "train.tar: the sample 'b' has no label (looked for .json); its" in refusal(tmp_path, label="json.y")
    make(tmp_path / "train.tar", [("a.jpg", JPEG), ("a.json", b'{"y"')])
    assert "train.tar: 'a.json' has no text, number or list at 'y'" in refusal(tmp_path, label="json.y")
    assert f"; {TOGETHER.replace(',', ' or json.KEY,').format('label')}" in refusal(tmp_path)


@pytest.mark.parametrize("fmt", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_formats_of_tarfile(tmp_path, fmt):
    names = ["short", LONG, "é/" + "ü" * 40]
    if fmt != tarfile.USTAR_FORMAT:
        names += ["x/" * 150 + "y" * 300, "é" * 120]
    make(tmp_path / "train.tar", [("folder/notes.md", b"a"), ("folder/none", b"a"), *pairs(*names)][1:], fmt)
    assert [key for key, *_ in contents(open_source("tar", tmp_path))] == [f"{name}.jpg" for name in names]


def test_folders_and_odd_members_are_passed_over(tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for name, data in [
            ("dir", None),
            *pairs("dir/a"),
            ("dir/README", b"-"),
            ("dir/._b.jpg", b"-"),
            *pairs("dir/b"),
        ]:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            info.size = len(data or b"")
            archive.addfile(info, io.BytesIO(data or b""))
    make(tmp_path / "meta.tar", [("__meta__/x.json", b"{}"), ("__note__", b"-")])
    meta, end = (tmp_path / "meta.tar").read_bytes(), bytes(1024)
    data = (tmp_path / "train.tar").read_bytes()
    (tmp_path / "train.tar").write_bytes(meta[: 4 * 512] + data + end)
    assert [source_key for source_key, *_ in contents(open_source("tar", tmp_path))] == ["dir/a.jpg", "dir/b.jpg"]


def test_choice_of_image_and_label(tmp_path):
    first: Members = [("a.JPG", JPEG), ("a.seg.png", PNG), ("a.cls", b"1"), ("a.fine.cls", b" 5\n")]
    make(tmp_path / "train.tar", first)
    assert contents(open_source("tar", tmp_path, image="jpg")) == [("a.JPG", 1, JPEG)]
    assert contents(open_source("tar", tmp_path, image="seg.png", label="fine.cls")) == [("a.seg.png", 5, PNG)]
    assert refusal(tmp_path) == (
        f"{tmp_path}/train.tar: 'a.JPG' and 'a.seg.png' are of one sample; say which is the image: "
        "set data=tar data.image=EXTENSION"
    )


def test_claims(photos, written, tmp_path):
    make(tmp_path / "foreign" / "train" / "0.tar", pairs("a"))
    imagenet = tmp_path / "imagenet"
    (imagenet / "train" / "n01440764").mkdir(parents=True)
    (imagenet / "train.tar").touch()
    (imagenet / "train" / "n01440764.tar").touch()
    (tmp_path / "flat").mkdir()
    claimed = {path.name for path in (photos, *tmp_path.iterdir(), imagenet / "train.tar") if TarSource.claims(path)}
    assert claimed == {"set", "foreign"}
    assert contents(open_source("auto", written)) == contents(open_source("tar", written))


# What tarfile writes, and what nobody should.


def walk(path: Path) -> list[tuple[str, bytes]]:
    """Names and contents of all members."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return [(name.decode(errors="replace"), data[at : at + size]) for name, at, size in members(data, str(path))]


def walk_refused(path: Path) -> str:
    """The line that walking fails with, without the path."""
    with pytest.raises(DataError) as caught:
        walk(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(path))


def padded(*parts: bytes) -> bytes:
    return b"".join(part + bytes(-len(part) % 512) for part in parts)


def test_header_is_what_tarfile_writes():
    rng = random.Random(0)
    for _ in range(300):
        name = "/".join("x" * rng.randint(1, 90) for _ in range(rng.randint(1, 3)))
        info = tarfile.TarInfo(name)
        info.size = rng.randrange(1 << 33)
        with suppress(ValueError):  # too long
            theirs, ours = info.tobuf(tarfile.USTAR_FORMAT), tar_header(name.encode(), info.size)
            assert (ours == theirs) or len(name) > 100  # a long name may be cut at another slash
            read = tarfile.TarInfo.frombuf(ours, "utf-8", "strict")
            assert (read.name, read.size, read.type) == (name, info.size, b"0")


def test_sizes_in_binary_and_in_records(tmp_path):
    binary, record = edited(b"a.jpg", 0, 124, b"\x80" + (3).to_bytes(11, "big")), b"10 size=1\n"
    parts = [binary, b"abc", edited(b"pax", len(record), 156, b"x"), record, tar_header(b"a.cls", 0), b"7"]
    old = [edited(b"folder/", 0, 156, b"\0"), tar_header(b"folder/a", 0), END]  # a folder of before ustar
    (tmp_path / "train.tar").write_bytes(padded(*parts, *old))
    assert walk(tmp_path / "train.tar") == [("a.jpg", b"abc"), ("a.cls", b"7"), ("folder/a", b"")]


@pytest.mark.parametrize(
    ("name", "fields", "wanted"),
    [
        ("a/../../b.jpg", {}, "'a/../../b.jpg' leads out of the archive; write it again with relative paths"),
        ("/etc/passwd", {}, "'/etc/passwd' leads out of the archive"),
        ("a.jpg", {"type": tarfile.LNKTYPE, "linkname": "b"}, "'a.jpg' is a link, a device or the like (b'1')"),
        ("a.jpg", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "the like (b'2'); write the archive again"),
        ("a.jpg", {"type": tarfile.FIFOTYPE}, "the like (b'6')"),
        ("a.jpg", {"type": tarfile.GNUTYPE_SPARSE}, "the like (b'S')"),
        ("a.jpg", {"pax_headers": {"GNU.sparse.major": "1"}}, "a sparse file"),
        ("a.jpg", {"pax_headers": {"path": "../b"}}, "'../b' leads out of the archive"),
    ],
)
def test_refused_members(tmp_path, name, fields, wanted):
    assert wanted in walk_refused(make(tmp_path / "train.tar", [(name, b"")], tarfile.PAX_FORMAT, **fields))


def test_every_altered_byte_of_a_header_is_found(tmp_path):
    shard = make(tmp_path / "train.tar", pairs("a", "b"))
    whole, at = shard.read_bytes(), 2048  # of b.jpg
    for place in range(at, at + 512):
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
        if whole[place] in b" \0" and place - at in range(148, 156):
            continue  # a space or a zero behind the checksum's digits
        wanted = f" is damaged at byte {at:,}: the header there doesn't match its checksum; get it again"
        assert walk_refused(shard) == wanted


def test_cut_anywhere(tmp_path):
    shard = make(tmp_path / "train.tar", pairs("a", "b"))
    whole = shard.read_bytes()
    end = whole.rindex(b"1") // 512 * 512 + 512
    for length in (*range(1, end + 1024, 171), *range(512, end + 1024, 512)):
        shard.write_bytes(whole[:length])
        assert walk_refused(shard).startswith(" is cut")
    shard.write_bytes(whole[: end + 1024])
    assert walk(shard) == pairs("a", "b")
    for data, at in ((whole[:2048] + bytes(512) + whole[2560:], 2048), (whole + whole, 4096)):
        shard.write_bytes(data)
        assert walk_refused(shard).startswith(
            f" is damaged at byte {at:,}: a block of zeros ends the archive, but more"
        )


def test_made_up_headers_raise_nothing_else(tmp_path):
    """Headers whose checksum is right and whose fields are not, and long names and records of nonsense."""
    rng = random.Random(0)
    for fmt in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        shard = make(tmp_path / f"train-{fmt}.tar", pairs("a", "é" * 120, "x/" * 100 + "b"), fmt)
        whole, taken = shard.read_bytes(), 0
        for _ in range(200):
            data = bytearray(whole)
            at = rng.randrange(12) * 512
            for _ in range(rng.choice((1, 1, 3))):
                place = at + rng.choice((rng.randrange(512), 124, 156, 135))
                data[place] = rng.choice((0, 0x80, 0xFF, rng.randrange(256)))
            data[at : at + 512] = with_checksum(bytes(data[at : at + 512]))
            shard.write_bytes(data)
            with suppress(DataError):
                walk(shard)
                taken += 1
        assert 20 < taken < 180  # some of them change nothing that is read


@pytest.mark.parametrize(
    ("kind", "text"),
    [(b"x", b"nonsense"), (b"x", b"-9 path=a\n"), (b"g", b"0 path=a\n"), (b"x", b"11 size=-1\n"), (b"L", b"")],
)
def test_bad_extensions_of_headers(tmp_path, kind, text):
    shard = tmp_path / "train.tar"
    shard.write_bytes(padded(edited(b"long", len(text), 156, kind), text, tar_header(b"a.jpg", 0), END))
    with suppress(DataError):  # tarfile passes over some
        assert walk(shard) == [("a.jpg", b"")]


# Bad input, each by one line.

TOGETHER = "its members must stand together: set data.{}=EXTENSION, or write the archive again"
LABEL = "a label is a whole number from 0: set data=tar data.label=EXTENSION to the one that holds it, or json.KEY"
IMAGES = ".jpg, .png, .webp, .gif, .tif and the like"


@pytest.mark.parametrize(
    ("members", "wanted"),
    [
        (
            [("a.jpg", b""), *pairs("b")],
            f"the sample 'a' has no label (looked for .cls); {TOGETHER.replace(',', ' or json.KEY,').format('label')}",
        ),
        ([("a.cls", b"1")], f"the sample 'a' has no image (looked for {IMAGES}); {TOGETHER.format('image')}"),
        (
            [("a.jpg", b""), ("b.jpg", b""), ("a.cls", b"1"), ("b.cls", b"1")],
            f"the sample 'a' has no label (looked for .cls); {TOGETHER.replace(',', ' or json.KEY,').format('label')}",
        ),
        (pairs("a", "b", "a"), "the key 'a' comes twice; remove one of the two"),
        ([*pairs("a", "b"), ("a.png", b""), ("a.cls", b"1")], "the key 'a' comes twice; remove one of the two"),
        ([*pairs("a"), ("a.cls", b"0")], "'a.cls' comes twice; remove one of the two"),
        ([("a.jpg", b""), ("a.cls", b"-1")], f"'a.cls' is b'-1'; {LABEL}"),
        ([("a.jpg", b""), ("a.cls", b"")], f"'a.cls' is b''; {LABEL}"),
        ([("a.jpg", b""), ("a.cls", b"cat\n")], f"'a.cls' is b'cat'; {LABEL}"),
        ([("a.jpg", b""), ("a.cls", b"1" * 33)], f"'a.cls' is {b'1' * 32!r}; {LABEL}"),
    ],
)
def test_refused_samples(tmp_path, members, wanted):
    shard = make(tmp_path / "train.tar", members)
    assert refusal(tmp_path) == f"{shard}: {wanted}"


def test_a_key_in_two_shards(tmp_path):
    first, second = make(tmp_path / "train-0.tar", pairs("a", "b")), make(tmp_path / "train-1.tar", pairs("c", "b"))
    assert refusal(tmp_path) == f"{first} and {second}: the key 'b' comes twice; remove one of the two"


@pytest.mark.parametrize("name", ["train.tar", "train.tar.gz", "train-000.tgz"])
def test_compressed(tmp_path, name):
    data = make(tmp_path / "plain", pairs("a")).read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(data))
    assert refusal(tmp_path) == f"{tmp_path}/{name} is compressed, so no sample can be read by itself; decompress it"

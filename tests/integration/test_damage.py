"""Campaigns of damage: flipped bytes and truncations everywhere in what a run reads, in a process of its own.

1,000 flips and 200 cuts of each; `EFFLOOP_FLIPS` and `EFFLOOP_CUTS` set other numbers.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from images import encode, photo
from plans import READ_BY, make_decoder, open_source, read_bytes, write_records
from runs import make_photos

import effloop
from effloop.data.decode import DecodeConfig, decoders
from effloop.data.image.jpeg import read_layout, with_interval_lengths
from effloop.data.source.storage.writing import writers
from effloop.errors import DataError

pytestmark = pytest.mark.nightly
FLIPS, CUTS = int(os.environ.get("EFFLOOP_FLIPS", "1000")), int(os.environ.get("EFFLOOP_CUTS", "200"))
CLASSES = ["a", "b", "c"]
PACKED = sorted({*writers} - {"folder"})
WITH_INDEX = ("lmdb", "parquet", "recordio", "tar", "tfrecord")


def samples(count: int = 40) -> list[tuple[bytes, int, bytes]]:
    """The last one takes several pages of an LMDB."""
    small = [(b"%03d.jpg" % n, n % 3, encode(photo(12 + n % 5, 10, seed=n), "JPEG")) for n in range(count - 1)]
    return [*small, (b"in/\xff\n.png", 0, encode(photo(60, 50), "PNG"))]


TRAIN = samples()


def damaged(whole: dict[Path, bytes], seed: int) -> Iterator[tuple[Path, bytes]]:
    """A file and what becomes of it: flips anywhere, then cuts, files drawn by their sizes; small ones as often."""
    rng, files = np.random.default_rng(seed), [file for file in whole if whole[file]]
    sizes = np.array([len(whole[file]) for file in files], float)
    chances = sizes / sizes.sum() / 2 + 0.5 / len(files)
    for number in range(FLIPS + CUTS):
        file = files[int(rng.choice(len(files), p=chances))]
        data = bytearray(whole[file])
        if number < FLIPS:
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        else:
            del data[int(rng.integers(len(data))) :]
        yield file, bytes(data)


def outcome(name: str, path: Path, cache: Path) -> str:
    """What a run that reads everything sees: the very data, an error, or something else."""
    options = {"index_dir": str(cache)} if name in WITH_INDEX else {}
    try:
        source = open_source(READ_BY.get(name, name), path, **options)
        found = [(source.raw_key(i), int(source.labels[i]), read_bytes(source, i)) for i in range(len(source))]
    except DataError as error:
        return "several lines" if "\n" in str(error) else "refused"
    if found != TRAIN or list(source.classes) != CLASSES:
        return "altered"
    try:
        source.verify_index()
    except DataError:
        return "found by verify"
    return "whole"


def campaign(name: str, path: Path, folder: Path, report: Path) -> None:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    bare = path.is_dir() and not (path / "train.index").exists()  # so that nothing is known of the names of classes
    whole = {file: file.read_bytes() for file in files if not (bare and file.name == "classes.txt")}
    counts: Counter[str] = Counter()
    for number, (file, data) in enumerate(damaged(whole, 7)):
        file.unlink()  # not written in place: what is mapped stays what it was
        file.write_bytes(data)
        what = outcome(name, path, folder / str(number))
        unprotected = (
            file.name in ("classes.txt", "README.md") or file.suffix in (".lst", ".idx") or file.name == ".lock"
        )
        counts[what] += 1
        if what == "altered" or (what == "whole" and name in WITH_INDEX and not unprotected):
            counts[f"{what}: {file.relative_to(path)}" if path.is_dir() else what] += 1
        file.unlink()
        file.write_bytes(whole[file])
    report.write_text(json.dumps(counts))


def in_a_process(work: Callable[..., None], *args: object, timeout_s: float = 600) -> None:
    """Do it in a process of its own, so that a crash is seen."""
    process = multiprocessing.get_context("fork").Process(target=work, args=args)
    process.start()
    process.join(timeout_s)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("name", "indexed"), [*((name, True) for name in PACKED), ("lmdb", False), ("tfrecord", False)]
)
def test_nothing_altered_is_taken_for_the_data(name, indexed, tmp_path):
    """Each flip and each cut is refused, is of a byte that nothing reads, or changes nothing that is read."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        path = write_records(name, Path(folder) / "set", CLASSES, train=TRAIN)
        if not indexed:
            (path / "train.index").unlink()
        in_a_process(campaign, name, path, Path(folder), tmp_path / "report")
    counts = json.loads((tmp_path / "report").read_text())
    assert counts.get("altered", 0) == counts.get("several lines", 0) == 0, counts
    assert counts["refused"] > CUTS // 3, counts
    if name in WITH_INDEX and indexed:  # it has a checksum of every byte of the files that it is of
        assert not [what for what in counts if what.startswith("whole: ") and not what.endswith(".index")], counts


def jpegs(report: Path) -> None:
    names = [name for name in decoders.names() if name != "auto"]
    built = [decoders.build(DecodeConfig(name, region=True)) for name in names]
    data = encode(photo(90, 110), "JPEG", quality=90, restart_marker_blocks=2)
    whole = built[0].decode(data)
    counts: Counter[str] = Counter()
    for _, changed in damaged({Path("image"): data}, 11):
        for decoder in built:
            for box in (None, (20, 30, 40, 50)):
                try:
                    pixels = decoder.decode(changed, box)
                except DataError:
                    counts["refused"] += 1
                    continue
                except ValueError as error:  # of the box, in an image of the size that it now has
                    counts["refused" if "is not inside an image of" in str(error) else str(error)] += 1
                    continue
                same = box is None and pixels.shape == whole.shape and (pixels == whole).all()
                counts["same" if same else "other pixels"] += 1
    report.write_text(json.dumps(counts))


def test_a_damaged_jpeg_ends_no_process(tmp_path):
    in_a_process(jpegs, tmp_path / "report")
    counts = json.loads((tmp_path / "report").read_text())
    assert {*counts} == {"refused", "same", "other pixels"}
    assert counts["refused"] > CUTS
    assert counts["other pixels"]  # a JPEG has no checksum: why `verify` records one


def test_flips_in_the_lengths_of_intervals_change_no_pixel():
    """In the segment that says where a JPEG's restart intervals are: every region is what it was, or is refused."""
    plain = encode(photo(90, 110), "JPEG", quality=90, restart_marker_blocks=1)
    data = with_interval_lengths(plain)
    layout = read_layout(data)
    assert layout is not None
    assert layout.lengths
    decoder, rng, counts = make_decoder("turbojpeg", region=True), np.random.default_rng(5), Counter[str]()
    whole = decoder.decode(plain)
    for _ in range(FLIPS):
        changed = bytearray(data)
        for at in rng.integers(layout.sos_at - 2 * layout.lengths - 12, layout.sos_at, rng.integers(1, 4)):
            changed[at] ^= 1 << int(rng.integers(8))
        top, left = int(rng.integers(60)), int(rng.integers(80))
        try:
            pixels = decoder.decode(bytes(changed), (top, left, 30, 30))
        except DataError:
            counts["refused"] += 1
        else:
            np.testing.assert_array_equal(pixels, whole[top : top + 30, left : left + 30])
            counts["same"] += 1
    assert counts["same"] > counts["refused"]


DISK_FULL = """
import contextlib, io, os, subprocess, sys
from pathlib import Path
from effloop.cli.main import main

photos, disk, *formats = sys.argv[1:]
for to in formats:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=336k", "tmpfs", disk], check=True)
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        code = main(["convert", f"data.root={photos}", f"to={to}", f"out={disk}/out"])
    print(to, code, os.listdir(disk), err.getvalue(), sep="|", end="")
    subprocess.run(["umount", "-l", disk], check=True)
"""


def test_a_disk_that_is_full(tmp_path):
    """A tmpfs with room for the images and not for what a format adds: one line, and nothing is left."""
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs to make mount namespaces")
    photos, disk = make_photos(tmp_path / "photos", train=400, val=20), tmp_path / "disk"
    disk.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(effloop.__file__).parents[1]), "TMPDIR": str(tmp_path)}
    words = ["unshare", "-m", sys.executable, "-c", DISK_FULL, photos, disk, *PACKED, "folder"]
    said = subprocess.run(words, check=True, env=environment, cwd=tmp_path, capture_output=True, text=True).stdout
    lines = [line.split("|") for line in said.splitlines()]
    assert [line[:3] for line in lines] == [[to, "2", "[]"] for to in (*PACKED, "folder")], said
    assert all(line[3].startswith(f"effloop: out: the disk of {disk} is full; ") for line in lines), said

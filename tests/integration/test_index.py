import itertools
import json
from pathlib import Path

import pytest
from images import encode, photo
from jpegs import belonging_to
from runs import train

from effloop.cli.main import main
from effloop.convert import records
from effloop.data.image.header import Encoded
from effloop.data.image.jpeg import build_index
from effloop.data.source.storage.columns import ColumnFile


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """8 + 4 photographs of two classes, large enough for indexes; the cache folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for (split, count), label in itertools.product((("train", 4), ("val", 2)), "ab"):
        for number in range(count):
            path = tmp_path / "photos" / split / label / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(photo(200, 180, number), "JPEG"))
    return tmp_path / "photos"


def rows(out: str) -> dict[str, list[str]]:
    lines = [line.strip("│ ").split("│") for line in out.splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:4]] for cells in lines}


def test_the_command(photos, capsys):
    (photos / "val/b/none.png").write_bytes(encode(photo(), "PNG"))
    assert main(["index", f"data.root={photos}"]) == 0
    out = capsys.readouterr().out
    assert rows(out) == {"train": ["8", "8", "8"], "val": ["5", "4", "5"]}
    assert "1 can't have one" in out
    assert main(["index", f"data.root={photos}", "split=train"]) == 0
    assert rows(capsys.readouterr().out) == {"train": ["8", "8", "0"]}


def test_of_data_with_indexes_there_is_nothing_to_do(photos, capsys):
    out = photos.parent / "packed"
    assert main(["convert", f"data.root={photos}", "to=tar", f"out={out}"]) == 0
    capsys.readouterr()
    assert main(["index", f"data.root={out}"]) == 0
    assert "train: needs none" in capsys.readouterr().out


def test_a_cache_folder_that_cannot_be_written_is_named(photos, capsys):
    assert main(["index", f"data.root={photos}"]) == 0
    for path in (photos.parent / "cache/effloop").glob("entropy-*"):
        path.unlink()
        path.mkdir()
    assert main(["index", f"data.root={photos}"]) == 2
    assert "set data.index_dir=PATH" in capsys.readouterr().err


@pytest.mark.nightly
def test_runs_learn_the_same(photos, here):
    for number, value in enumerate(("none", "auto", "auto", "read")):
        assert train(photos, f"run={number}", f"data.index={value}", "batch_size=4", "epochs=1") == 0
    metrics = [(path / "metrics.jsonl").read_bytes() for path in sorted((here / "outputs").iterdir())]
    assert len(metrics) == 4
    assert len({*metrics}) == 1


@pytest.mark.parametrize("to", ["memmap", "lmdb"])
def test_verify_compares_the_column(photos, to, capsys):
    out = photos.parent / "packed"
    assert main(["convert", f"data.root={photos}", f"to={to}", f"out={out}"]) == 0
    assert main(["verify", f"data.root={out}"]) == 0
    path, column = (out, "train/entropy") if to == "memmap" else (out / "train.index", "entropy")
    _, _, offset = ColumnFile(path).place(column)
    with path.open("r+b") as file:
        file.seek(offset + 40)
        byte = file.read(1)[0]
        file.seek(offset + 40)
        file.write(bytes([byte ^ 1]))
    capsys.readouterr()
    assert main(["verify", f"data.root={out}"]) == 1
    said = capsys.readouterr().out
    assert "a/0.jpg has an entropy index of other bytes; convert it again" in said
    assert f"its column '{column}' doesn't match the checksum" in said


@pytest.mark.parametrize("number", [0, 1])
def test_an_index_that_gives_other_pixels(number, photos, monkeypatch, capsys):
    """The one of a brighter image: it is refused where it is compared, elsewhere `verify` finds it."""
    pixels = photo(200, 180) // 2 + 60
    image, brighter = (encode(each, "JPEG", quality=90) for each in (pixels, pixels + 3))
    right, other = build_index(image), build_index(brighter)
    assert right
    assert other
    wrong = belonging_to(image, right, other)
    (photos / f"train/a/{number}.jpg").write_bytes(image)

    def build(data: Encoded) -> bytes | None:
        return wrong if data == image else build_index(data)

    monkeypatch.setattr(records, "build_index", build)
    monkeypatch.setattr(records, "EVERY", 1 if number == 0 else 1 << 30)
    out = photos.parent / "packed"
    assert main(["index", f"data.root={photos}"]) == 0
    said = capsys.readouterr()
    assert said.err.count("a/0.jpg gets no entropy index: a crop by it has other pixels; ") == 1 - number
    assert rows(said.out)["train"][1] == ("7" if number == 0 else "8")
    assert main(["convert", "to=memmap", f"out={out}", f"data.root={photos}"]) == 0
    capsys.readouterr()
    for root in (photos, out):
        assert main(["verify", f"data.root={root}"]) == number
        assert ("a/1.jpg has an entropy index by which" in capsys.readouterr().out) == bool(number)


def test_convert_without_indexes_writes_what_it_wrote_before(photos):
    for name, words in (("with", []), ("without", ["index=none"])):
        assert main(["convert", f"data.root={photos}", "to=memmap", f"out={photos.parent / name}", *words]) == 0
    plain, indexed = (ColumnFile(photos.parent / name) for name in ("without", "with"))
    assert "train/entropy" in indexed
    assert "train/entropy" not in plain
    splits = [json.dumps(file.meta["splits"], sort_keys=True) for file in (plain, indexed)]
    assert splits[0] == splits[1]
    share = len(indexed.blob("train/entropy")) / len(indexed.blob("train/payload"))
    assert 0 < share <= 0.03

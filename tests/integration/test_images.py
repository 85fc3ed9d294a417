"""Photographs as phones store them: turned by their EXIF tag, HEIC, and what lies beside them."""

import csv
import io
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from images import HEIC, encode, exif
from PIL import Image
from runs import train

import effloop
from effloop.checkpoint import files
from effloop.cli.main import main
from effloop.data.source.storage.loose import left_out

UPRIGHT = (
    " are turned upright by their EXIF tag; torchvision's ImageFolder leaves them as stored, as decode.exif=false does"
)
STORED = " are turned by their EXIF tag; decode.exif=true turns them upright"
WITHOUT = "is a HEIC image, which needs a plugin of Pillow: pip install 'effloop[heic]'"


def stored_turned(upright: bytes, orientation: int) -> bytes:
    """The same picture, stored as a camera that was held differently stores it."""
    back = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}[orientation]
    with Image.open(io.BytesIO(upright)) as image:
        return encode(np.asarray(image.transpose(back)), "PNG", exif=exif(orientation))


@pytest.fixture(scope="module")
def phones(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The validation images without loss, upright and stored turned."""
    root = tmp_path_factory.mktemp("phones")
    for number, path in enumerate(sorted((photos / "val").glob("*/*.jpg"))):
        with Image.open(path) as image:
            upright = encode(np.asarray(image), "PNG")
        for kind, data in (("upright", upright), ("turned", stored_turned(upright, (3, 6, 8)[number % 3]))):
            place = root / kind / path.relative_to(photos / "val").with_suffix(".png")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
    return {kind: root / kind for kind in ("upright", "turned")}


def predicted(model: Path, images: Path, *words: str) -> list[dict[str, str]]:
    """The table without the folder of the images."""
    assert main(["predict", str(model), str(images), "out=table.csv", "scores=true", "num_workers=0", *words]) == 0
    with Path("table.csv").open(newline="") as file:
        return [{**row, "path": row["path"].removeprefix(str(images))} for row in csv.DictReader(file)]


def test_stored_turned_or_not_is_the_same_photograph(finished, phones, here, capsys):
    wanted = predicted(finished, phones["upright"])
    assert " EXIF " not in capsys.readouterr().out
    assert predicted(finished, phones["turned"]) == wanted
    assert f"13 of 13 images{UPRIGHT}" in capsys.readouterr().out
    assert predicted(finished, phones["turned"], "decode.exif=false") != wanted
    said = capsys.readouterr()
    assert f"13 of 13 images{STORED}" in said.out
    assert "decode.exif=false: the model was trained with true" in said.err


@pytest.mark.parametrize("lacks", [True, False])
def test_a_run_of_before_stays_as_it_was(finished, phones, here, lacks):
    """Its config says false, or nothing."""
    path = shutil.copy(finished / "checkpoints/best.ckpt", here / "old.ckpt")
    state = torch.load(path, weights_only=False)
    state["config"]["decode"]["exif"] = False
    if lacks:
        del state["config"]["decode"]["exif"]
    torch.save(state, path)
    as_stored = predicted(finished, phones["turned"], "decode.exif=false")
    assert predicted(path, phones["turned"]) == as_stored
    assert predicted(path, phones["turned"], "decode.exif=true") == predicted(finished, phones["upright"])


def test_a_run_of_before_goes_on_by_itself(photos, here):
    """`resume=auto` composes the config anew, with today's default."""
    words = ["run=x", "resume=auto", "num_workers=0"]
    assert train(photos, *words, "epochs=1", "decode.exif=false") == 0
    assert train(photos, *words, "epochs=1") == 0
    assert train(photos, *words, "epochs=1", "decode.exif=true") == 2
    assert files.read(files.find(Path("outputs/x"), "best"))["config"]["decode"]["exif"] is False


def test_commands_say_how_many_are_turned(photos, phones, here, capsys):
    shutil.copytree(photos / "train", "set/train")
    shutil.copytree(phones["turned"], "set/val")
    data = f"data.root={here / 'set'}"
    for words, line in ((["decode.exif=false"], STORED), ([], UPRIGHT)):
        assert train(Path("set"), "epochs=1", "num_workers=0", *words) == 0
        assert f"13 of 53 images looked at{line}" in capsys.readouterr().out
        assert main(["verify", data, *words]) == 0
        assert f"13 of 13 images in {here / 'set/val'}{line}" in capsys.readouterr().out
        assert main(["show", data, "split=val", "image_size=16", "num_workers=0", *words]) == 0
        assert f"13 of 13 images looked at{line}" in capsys.readouterr().out


def test_converted_pixels_are_upright_and_copies_keep_their_tags(phones, here):
    for kind, folder in phones.items():
        shutil.copytree(folder, f"{kind}/val")
    for to in (["payload=original"], ["payload=raw"], ["quality=95"]):
        for kind in phones:
            out = f"{kind}-{to[0]}.lmdb"
            assert main(["convert", f"data.root={kind}", "split=val", "to=lmdb", f"out={out}", *to]) == 0
        words = ["image_size=24", "num_workers=0", "batch_size=13"]
        made = [
            next(iter(effloop.build_loader(effloop.compose([f"data.root={kind}-{to[0]}.lmdb", *words]), "val")))
            for kind in ("upright", "turned")
        ]
        assert torch.equal(made[0].images, made[1].images)


@pytest.fixture
def mixed(photos: Path, here: Path) -> Path:
    """Photographs with HEIC among them, a JPEG of that name, and files that are no images."""
    root = here / "mixed"
    shutil.copytree(photos, root)
    (root / "train/a/IMG_1.HEIC").write_bytes(HEIC)
    (root / "train/a/IMG_2.heic").write_bytes(HEIC)
    shutil.copy(root / "train/a/000.jpg", root / "train/b/jpeg.heic")
    shutil.copy(root / "train/a/000.jpg", root / "train/stray.jpg")
    for name in ("clip.webm", "notes.txt", "more.TXT", "LICENCE"):
        (root / "train/a" / name).write_text("no image")
    return root


LEFT_OUT = "2 .txt, 1 .webm, 1 in no class folder, 1 without an ending"


def test_what_is_left_out_is_counted_by_kind(finished, mixed, capsys):
    pytest.importorskip("pi_heif")
    data = f"data.root={mixed}"
    assert train(mixed, "epochs=1", "num_workers=0") == 0
    said = capsys.readouterr().out
    assert said.count(LEFT_OUT) == 1
    assert f"43 images in 3 classes, {mixed}/train (left out: {LEFT_OUT})" in said
    for words in (["verify", data], ["convert", data, "to=lmdb", "out=new.lmdb"]):
        assert main(words) == 0
        assert capsys.readouterr().err.endswith(f"{mixed}/train: left out are {LEFT_OUT}\n")
        effloop.errors.warn.cache_clear()
    assert main(["show", data, "image_size=16", "num_workers=0"]) == 0
    assert LEFT_OUT in capsys.readouterr().out
    assert main(["predict", str(finished), str(mixed / "train/a"), "num_workers=0"]) == 0
    assert "(left out: 2 .txt, 1 .webm, 1 without an ending)" in capsys.readouterr().out
    found = left_out({".txt": 2} | {f".{number}": 1 for number in range(1000, 1050)} | {".jpg": 5})
    assert found == "2 .txt, 1 .1000, 1 .1001, 1 .1002, 1 .1003, 1 .1004, 1 .1005, 1 .1006, 43 of other kinds"


def test_without_the_plugin_a_line_says_what_to_install(finished, mixed, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pi_heif", None)
    monkeypatch.setitem(sys.modules, "pi_heif.HeifImagePlugin", None)
    line = f"{mixed}/train/a/IMG_1.HEIC {WITHOUT} (2 such images)"
    assert train(mixed, "epochs=1", "num_workers=0", "data.check=2") == 2  # wherever they are
    assert f"effloop: {line}; set on_error=skip max_errors=" in capsys.readouterr().err
    words = ["on_error=skip", "max_errors=0.2"]
    assert train(mixed, "epochs=1", "num_workers=0", *words) == 0
    assert WITHOUT in capsys.readouterr().err
    assert main(["predict", str(finished), str(mixed / "train/a"), "num_workers=0"]) == 0
    assert f"{mixed}/train/a/IMG_1.HEIC {WITHOUT} (2 such images); they have no scores" in capsys.readouterr().err
    assert main(["verify", f"data.root={mixed}"]) == 1
    assert capsys.readouterr().out.count(WITHOUT) == 2

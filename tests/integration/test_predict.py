"""`predict`, and `effloop.load` for other programs."""

import csv
import io
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from images import encode, exif, photo
from PIL import Image
from runs import train

import effloop
from effloop.cli.main import main
from effloop.errors import ConfigError, DataError
from effloop.inference.trained import Trained


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def bad_files(folder: Path) -> list[str]:
    """Ten files that look like images and can't be used; their names."""
    good = encode(photo(40, 40), "JPEG")
    contents = {
        "empty.jpg": b"",
        "cut.jpg": good[: len(good) // 2],
        "header.jpg": good[:60],
        "page.jpg": b"<html>404</html>",
        "noise.png": bytes(range(256)) * 4,
        "cut.png": encode(photo(40, 40), "PNG")[:-400],
        "cut.gif": b"GIF89a" + bytes(20),
        "large.bmp": b"BM" + bytes(12) + (40).to_bytes(4, "little") + (90_000).to_bytes(4, "little") * 2 + bytes(32),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe.jpg")
    (folder / "gone.jpg").symlink_to("nothing")
    return [*contents, "pipe.jpg", "gone.jpg"]


def test_the_same_top1_as_eval_with_bad_files_among_them(finished, photos, here, capsys):
    shutil.copytree(photos / "val", "new")
    bad = bad_files(here / "new" / "b")
    words = ["top=2", "scores=true", "num_workers=2"]  # threads, of which each finds some of them
    assert main(["predict", str(finished), "new", "out=scores.csv", *words]) == 0
    printed = capsys.readouterr()
    assert f"{len(bad)} of 23 images can't be used; they have no scores:" in printed.err
    for name in bad:
        assert f"new/b/{name} " in printed.err
    assert re.search(r"23 images in [\d.]+ s, [\d,]+ images/s -> scores.csv$", printed.out.strip())
    rows = table(here / "scores.csv")
    assert [*rows[0]] == ["path", "class", "score", "class_2", "score_2", "p_a", "p_b", "p_c", "error"]
    assert {Path(row["path"]).name for row in rows if row["error"]} == {*bad}
    scored = [row for row in rows if not row["error"]]
    for row in scored:
        shares = sorted((float(row[f"p_{name}"]), name) for name in "abc")
        assert (row["class"], row["class_2"]) == (shares[2][1], shares[1][1])
        assert float(row["score"]) == shares[2][0]
        assert sum(share for share, _ in shares) == pytest.approx(1, abs=1e-5)
    hits = sum(Path(row["path"]).parent.name == row["class"] for row in scored)
    trained = Trained.open(finished)
    assert trained.evaluate(trained.loader())[0]["top1"] == hits / len(scored)


def test_datasets_have_their_targets(finished, photos, here):
    """The run's own data, other data by data.root, and a packed file as a path: the same rows."""
    packed = f"{here}/photos.effloop"
    assert main(["convert", f"data.root={photos}", "to=memmap", f"out={packed}"]) == 0
    assert main(["predict", str(finished), "out=own.csv"]) == 0
    assert main(["predict", str(finished), packed, "split=val", "out=packed.csv"]) == 0
    assert main(["predict", str(finished), f"data.root={packed}", "data=auto", "out=root.csv"]) == 0
    own = table(here / "own.csv")
    for row in own:
        assert Path(row["path"]).is_file()
        row["path"] = str(Path(row["path"]).relative_to(photos / "val"))
    assert own == table(here / "packed.csv") == table(here / "root.csv")
    assert [row["target"] for row in own] == [row["path"][0] for row in own]


def test_an_exported_file(finished, photos, here, capsys):
    pytest.importorskip("safetensors")
    assert main(["export", str(finished), "to=state_dict", "out=model.safetensors"]) == 0
    for model, out in ((finished, "run.csv"), ("model.safetensors", "file.csv")):
        assert main(["predict", str(model), str(photos / "val"), f"out={out}", "scores=true"]) == 0
    assert table(here / "run.csv") == table(here / "file.csv")
    assert main(["export", str(finished), "to=state_dict", "half=true", "out=half.safetensors"]) == 0
    assert main(["predict", f"{finished},half.safetensors", str(photos / "val"), "out=both.csv"]) == 0
    assert ", float32, float16 weights, on " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere"], "'nowhere' is not there; name images, folders of images, or patterns"),
        (["new", "data.root=x"], "predict: 'new' contradicts data.root; drop one of them"),
        (["new", "data.images=x"], "predict: 'new' contradicts data.images; drop one of them"),
        (["new", "out=x.xls"], "out: 'x.xls' is no table's file"),
        (["new", "out=/proc/x.csv"], "out: '/proc/x.csv' can't be written: No such file or directory; set out=FILE"),
        (["new", "split=val"], "split: 'new' is taken as images, which have no splits; leave split out, or"),
        (["new", "like=new/s.csv", "out=new/s.csv"], "out: 'new/s.csv' is what is read, and would be lost"),
        (["new/page.jpg"], "new/page.jpg: none of the images can be used"),
    ],
)
def test_refused(finished, photos, here, words, line, capsys):
    (here / "new").mkdir()
    (here / "new" / "page.jpg").write_bytes(b"<html>")
    (here / "new" / "s.csv").write_text("id,label\npage,a\n")
    if "x.effloop" in words:
        main(["convert", f"data.root={photos}", "to=memmap", "out=x.effloop"])
    assert main(["predict", str(finished), *words]) == 2
    assert line in capsys.readouterr().err


class TestLoad:
    def test_whatever_form_an_image_has(self, finished, photos):
        model = effloop.load(finished)
        path = sorted((photos / "val" / "a").iterdir())[0]
        with Image.open(path) as image:
            pixels = np.array(image)
            alpha = np.dstack([pixels, pixels[:, :, 0]])
            tensors = [torch.from_numpy(each).permute(2, 0, 1) for each in (pixels, alpha)]
            forms = [path, str(path), path.read_bytes(), io.BytesIO(path.read_bytes()), image, pixels, alpha, *tensors]
            found = model.predict(forms, top=3, every=True)
        grey = model.preprocess([pixels[:, :, 0], pixels[:, :, :1], tensors[0][:1], Image.fromarray(pixels[:, :, 0])])
        assert torch.equal(grey, grey[:1].expand_as(grey))
        assert len(found) == len(forms)
        assert all(row == found[0] for row in found)
        assert [*found[0]] == ["class", "score", "class_2", "score_2", "class_3", "score_3", "p_a", "p_b", "p_c"]
        assert model.predict(path, top=3, every=True) == found[:1]

    def test_it_is_a_module_that_sees_what_eval_sees(self, finished, photos):
        """More images than a batch has, and their outputs to the bit."""
        model = effloop.load(finished, ["num_workers=2"])
        trained = Trained.open(finished)
        paths = [photos / "val" / trained.loader().plan.source.key(index) for index in range(13)]
        images = model.preprocess(paths)
        batches = [batch.images[batch.valid] for batch in trained.loader().epoch(0)]
        assert torch.equal(images, torch.cat(batches))
        with torch.no_grad():
            assert torch.equal(model(images[:8]), trained.model(batches[0]))
        assert (model.classes, model.image_size, model.device.type) == (("a", "b", "c"), 16, "cpu")
        assert sum(each.numel() for each in model.parameters()) > 0

    def test_turned_as_exif_says_if_the_run_was(self, finished):
        """In whatever form the image is given, which isn't changed."""
        data = encode(photo(), "JPEG", exif=exif(6))
        image = Image.open(io.BytesIO(data))
        for words, same in (([], False), (["decode.exif=false"], True)):
            model = effloop.load(finished, words)
            turned, given, plain = model.preprocess([data, image, encode(photo(), "JPEG")])
            assert torch.equal(turned, given)
            assert torch.equal(turned, plain) == same
        assert image.getexif()[0x0112] == 6

    def test_random_numbers_of_the_program_stay(self, finished):
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        effloop.load(finished)
        assert torch.equal(torch.rand(2), expected)

    @pytest.mark.parametrize(
        ("images", "kind", "line"),
        [
            ([], ConfigError, "images: there are none"),
            ([photo(), 3], ConfigError, "images: image 1 is int; give a path"),
            (3, ConfigError, "images: image 0 is int; give a path"),
            (torch.rand(3, 8, 8), ConfigError, "images: image 0 is torch.float32 (3, 8, 8); give a path"),
            (io.StringIO("text"), ConfigError, "images: image 0 is str; give a path"),
            ([photo(), b"junk of some bytes"], DataError, "image 1 is not an image that Pillow reads"),
            (
                [Image.open(io.BytesIO(encode(photo(), "JPEG")[:900]))],
                DataError,
                "image 0 is a truncated JPEG: ends after 900 bytes",
            ),
        ],
    )
    def test_refused(self, finished, images, kind, line):
        with pytest.raises(kind) as error:
            effloop.load(finished).predict(images)
        assert str(error.value).startswith(line)


def test_a_table_without_targets(finished, photos, here, capsys):
    names = sorted(str(path.relative_to(photos)) for path in (photos / "val").rglob("*.jpg"))
    stems = [name.removesuffix(".jpg") for name in names]
    assert main(["predict", str(finished), *(str(photos / name) for name in names), "out=wanted.csv"]) == 0
    shutil.copytree(photos, "data")
    for header, rows in (("id", stems), ("file_name,site,day", [f"{name},x{row},y" for row, name in enumerate(names)])):
        Path("data/test.csv").write_text("\n".join([header, *rows, "gone.jpg" + ",x" * header.count(",")]) + "\n")
        assert main(["predict", str(finished), "data/test.csv", "out=found.csv"]) == 0
        *found, gone = table(Path("found.csv"))
        assert [row["path"] for row in found] == [f"data/{name}" for name in names]
        assert [row["score"] for row in found] == [row["score"] for row in table(Path("wanted.csv"))]
        assert "can't be read" in gone["error"]


def test_a_table_whose_images_are_in_another_folder(photos, here):
    """As a path, as `data.root`, with `data=csv`: of a run with a column of targets and a mean of its own."""
    names = sorted(path.relative_to(photos / "val") for path in photos.glob("val/*/*.jpg"))
    Path("all.csv").write_text("\n".join(["id,kind", *(f"{name},{name.parent}" for name in names)]))
    Path("test.csv").write_text("\n".join(["id", *(str(name.with_suffix("")) for name in names)]))
    images, own = f"data.images={photos}/val", ("data.label=kind", "data.mean=[0.1,0.2,0.3]", "data.val=0.3")
    assert train(photos, "data.root=all.csv", images, *own, "epochs=1", "run=run") == 0
    assert main(["predict", "outputs/run", *(f"{photos}/val/{name}" for name in names), "out=wanted.csv"]) == 0
    for words in (["test.csv"], ["data.root=test.csv"], ["data=csv", "data.root=test.csv"]):
        assert main(["predict", "outputs/run", *words, images, "out=found.csv"]) == 0
        assert Path("found.csv").read_text() == Path("wanted.csv").read_text()
    for words in ([images, "data.label=kind"], ["data.images=nowhere"]):
        assert main(["predict", "outputs/run", "test.csv", *words]) == 2


def test_a_submission_has_what_the_sample_file_has(finished, photos, here, capsys):
    """Its rows in its order, its ids and its kind of values; an image that can't be used has the sample's."""
    shutil.copytree(photos / "val", "new")
    assert main(["predict", str(finished), "new", "out=all.csv", "scores=true"]) == 0
    wanted = {Path(row["path"]).stem: row for row in table(Path("all.csv"))}
    stems = sorted(wanted, key=lambda stem: stem[::-1])[1:]
    err = ""
    (bad := next(Path("new").glob(f"*/{stems[3]}.jpg"))).write_bytes(b"junk of some bytes")
    for head, cells, value in (
        ("Id,Predicted", "0", lambda row: str("abc".index(row["class"]))),
        ("image,label", "c", lambda row: row["class"]),
        ("id,c,a,b", "0.5,0.25,0.25", lambda row: ",".join(row[f"p_{name}"] for name in "cab")),
    ):
        Path("sample.csv").write_text("\n".join([head, *(f"{stem},{cells}" for stem in stems)]))
        assert main(["predict", str(finished), "new", "like=sample.csv", "out=sub.csv"]) == 0
        err += capsys.readouterr().err
        assert f"{bad} is not an image that Pillow reads" in err
        assert "they have the values of sample.csv" in err
        lines = [f"{stem},{cells if stem == bad.stem else value(wanted[stem])}" for stem in stems]
        assert Path("sub.csv").read_text().splitlines() == [head, *lines]
    assert "sample.csv has no row for 1 of 13 images, which are left out: " in err


def test_a_submission_by_names(finished, photos, capsys, here):
    shutil.copytree(photos / "val", "new")
    assert main(["predict", str(finished), "new", "id=stem", "columns=[id,label]", "out=sub.csv"]) == 0
    rows = table(Path("sub.csv"))
    assert [*rows[0]] == ["id", "label"]
    assert [row["id"] for row in rows] == [path.stem for path in sorted(Path("new").glob("*/*.jpg"))]
    for sample, words, line in (
        ("id,label\n000,a\n", ["id=name"], "sample.csv: 1 of 1 ids are of no image: 000; images are 0"),
        ("id,label\n000,a\nx,a\n", [], "sample.csv: 1 of 2 ids are of no image: x; name them, too"),
        ("id,label\n", [], "sample.csv has no rows"),
        ("id,label\n000,a\n", ["scores=true"], "like: it says which columns there are; leave out scores and top"),
    ):
        Path("sample.csv").write_text(sample)
        assert main(["predict", str(finished), "new", "like=sample.csv", *words]) == 2
        assert line in capsys.readouterr().err
    shutil.copytree(photos / "val", "new/again")
    assert main(["predict", str(finished), "new", "id=stem", "columns=[id,label]", "out=sub.csv"]) == 2
    assert re.search(r"id: '\d+' is new/.*jpg and new/.*jpg; set id=path", capsys.readouterr().err)

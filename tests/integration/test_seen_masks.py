"""What a user sees of segmentation: pictures, an evaluation, predicted masks, exported files, memory."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from masked import NAMES, make_masks, mask_of
from numpy.typing import NDArray
from PIL import Image
from runs import once
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import effloop
from effloop.batch import ImageSize
from effloop.cli.main import main
from effloop.errors import DataError
from effloop.inference.trained import Trained
from effloop.record.grid import PALETTE, Layout, draw, overlay
from effloop.train.evaluation import compare_some

SMALL = ("model=unet", "model.width=4", "model.depth=2", "image_size=[24,32]", "batch_size=4", "num_workers=0")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masks(tmp_path_factory.mktemp("masks"), {"train": 8, "val": 5})


@pytest.fixture(scope="module")
def run(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs, evaluated in each."""
    out = tmp_path_factory.mktemp("runs")
    assert main(once("train", f"data.root={root}", *SMALL, "epochs=3", "record.samples=3", f"out={out}", "run=x")) == 0
    return out / "x"


def pixels(file: Path) -> NDArray[np.uint8]:
    with Image.open(file) as picture:
        return np.asarray(picture)


def test_show_has_overlays_of_the_augmented_masks(root: Path, here: Path) -> None:
    assert main(once("show", f"data.root={root}", *SMALL, "run=x", "samples=3", "epochs=2")) == 0
    config = effloop.compose([f"data.root={root}", *SMALL])
    loader = effloop.build_loader(config)
    found, layout = pixels(here / "outputs/x/samples.png"), Layout(config.size, 3, 2)
    for epoch in range(2):
        batch = loader.samples([0, 3, 7], epoch)
        wanted = overlay(loader.as_pictures(batch), batch.targets.numpy())
        for row in range(3):
            y, x = layout.corner(row, epoch)
            assert np.array_equal(found[y : y + 24, x : x + 32], wanted[row])
    assert len(found) > layout.size[0]
    assert np.array_equal(found, draw(loader.preview(3, 2)))


def test_tensorboard_has_targets_and_predictions(root: Path, run: Path) -> None:
    """After each evaluation; the last one is that of the weights in last.ckpt."""
    (events,) = (run / "tensorboard").iterdir()
    read = EventAccumulator(str(events), {"images": 0})
    read.Reload()
    assert sorted(read.Tags()["images"]) == ["predictions", "samples"]
    images = read.Images("predictions")
    assert [each.step for each in images] == [2, 4, 6]
    trained = Trained.from_checkpoint(run / "checkpoints/last.ckpt")
    loader = trained.loader()
    preview = compare_some(loader, trained.precision, trained.model, 3)
    path = run / "seen.png"
    path.write_bytes(images[-1].encoded_image_string)
    found, layout = pixels(path), Layout(ImageSize(24, 32), 3, 3)
    assert (preview.columns, preview.classes) == (("image", "target", "prediction"), NAMES)
    batch = loader.samples([0, 2, 4])
    predicted = trained.model(batch.images).argmax(dim=1)
    for row in range(3):
        image = loader.as_pictures(batch)[row]
        masks = [batch.targets[row].numpy(), predicted[row].numpy().astype(np.uint8)]
        for column, wanted in enumerate([image, *(overlay(image, mask) for mask in masks)]):
            y, x = layout.corner(row, column)
            assert np.array_equal(found[y : y + 24, x : x + 32], wanted), (row, column)


def test_eval_and_its_report(root: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("miou", "mean_accuracy", "iou", *NAMES))
    folder = run / "eval/val"
    with (folder / "per_class.csv").open() as file:
        rows = {row["class"]: row for row in csv.DictReader(file)}
    with (folder / "confusion.csv").open() as file:
        table = [row[1:] for row in csv.reader(file)][1:]
    matrix = np.array(table, np.int64)
    truth = np.zeros(256, np.int64)
    loader = Trained.from_checkpoint(run).loader()
    for batch in loader.epoch(0):
        truth += np.bincount(batch.targets[batch.valid].numpy().ravel(), minlength=256)
    assert matrix.sum(axis=1).tolist() == truth[: len(NAMES)].tolist()
    ious = np.diag(matrix) / (matrix.sum(0) + matrix.sum(1) - np.diag(matrix))
    for place, name in enumerate(NAMES):
        assert float(rows[name]["iou"]) == pytest.approx(ious[place], rel=1e-5)
    scores = json.loads((folder / "scores.json").read_text())
    assert scores["unit"] == "pixels"
    assert scores["scores"]["miou"] == pytest.approx(ious.mean(), rel=1e-6)
    worst = pixels(folder / "worst.png")
    assert min((worst == PALETTE[label]).all(axis=2).sum() for label in (1, 2)) >= 12 * 12  # in the legend, at least
    assert main(["report", str(run)]) == 0
    page = next(run.parent.rglob("*.html")).read_text()
    assert all(word in page for word in ("miou", "Confusion matrix", "pixels", "data:image/jpeg", *NAMES))


@pytest.mark.parametrize("how", ["crop", "squash", "letterbox"])
def test_predicted_masks_have_their_images_sizes(root: Path, run: Path, here: Path, how: str) -> None:
    """Whatever the model's size and the crop of its evaluation; one image is broken."""
    for number, (height, width) in enumerate([(48, 64), (90, 40), (24, 32)]):
        path = here / f"in/{number % 2}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(root / "val/images/0000.jpg") as picture:
            picture.resize((width, height)).save(path)
    (here / "in/1/bad.jpg").write_bytes(b"no image")
    words = ["masks=m", "overlays=o", "out=shares.csv", f"augment.eval={how}"]
    assert main(["predict", str(run), "in", *words]) == 0
    with (here / "shares.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]] == ["path", *(f"share_{name}" for name in NAMES), "error"]
    for row in rows:
        name = Path(row["path"]).relative_to("in").with_suffix("")
        if name.name == "bad":
            assert row["error"]
            assert row["share_sky"] == ""
            assert not (here / f"m/{name}.png").exists()
            continue
        mask, image = pixels(here / f"m/{name}.png"), pixels(Path(row["path"]))
        assert mask.shape == image.shape[:2]
        assert pixels(here / f"o/{name}.jpg").shape == image.shape
        for label, each in enumerate(NAMES):
            assert float(row[f"share_{each}"]) == pytest.approx((mask == label).mean(), abs=1e-5)
    [found] = effloop.load(run, [f"augment.eval={how}"]).predict("in/0/2.jpg")
    assert np.array_equal(found["mask"], pixels(here / "m/0/2.png"))
    if how != "letterbox":
        return
    with pytest.raises(DataError, match="bad"):
        effloop.load(run).predict(["in/1/bad.jpg"])


def test_an_image_of_the_model_s_size_has_the_model_s_mask(run: Path, root: Path) -> None:
    trained, model = Trained.from_checkpoint(run), effloop.load(run)
    image = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    [found] = model.predict([image])
    wanted = trained.model(model.preprocess([image])).argmax(dim=1)[0]
    assert np.array_equal(found["mask"], wanted.numpy())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["top=3"], "top: 3, but task=segmentation ranks no classes"),
        (["scores=true"], "scores: of task=segmentation the table has each class's share; leave scores out"),
        (["masks=in"], "masks: 'in/a.png' would take the place of a file of the data; set masks to another folder"),
        (["masks=in/a.png"], "masks: 'in/a.png' can't be written: File exists; set masks=FOLDER"),
        (["overlays=/proc/x"], "overlays: '/proc/x' can't be written"),
    ],
)
def test_refusals(run: Path, here: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "in").mkdir()
    Image.fromarray(mask_of(20, 20, 0)).save(here / "in/a.png")
    before = (here / "in/a.png").read_bytes()
    assert main(["predict", str(run), "in", *words]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert (here / "in/a.png").read_bytes() == before


@pytest.mark.parametrize("words", ["masks=masks", "overlays=images"])
def test_files_of_the_dataset_are_kept(
    run: Path, root: Path, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root / "val")
    assert main(["predict", str(run), words]) == 2
    assert "would take the place of a file of the data" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["onnx", "state_dict"])
def test_exported_files(run: Path, root: Path, here: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same outputs, (N, K, H, W), and the same masks by `predict`; one of them in windows."""
    pytest.importorskip({"onnx": "onnxruntime", "state_dict": "safetensors"}[to])
    file = {"onnx": "x.onnx", "state_dict": "x.safetensors"}[to]
    windows = ["task.window=16"] if to == "onnx" else []
    assert main(["export", str(run), f"to={to}", f"out={file}", *windows]) == 0
    assert "100.00%" in capsys.readouterr().out
    for model, masks, words in ((str(run), "one", windows), (file, "two", [])):
        assert main(["predict", model, str(root / "val/images"), f"masks={masks}", *words]) == 0
    for path in (here / "one").iterdir():
        assert (pixels(path) == pixels(here / "two" / path.name)).mean() > 0.999

"""Whole runs of masks: trained, resumed to the bit, scored, in windows and on ranks."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from images import occurs
from masked import NAMES, make_masks, mask_of
from numpy.typing import NDArray
from PIL import Image
from runs import once, stopping_at

import effloop
from effloop.checkpoint import files
from effloop.cli.main import main
from effloop.errors import DataError
from effloop.inference import predict as predicting
from effloop.inference.trained import Trained
from effloop.record.grid import PALETTE, draw, overlay

SMALL = ("image_size=16", "epochs=2", "batch_size=4", "model=unet", "model.width=4", "model.depth=2", "num_workers=0")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masks(tmp_path_factory.mktemp("masks"), {"train": 12, "val": 7})


def words(root: Path, *more: str) -> list[str]:
    quiet = ("record.tensorboard=false", "device=cpu")
    return once(f"data.root={root}", *SMALL, *quiet, *more)


@pytest.fixture(scope="module")
def run(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With averaged weights and accumulated gradients, in 16 bit, with several losses and weights."""
    out = tmp_path_factory.mktemp("runs")
    more = ("optim.ema=0.5", "accumulate=2", "precision=bf16", "task.class_weights=balanced", "schedule=poly")
    assert main(["train", *words(root, f"out={out}", "run=run", "task=segmentation", *more)]) == 0
    return out / "run"


def test_eval_of_mirror_images_and_of_windows(run, capsys):
    """Windows of the size that was trained at, on larger images."""
    assert main(["eval", str(run), "tta=flip"]) == 0
    assert main(["eval", str(run), "image_size=24", "task.window=16"]) == 0


def test_resumed_to_the_bit(root, run, tmp_path):
    config = files.read(run / "checkpoints" / "last.ckpt")["config"]
    more = ("optim.ema=0.5", "accumulate=2", "precision=bf16", "task.class_weights=balanced", "schedule=poly")
    with stopping_at(1):
        main(["train", *words(root, f"out={tmp_path}", "run=x", "task=segmentation", *more)])
    assert main(["resume", str(tmp_path / "x")]) == 0
    ours, theirs = (files.read(each / "checkpoints" / "last.ckpt") for each in (tmp_path / "x", run))
    assert config["task"] == ours["config"]["task"]
    assert ours["last"] == theirs["last"]
    assert all(torch.equal(ours["model"][name], tensor) for name, tensor in theirs["model"].items())


def test_masks_grow_with_their_images(root, tmp_path):
    """In a run with progressive sizes, on sides that aren't multiples of the network's stride."""
    more = ("progressive=[[9,14],[18,22]]", "image_size=[18,22]", f"out={tmp_path}", "run=x", "task=segmentation")
    trainer = effloop.build_trainer(effloop.compose(words(root, *more)))
    assert [next(trainer.train.epoch(epoch)).targets.shape for epoch in (0, 1)] == [(4, 9, 14), (4, 18, 22)]
    assert trainer.fit()["miou"] > 0


@pytest.mark.slow
def test_batches_of_one_image(root, here, capsys):
    """One value of each channel, as the pooled ones of DeepLabV3, has no variance; others train on."""
    deep = [word for word in words(root, "model=deeplabv3_mobilenet_v3_large", "batch_size=1") if "model." not in word]
    assert main(["train", *deep, "data.tail=wrap"]) == 2
    err = capsys.readouterr().err
    line = "effloop: batch_size: too small: BatchNorm has one value of each channel, which has no variance; set a "
    line += "larger one, or another model"
    assert err.splitlines()[-1] == line
    assert main(["lr", *deep, "data.tail=wrap", "updates=20"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert main(["train", *words(root, "batch_size=1", "epochs=1")]) == 0


@pytest.mark.nightly
def test_backbone_weights_of_a_file(root, tmp_path, capsys):
    """Of torchvision's model of images, whose own head is left out; the backbone is trained on from there."""
    given = torchvision.models.mobilenet_v3_large(weights=None).state_dict()
    torch.save(given, tmp_path / "weights.pt")
    few = ("model=lraspp_mobilenet_v3_large", f"model.backbone_weights={tmp_path / 'weights.pt'}", f"out={tmp_path}")
    small = [word for word in words(root, *few) if word[:7] not in ("model.w", "model.d")]
    trainer = effloop.build_trainer(effloop.compose(small))
    backbone = {name: each for name, each in trainer.model.state_dict().items() if name.startswith("backbone.")}
    assert all(torch.equal(each, given[name.replace("backbone", "features")]) for name, each in backbone.items())
    (tmp_path / "weights.pt").write_bytes(b"PK\3\4 cut")
    assert main(["train", *small]) == 2
    assert f"model.backbone_weights: {tmp_path / 'weights.pt'} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words_", "message"),
    [
        (["augment.mixup=0.4"], "augment.mixup: 0.4 mixes targets as task=segmentation can't learn them"),
        (["optim.head_lr=0.1", "model=cnn"], "model: cnn has an output for each image"),
        (["task.class_weights=[1,2]"], "task.class_weights: 2 numbers for 3 classes"),
    ],
)
def test_what_is_refused(root, words_, message, here, capsys):
    few = words(root, "task=segmentation", *words_)
    few = [word for word in few if "model=cnn" not in words_ or word[:6] != "model."]
    assert main(["train", *few]) == 2
    assert message in capsys.readouterr().err


# What a user sees of segmentation: pictures, an evaluation, predicted masks, exported files, memory.

SEEN = ("model=unet", "model.width=4", "model.depth=2", "image_size=[24,32]", "batch_size=4", "num_workers=0")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masks(tmp_path_factory.mktemp("masks"), {"train": 8, "val": 5})


@pytest.fixture(scope="module")
def seen(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs, evaluated in each."""
    out = tmp_path_factory.mktemp("runs")
    assert main(once("train", f"data.root={few}", *SEEN, "epochs=3", f"out={out}", "run=x")) == 0
    return out / "x"


def pixels(file: Path) -> NDArray[np.uint8]:
    with Image.open(file) as picture:
        return np.asarray(picture)


def test_show_has_overlays_of_the_augmented_masks(few, here):
    assert main(once("show", f"data.root={few}", *SEEN, "run=x", "samples=3", "epochs=2")) == 0
    config = effloop.compose([f"data.root={few}", *SEEN])
    loader = effloop.build_loader(config)
    found = pixels(here / "outputs/x/samples.png")
    for epoch in range(2):
        batch = loader.samples([0, 3, 7], epoch)
        wanted = overlay(loader.as_pictures(batch), batch.targets.numpy())
        for row in range(3):
            assert occurs(found, wanted[row])
    assert np.array_equal(found, draw(loader.preview(3, 2)))


def test_an_experiment_of_another_task_gives_what_fits(few):
    """finetune sets `task.label_smoothing`, which segmentation hasn't."""
    config = effloop.compose([f"data.root={few}", "data=masks", "experiment=finetune"])
    assert config.task.name == "segmentation"


def test_eval_and_its_report(few, seen, capsys):
    assert main(["eval", str(seen)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("miou", "mean_accuracy", "iou", *NAMES))
    folder = seen / "eval/val"
    with (folder / "per_class.csv").open() as file:
        rows = {row["class"]: row for row in csv.DictReader(file)}
    with (folder / "confusion.csv").open() as file:
        table = [row[1:] for row in csv.reader(file)][1:]
    matrix = np.array(table, np.int64)
    truth = np.zeros(256, np.int64)
    loader = Trained.open(seen).loader()
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
    assert main(["report", str(seen)]) == 0
    page = next(seen.parent.rglob("*.html")).read_text()
    full_size = f"; masks of full size: miou {scores['full_size']['miou']:.2%}, accuracy "
    assert full_size in page
    assert "computed in float32, of masks at the model's size." in page
    assert all(word in page for word in ("miou", "Confusion matrix", "pixels", "data:image/jpeg", *NAMES))


@pytest.mark.parametrize("how", ["crop", "squash", "letterbox"])
def test_scores_of_full_size(few, seen, here, how, monkeypatch, capsys):
    """Those of the files that `predict` writes, counted pixel by pixel, beside those of the model's size; of views the
    views together. A sample that can't be used counts in neither.
    """
    shutil.copytree(few, here / "data")
    Image.fromarray(np.full((3, 3), 1, np.uint8)).save(here / "data/val/masks/0003.png")
    monkeypatch.setattr(predicting, "_AT_ONCE", 100)  # two rows of a mask at a time
    words = ["data.root=data", f"augment.eval={how}", "tta=flip", "on_error=skip", "max_errors=0.5"]
    assert main(["eval", str(seen), *words, "out=e"]) == 0
    assert main(["predict", str(seen), "data/val/images", *words[1:3], "masks=m"]) == 0
    cells = np.zeros((3, 3), np.int64)
    for path in (*here.glob("m/*"),):
        target, found = pixels(few / "val/masks" / path.name), pixels(path)
        if path.stem != "0003":
            np.add.at(cells, (target[target != 255], found[target != 255]), 1)
    told = json.loads(Path("e/scores.json").read_text())
    assert len([*here.glob("m/*")]) == told["samples"] + 1 == 5
    hits = np.diag(cells)
    wanted = (
        (hits / (cells.sum(0) + cells.sum(1) - hits)).mean(),
        hits.sum() / cells.sum(),
        (hits / cells.sum(1)).mean(),
    )
    assert told["full_size"] == pytest.approx(dict(zip(("miou", "accuracy", "mean_accuracy"), wanted, strict=True)))
    assert told["full_size"]["miou"] != told["scores"]["miou"]
    lines = [line.split("│")[1:5] for line in capsys.readouterr().out.splitlines() if "│" in line]
    named = [[cell.strip() for cell in line] for line in lines[:3]]
    assert [line[:3] for line in named] == [["none", "24x32", "4"], ["flip", "24x32", "4"], ["flip", "full size", "4"]]
    assert named[2][3] == f"{told['full_size']['miou']:.2%}"


@pytest.mark.parametrize("how", ["crop", "squash", "letterbox"])
def test_predicted_masks_have_their_images_sizes(few, seen, here, how):
    """Whatever the model's size and the crop of its evaluation; one image is broken."""
    for number, (height, width) in enumerate([(48, 64), (90, 40), (24, 32)]):
        path = here / f"in/{number % 2}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(few / "val/images/0000.jpg") as picture:
            picture.resize((width, height)).save(path)
    (here / "in/1/bad.jpg").write_bytes(b"no image")
    words = ["masks=m", "out=shares.csv", f"augment.eval={how}", "num_workers=3"]
    assert main(["predict", str(seen), "in", *words]) == 0
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
        for label, each in enumerate(NAMES):
            assert float(row[f"share_{each}"]) == pytest.approx((mask == label).mean(), abs=1e-5)
    [found] = effloop.load(seen, [f"augment.eval={how}"]).predict("in/0/2.jpg")
    assert np.array_equal(found["mask"], pixels(here / "m/0/2.png"))
    if how != "letterbox":
        return
    with pytest.raises(DataError, match="bad"):
        effloop.load(seen).predict(["in/1/bad.jpg"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["top=3"], "top: 3, but task=segmentation ranks no classes"),
        (["scores=true"], "scores: of task=segmentation the table has each class's share; leave scores out"),
        (["masks=in"], "masks: 'in/a.png' would take the place of a file of the data; set masks to another folder"),
        (["masks=in/a.png"], "masks: 'in/a.png' can't be written: File exists; set masks=FOLDER"),
        (["masks=/proc/x"], "masks: '/proc/x' can't be written"),
    ],
)
def test_refusals(seen, here, words, line, capsys):
    (here / "in").mkdir()
    Image.fromarray(mask_of(20, 20, 0)).save(here / "in/a.png")
    before = (here / "in/a.png").read_bytes()
    assert main(["predict", str(seen), "in", *words]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert (here / "in/a.png").read_bytes() == before


@pytest.mark.parametrize("to", ["onnx", "state_dict"])
@pytest.mark.nightly
def test_exported_files(seen, few, here, to, capsys):
    """The same outputs, (N, K, H, W), and the same masks by `predict`; one of them in windows."""
    pytest.importorskip({"onnx": "onnxruntime", "state_dict": "safetensors"}[to])
    file = {"onnx": "x.onnx", "state_dict": "x.safetensors"}[to]
    windows = ["task.window=16"] if to == "onnx" else []
    assert main(["export", str(seen), f"to={to}", f"out={file}", *windows]) == 0
    assert "100.00%" in capsys.readouterr().out
    for model, masks, words in ((str(seen), "one", windows), (file, "two", [])):
        assert main(["predict", model, str(few / "val/images"), f"masks={masks}", *words]) == 0
    for path in (here / "one").iterdir():
        assert (pixels(path) == pixels(here / "two" / path.name)).mean() > 0.999

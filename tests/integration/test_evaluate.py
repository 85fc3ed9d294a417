"""`eval`: what it prints beside the scores, and its files."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runs import TINY, once, train

import effloop
from effloop.cli.main import main
from effloop.inference.trained import Trained

FILES = {
    *("scores.json", "per_class.csv", "confusion.csv", "confusion.png", "calibration.png", "worst.csv", "worst.png")
}


@pytest.fixture
def run(finished: Path, here: Path) -> Path:
    """A run of its own."""
    return Path(shutil.copytree(finished, here / "run", ignore=shutil.ignore_patterns("eval", "*.eval")))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_files_say_what_the_table_says(run, photos, capsys):
    assert main(["eval", str(run), "batch_size=5"]) == 0
    out, folder = capsys.readouterr().out, run / "eval/val"
    assert {path.name for path in folder.iterdir()} == FILES
    told = json.loads((folder / "scores.json").read_text())
    trained = Trained.open(run)
    assert (told["samples"], told["split"], told["names"]) == (13, "val", ["a", "b", "c"])
    assert told["scores"] == pytest.approx(trained.evaluate(trained.loader())[0], rel=1e-6)
    assert f"{told['scores']['top1']:.2%}" in out
    assert f"calibration error {told['calibration_error']:.2%}" in out

    matrix = np.array([[row[name] for name in "abc"] for row in table(folder / "confusion.csv")], int)
    assert matrix.sum(axis=1).tolist() == [5, 4, 4]
    assert matrix.trace() / 13 == told["scores"]["top1"]
    rows = {row["class"]: row for row in table(folder / "per_class.csv")}
    for label, name in enumerate("abc"):
        assert float(rows[name]["recall"]) == pytest.approx(matrix[label, label] / matrix[label].sum(), rel=1e-5)
        assert f" {name} " in out

    worst = table(folder / "worst.csv")
    losses = [float(row["loss"]) for row in worst]
    assert losses == sorted(losses, reverse=True)
    assert np.mean(losses) == pytest.approx(told["scores"]["loss"], rel=1e-5)  # there are fewer than 32
    for row in worst:
        assert row["target"] == Path(row["path"]).relative_to(photos / "val").parts[0]
        assert Path(row["path"]).is_file()


def test_with_several_views_it_is_of_all_of_them(run):
    assert main(["eval", str(run), "tta=flip", "out=views"]) == 0
    told = json.loads(Path("views/scores.json").read_text())
    assert told["tta"] == ["flip"]
    assert main(["predict", str(run), "out=p.csv", "tta=flip"]) == 0
    assert told["scores"]["top1"] == sum(row["class"] == row["target"] for row in table(Path("p.csv"))) / 13
    losses = [float(row["loss"]) for row in table(Path("views/worst.csv"))]
    assert told["scores"]["loss"] == pytest.approx(np.mean(losses))


@pytest.mark.usefixtures("here")
def test_a_recipe_in_16_bit_is_scored_and_used_in_float32(photos, capsys):
    """As an exported file computes; `amp=true` gives the scores of the training, and each place names what it is of."""
    assert train(photos, "run=x", "epochs=1", "amp=true") == 0
    assert "result (bfloat16)" in capsys.readouterr().out
    summary = json.loads(Path("outputs/x/summary.json").read_text())
    assert main(["export", "outputs/x", "to=state_dict", "out=x.safetensors"]) == 0
    assert main(["eval", "outputs/x"]) == 0
    assert ", epoch 0, float32, on 13 images" in capsys.readouterr().out
    told = json.loads(Path("outputs/x/eval/val/scores.json").read_text())
    assert told["precision"] == "float32"
    run = told["scores"]["loss"]
    found = []
    for name, words in (("x.safetensors", []), ("outputs/x", ["amp=true"]), ("outputs/x", ["precision=bf16"])):
        trained = Trained.open(Path(name), words)
        found.append((trained.computes_in, trained.evaluate(trained.loader())[0]["loss"]))
    assert found[0] == ("float32", pytest.approx(run, rel=1e-6))
    assert found[1] == found[2] == ("bfloat16", summary["best"]["loss"])
    assert summary["best"]["loss"] != run
    assert main(["predict", "outputs/x", "out=p.csv", "scores=true"]) == 0
    right = [float(row[f"p_{row['target']}"]) for row in table(Path("p.csv"))]
    assert run == pytest.approx(-np.log(right).mean(), rel=1e-5)
    model = effloop.load("outputs/x")
    assert model(model.preprocess(photos / "val/a/000.jpg")).dtype == torch.float32
    capsys.readouterr()
    assert main(["eval", "x.safetensors", "amp=true"]) == main(["export", "outputs/x", "to=onnx", "amp=true"]) == 2
    refused = capsys.readouterr().err.splitlines()
    assert refused[0].startswith("effloop: x.safetensors computes as it was exported; leave amp and precision out")
    assert refused[1].startswith("effloop: amp: a file computes in float32")
    assert main(["report", "outputs/x"]) == 0
    page = Path("outputs/x/report.html").read_text()
    assert "validation while training, computed in bfloat16." in page
    assert "val, epoch 0, float32, 13 samples" in page


@pytest.mark.nightly
def test_each_split_has_a_folder_and_a_file_has_its_own(run, capsys):
    assert main(["eval", str(run), "split=train"]) == 0
    assert main(["eval", str(run / "checkpoints/last.ckpt")]) == 0
    assert main(["eval", str(run), "out=elsewhere/x"]) == 0
    for folder in (run / "eval/train", run / "checkpoints/last.ckpt.eval/val", Path("elsewhere/x")):
        assert {path.name for path in folder.iterdir()} == FILES
    assert not (run / "eval/val").exists()
    assert main(["eval", str(run), "split=.."]) == 2
    assert len(table(run / "eval/train/worst.csv")) == 32
    with Image.open(run / "eval/train/worst.png") as picture:
        assert picture.width == 8 * 158


def test_a_folder_that_cannot_be_written(run, capsys):
    """One line, and the scores nevertheless; if the folder was asked for, before anything is computed."""
    (run / "eval").write_text("in the way")
    assert main(["eval", str(run)]) == 0
    printed = capsys.readouterr()
    assert "top1" in printed.out
    assert "calibration error" in printed.out
    assert printed.err.count("\n") == 1
    assert "can't be written: " in printed.err
    assert "set out=FOLDER" in printed.err
    for out in ("/proc/x", str(run / "eval"), str(run / "eval/y")):
        assert main(["eval", str(run), f"out={out}"]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith(f"effloop: out: {out} can't be made: ")
        assert (printed.err.count("\n"), printed.out) == (1, "")


@pytest.mark.parametrize(
    ("task", "head", "score", "file"),
    [("multilabel", "labels", ("map", "ap"), "per_class.csv"), ("regression", "label", ("r2", "r2"), "per_output.csv")],
)
def test_other_tasks(task, head, score, file, photos, here):
    """Rows whose mean is the score, as often as it is asked for."""
    lines = [f"path,split,{head}"]
    for number, path in enumerate(sorted(photos.glob("*/*/*.jpg"))):
        split, name = path.parts[-3:-1]
        target = name + "|d" * (number % 3 == 0) if task == "multilabel" else f"{ord(name)}.5"
        lines.append(f"{path},{split},{target}")
    Path("set.csv").write_text("\n".join(lines))
    assert main(once("data=csv", "data.root=set.csv", f"task={task}", *TINY, "epochs=1", "run=x")) == 0
    for _ in range(2):
        assert main(["eval", "outputs/x"]) == 0
    folder = Path("outputs/x/eval/val")
    told = json.loads((folder / "scores.json").read_text())
    values = [float(row[score[1]]) for row in table(folder / file) if row[score[1]]]
    assert np.mean(values) == pytest.approx(told["scores"][score[0]], abs=1e-5)
    assert len(table(folder / "worst.csv")) == 13

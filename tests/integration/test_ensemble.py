"""Several runs as one model: means for images, and folds that are predicted by the models that haven't seen them."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from folders import make_sweep
from numpy.typing import NDArray
from runs import train

from effloop.audit import labels
from effloop.cli.convert import open_all
from effloop.cli.main import main
from effloop.inference.trained import Trained

Rows = list[dict[str, str]]


def table(path: Path) -> Rows:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def probabilities(rows: Rows) -> NDArray[np.float64]:
    return np.array([[float(row[f"p_{name}"]) for name in "abc"] for row in rows])


@pytest.fixture(scope="module")
def folds(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of three folds, the last with images of another size and mean."""
    place = tmp_path_factory.mktemp("folds")
    make_sweep(place / "cv", {"seed": [0, 1, 2]})
    more = ["image_size=24", "model.width=8", "data.mean=[0.2,0.3,0.4]"]
    for fold in range(3):
        words = [f"data.root={photos / 'train'}", "data.folds=3", f"data.fold={fold}", "epochs=1", f"seed={fold}"]
        assert train(photos, *words, f"out={place}", f"run=new{fold}", *more * (fold == 2)) == 0
        shutil.copytree(place / f"new{fold}", place / f"cv/{fold}", dirs_exist_ok=True)
    return place / "cv"


def means(each: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.mean(each, axis=0)


def means_of_logits(each: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    found = np.exp(np.mean(np.log(each), axis=0))  # which have an unknown constant each, which softmax doesn't see
    return np.asarray(found / found.sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("words", "mean"),
    [([], means), pytest.param(["average=logits"], means_of_logits, marks=pytest.mark.slow, id="logits")],
)
def test_the_mean_of_models_each_of_images_as_it_saw_them(folds, photos, here, words, mean):
    images = [str(photos / "val"), "scores=true"]
    for fold in range(3):
        assert main(["predict", str(folds / str(fold)), *images, f"out={fold}.csv"]) == 0
    assert main(["predict", str(folds), *images, "out=all.csv", *words]) == 0
    assert main(["predict", f"{folds}/0,{folds}/2", *images, "out=two.csv", *words]) == 0
    each = [probabilities(table(Path(f"{fold}.csv"))) for fold in range(3)]
    for name, expected in (("all", mean(each)), ("two", mean([each[0], each[2]]))):
        found = table(Path(f"{name}.csv"))
        np.testing.assert_allclose(probabilities(found), expected, atol=2e-5)
        assert [row["class"] for row in found] == ["abc"[best] for best in expected.argmax(axis=1)]


def test_each_sample_is_predicted_by_the_model_that_has_not_seen_it(folds, photos, here):
    assert main(["eval", str(folds)]) == 0
    told = json.loads((folds / "eval/val/scores.json").read_text())
    rows = table(folds / "eval/val/predictions.csv")
    assert [row["path"] for row in rows] == [str(path) for path in sorted(photos.glob("train/*/*.jpg"))]
    losses = []
    for fold in range(3):
        trained = Trained.open(folds / str(fold))
        val = trained.source("val")
        of_fold = {row["path"]: row for row in rows if row["fold"] == str(fold)}
        assert {*of_fold} == {f"{photos}/train/{val.key(index)}" for index in range(len(val))}
        loader = trained.loader()
        for batch in loader.epoch(0):
            logs = trained.forward(batch.images).log_softmax(dim=1).detach()
            for sample, target, values, valid in zip(batch.ids, batch.targets, logs, batch.valid, strict=True):
                if valid:
                    row = of_fold[f"{photos}/train/{val.key(int(sample))}"]
                    np.testing.assert_allclose(probabilities([row])[0], values.exp(), atol=2e-5)
                    assert row["target"] == "abc"[int(target)]
                    losses.append(-float(values[target]))
        loader.close()
    assert len(losses) == len(rows) == told["samples"] == 40
    assert told["scores"]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert told["scores"]["top1"] == sum(row["class"] == row["target"] for row in rows) / 40
    trained = labels.open_run(folds, [])  # and an audit looks at all labels
    splits = open_all(trained.config, "both")
    found = labels.judge(trained, splits, [])
    paths = [f"{photos}/train/{split.key(sample)}" for split in splits.values() for sample in range(len(split))]
    of_path = {row["path"]: row for row in rows}
    np.testing.assert_allclose(found.probabilities, probabilities([of_path[path] for path in paths]), atol=2e-5)
    assert found.score == found.without == f"{told['scores']['top1']:.2%}"


@pytest.mark.usefixtures("without_pictures")
def test_some_folds_and_what_is_refused(folds, finished, photos, here, capsys):
    assert main(["eval", f"{folds}/0,{folds}/1", "out=two"]) == 0
    rows = table(Path("two/predictions.csv"))
    assert {row["fold"] for row in rows} == {"0", "1"}
    assert (
        f"{40 - len(rows)} of 40 samples aren't scored: they are in the folds of other runs" in capsys.readouterr().err
    )
    assert main(["eval", f"{finished},{finished}", "out=same", "tta=flip"]) == 0  # of one validation split: the mean
    assert not Path("same/predictions.csv").exists()
    alone = Trained.open(finished)
    assert f"{alone.evaluate(alone.loader(), ['flip'])[1]['loss']:.4f}" in capsys.readouterr().out
    Path("x.csv").write_text("name,split\na/003.jpg,train\nc/038.jpg,val\n")  # of whatever division
    assert main(["eval", str(folds), "out=fewer", "data.exclude=x.csv"]) == 0
    out, err = capsys.readouterr()
    assert " on 38 images" in out
    assert "aren't scored" not in err
    assert "isn't divided as" not in err
    shutil.copytree(folds, "unfinished")
    job = Path("unfinished/1/job.json")
    job.write_text(job.read_text().replace("done", "failed"))
    (Path("unfinished/1/state.json")).unlink()
    for name in "ab":
        shutil.copytree(photos / "val" / name, f"few/train/{name}")
    assert train(photos, "data.root=few", "data.val=0.5", "epochs=1", "batch_size=2", "run=few") == 0
    capsys.readouterr()
    for words, line in (
        (["predict", str(folds)], f"each run saw the others' folds; name images, or type effloop eval {folds} for"),
        (["eval", str(folds), "split=train"], "split=train: of these runs some were trained on what others were"),
        (["eval", f"{finished},{folds}/0"], "split=val: of these runs some were trained on what others were validated"),
        (["predict", "unfinished", str(photos)], "'unfinished': not all jobs are done (1 is failed); continue the"),
        (
            ["predict", f"{finished},outputs/few", str(photos)],
            "has the classes a, b, c, outputs/few/checkpoints/best.ck",
        ),
        (["predict", f"{finished},nowhere", str(photos)], "'nowhere' is not there"),
    ):
        assert main(words) == 2
        assert line in capsys.readouterr().err

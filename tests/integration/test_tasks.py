"""Whole runs of several labels and of numbers: trained, resumed, scored, applied, exported, on ranks."""

import csv
import json
from pathlib import Path

import pytest
import torch
from images import encode, photo
from ranks import run_script
from runs import TINY, once, rows, stopping_at

import effloop
from effloop.checkpoint import files
from effloop.cli.main import main
from effloop.inference.formats import formats
from effloop.inference.trained import Trained

TASKS = ["multilabel", "regression"]
NAMES = {"multilabel": ["blue", "green", "red"], "regression": ["height", "grey"]}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and a table of each kind: which colours are bright; numbers far from 0."""
    root = tmp_path_factory.mktemp("table")
    lines: dict[str, list[list[object]]] = {task: [] for task in TASKS}
    for number in range(53):
        pixels = photo(28, 30, seed=number) // 2
        bright = [place for place in range(3) if number >> place & 1]
        pixels[:, :, bright] += 120
        (root / f"{number:02}.jpg").write_bytes(encode(pixels, "JPEG"))
        common = [f"{number:02}.jpg", "val" if number >= 40 else "train"]
        lines["multilabel"].append([*common, "|".join(["red", "green", "blue"][place] for place in bright)])
        lines["regression"].append([*common, 1000.5 + number, float(pixels.mean())])
    for task, targets in (("multilabel", ["labels"]), ("regression", NAMES["regression"])):
        with (root / f"{task}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["file_name", "split", *targets], *lines[task]])
    return root


def words(table: Path, task: str, *more: str) -> list[str]:
    label = ["data.label=[height,grey]"] if task == "regression" else []
    return once(f"task={task}", "data=csv", f"data.root={table / task}.csv", *label, *TINY, *more)


@pytest.fixture(scope="module")
def runs(table: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each task, with averaged weights and accumulated gradients, in 16 bit where that is possible."""
    out = tmp_path_factory.mktemp("runs")
    more = (f"out={out}", "optim.ema=0.5", "accumulate=2", "epochs=3", "precision=bf16")
    for task in TASKS:
        assert main(["train", *words(table, task, f"run={task}", *more)]) == 0
    return {task: out / task for task in TASKS}


@pytest.mark.parametrize("task", TASKS)
def test_eval_has_the_runs_scores(runs, task):
    """Also where the thresholds of the best epoch, or the scale, are all that it knows."""
    trained = Trained.open(runs[task], ["precision=bf16"])
    best = json.loads((runs[task] / "summary.json").read_text())["best"]
    assert trained.evaluate(trained.loader())[0] == pytest.approx(
        {key: value for key, value in best.items() if key != "epoch"}, rel=1e-6
    )
    state = files.read(runs[task] / "checkpoints" / "best.ckpt")
    assert state["task"] == trained.task.state_dict()
    assert state["target_names"] == NAMES[task]
    if task == "multilabel":
        assert any(value != 0.5 for value in state["task"]["thresholds"])
    else:
        assert state["task"]["mean"][0] == pytest.approx(1020)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.nightly
def test_resumed_to_the_bit(runs, table, task, tmp_path, capsys):
    more = (f"out={tmp_path}", "run=x", "optim.ema=0.5", "accumulate=2", "epochs=3", "precision=bf16")
    with stopping_at(1):
        assert main(["train", *words(table, task, *more)]) == 130
    assert main(["resume", str(tmp_path / "x")]) == 0
    assert rows(tmp_path / "x") == rows(runs[task])
    if task == "regression":
        assert main(["resume", str(runs[task]), "epochs=4", "task.standardise=false"]) == 2
        assert "task.standardise=true; keep it" in capsys.readouterr().err


EXPORTS = [("multilabel", "state_dict", ""), ("regression", "pt2", "half")]


@pytest.mark.parametrize(("task", "to", "option"), EXPORTS)
@pytest.mark.nightly
def test_exported(runs, task, to, option, tmp_path):
    """In the targets' units, with what it was tuned to; weights have the model's own names."""
    path = tmp_path / f"model{formats[to].suffix}"
    more = [f"{option}=true"] if option else []
    assert main(["export", str(runs[task]), f"to={to}", f"out={path}", *more]) == 0
    said = json.loads(formats[to]().read_metadata(path) or "")
    assert said["task_state"] == files.read(runs[task] / "checkpoints" / "best.ckpt")["task"]
    assert said["target_names"] == NAMES[task]
    exported, plain = Trained.open(path), Trained.open(runs[task], ["precision=fp32"])
    assert exported.evaluate(exported.loader())[0] == pytest.approx(
        plain.evaluate(plain.loader())[0], rel=0.02 if option else 1e-4
    )
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(exported.model(images), plain.model(images), rtol=1e-4, atol=0.1 if option else 1e-3)
    if to == "state_dict":
        from safetensors.torch import load_file

        assert {*load_file(path)} == {*files.read(runs[task] / "checkpoints" / "best.ckpt")["model"]}


@pytest.mark.parametrize("task", TASKS)
def test_the_mean_of_models(runs, table, task, tmp_path):
    """Of probabilities, or of numbers in their units, of which each model has a scale of its own."""
    found, checkpoints = [], runs[task] / "checkpoints"
    for number, run in enumerate(["best.ckpt", "last.ckpt", f"best.ckpt,{checkpoints}/last.ckpt"]):
        out = tmp_path / f"{number}.csv"
        words = ["scores=true"] * (task == "multilabel")
        assert main(["predict", f"{checkpoints}/{run}", str(table), f"out={out}", *words]) == 0
        names = [f"p_{name}" for name in NAMES[task]] if words else NAMES[task]
        with out.open(newline="") as file:
            found.append(torch.tensor([[float(row[name]) for name in names] for row in csv.DictReader(file)]))
    torch.testing.assert_close(found[2], (found[0] + found[1]) / 2, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.slow
def test_predicted(runs, table, task, tmp_path, capsys):
    """A column of labels, or of each number by its name; the same from Python."""
    out = tmp_path / "found.csv"
    assert main(["predict", str(runs[task]), str(table), f"out={out}", "top=2"]) == 2
    assert f"top: 2, but task={task} ranks no classes" in capsys.readouterr().err
    assert main(["predict", str(runs[task]), str(table), f"out={out}", "scores=true"]) == 0
    with out.open(newline="") as file:
        found = list(csv.DictReader(file))
    row = effloop.load(runs[task]).predict(table / "47.jpg", every=True)[0]
    (ours,) = (each for each in found if each["path"].endswith("47.jpg"))
    if task == "multilabel":
        assert [*row] == ["labels", "p_blue", "p_green", "p_red"]
        assert {name for each in found for name in each["labels"].split("|")} <= {"", *NAMES[task]}
        assert ours["labels"] == row["labels"]
    else:
        assert [*row] == ["height", "grey"]
        assert float(ours["height"]) == pytest.approx(row["height"], rel=1e-3)
        assert 900 < row["height"] < 1100


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("task", TASKS)
def test_views(runs, task):
    assert main(["eval", str(runs[task]), "tta=flip"]) == 0


SCRIPT = """
    import json, torch, effloop
    trainer = effloop.build_trainer(effloop.compose({overrides}))
    trainer.model.load_state_dict(torch.load({checkpoint!r}, weights_only=True)["model"])
    scores = trainer.evaluate(trainer.val.epoch(0))
    print(json.dumps([scores, trainer.task.state_dict()]))
    trainer.parallel.close()
"""


@pytest.mark.parametrize(
    ("task", "world_size"), [("multilabel", 2), pytest.param("regression", 3, marks=pytest.mark.nightly)]
)
def test_ranks_score_the_same(runs, table, task, world_size, tmp_path):
    """And thresholds: 13 samples are shared by none of them. Sums of float64 may differ in the last of 16 digits."""
    checkpoint = str(runs[task] / "checkpoints" / "best.ckpt")
    more = ("device=cpu", "batch_size=4", f"out={tmp_path}")
    alone = effloop.build_trainer(effloop.compose(words(table, task, *more)))
    alone.model.load_state_dict(files.read(Path(checkpoint))["model"])
    scores, state = alone.evaluate(alone.val.epoch(0)), alone.task.state_dict()
    overrides = words(table, task, *more, "parallel=ddp")
    for code, out, err in run_script(SCRIPT.format(overrides=overrides, checkpoint=checkpoint), tmp_path, world_size):
        assert code == 0, err
        rel = 0 if task == "multilabel" else 1e-14
        assert json.loads(out.splitlines()[-1]) == [pytest.approx(scores, rel=rel, abs=0), state]


def test_other_kinds_of_targets_are_refused(runs, table, tmp_path, capsys):
    """Of the same names, too."""
    lines = [f"{table}/0{place}.jpg,val,{name},0.5,0.25,1.5\n" for place, name in enumerate(NAMES["multilabel"])]
    root = tmp_path / "other.csv"
    root.write_text("".join(["file_name,split,label,blue,green,red\n", *lines]))
    words = ["eval", str(runs["multilabel"]), f"data.root={root}"]
    for label, targets, kind in (("label", "classes", "one class"), ("[blue,green,red]", "numbers", "numbers")):
        assert main([*words, f"data.label={label}", f"data.targets={targets}"]) == 2
        error = capsys.readouterr().err
        assert f"other.csv:val has {kind} for each image, and task=multilabel learns several labels" in error

"""Keys of the step, through the whole of a trainer."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TINY, train

import effloop
from effloop.cli.main import main
from effloop.config import load
from effloop.errors import PROGRAM, ConfigError, warn
from effloop.measure.advice import advise
from effloop.measure.loops import alone
from effloop.optim import EMA, NoEMA
from effloop.train.trainer import Trainer

QUIET = ("record=none", "checkpoint=none")


def build(photos: Path, *overrides: str, **options: Any) -> Trainer:
    return effloop.build_trainer(effloop.compose([f"data.root={photos}", *TINY, *QUIET, *overrides]), **options)


def test_gradients_are_clipped_to_the_norm(photos, here):
    trainer = build(photos, "max_grad_norm=0.001", "optim=sgd", "optim.momentum=0", "optim.nesterov=false")
    lengths = []
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: lengths.append(
            torch.linalg.vector_norm(torch.cat([p.grad.flatten() for g in optimizer.param_groups for p in g["params"]]))
        )
    )
    trainer.train_epoch(trainer.train.epoch(0))
    assert len(lengths) == 5
    assert lengths == [pytest.approx(0.001, rel=1e-3)] * 5


def test_the_average_is_evaluated_and_saved(photos, here):
    overrides = ("optim.ema=0.9", "record.tensorboard=false", "run=a")
    assert train(photos, *overrides) == 0
    lines = [json.loads(line) for line in Path("outputs/a/metrics.jsonl").read_text().splitlines()]
    state = torch.load("outputs/a/checkpoints/last.ckpt", weights_only=True)
    assert state["average"]["updates"] == 10
    trainer = build(photos, "resume=outputs/a", "optim.ema=0.9", "epochs=3")
    assert isinstance(trainer.average, EMA)
    averaged = trainer.evaluate(trainer.val.epoch(0))
    assert averaged["loss"] == pytest.approx(lines[-1]["loss"], abs=0)
    assert all(torch.equal(value, state["model"][name]) for name, value in trainer.average.model.state_dict().items())
    assert all(torch.equal(value, state["trained"][name]) for name, value in trainer.model.state_dict().items())
    trainer.average = NoEMA(trainer.model)
    assert trainer.evaluate(trainer.val.epoch(0)) != averaged


@pytest.mark.nightly
def test_an_average_of_format_2_goes_on_to_the_bit(photos, here):
    assert train(photos, "optim.ema=0.9", "run=whole", "epochs=2", "schedule=constant") == 0
    assert train(photos, "optim.ema=0.9", "run=first", "epochs=1", "schedule=constant") == 0
    path = Path("outputs/first/checkpoints/last.ckpt")
    state = torch.load(path, weights_only=True)
    old = {"model": state.pop("trained"), "average": {**state["average"], "model": state["model"]}}
    torch.save({**state, **old, "format": 2}, path)
    assert train(photos, "optim.ema=0.9", "run=second", "epochs=2", "schedule=constant", "resume=outputs/first") == 0
    whole, second = (
        torch.load(f"outputs/{name}/checkpoints/last.ckpt", weights_only=True) for name in ("whole", "second")
    )
    assert whole["average"] == second["average"]
    for key in ("model", "trained"):
        assert all(torch.equal(whole[key][name], second[key][name]) for name in whole[key])


@pytest.mark.parametrize(("split", "warned"), [("train", True), ("val", False)])
def test_validation_on_the_training_images_is_said(photos, here, capsys, split, warned):
    warn.cache_clear()
    trainer = build(photos, f"data.val_split={split}")
    said = f"effloop: warning: validation uses the training images ({photos}/train)"
    assert capsys.readouterr().err.startswith(said) is warned
    assert any(note.startswith("validation uses") for note in trainer.notes) is warned


@pytest.mark.parametrize("words", [(), ("data.val_split=null", "data.folds=2", "data.fold=0"), ("data.check=0",)])
def test_images_in_both_splits_are_said(photos, here, capsys, words):
    warn.cache_clear()
    root = shutil.copytree(photos, here / "own photos")
    for copy in ("val/b/x.jpg", *(f"train/a/{number:03}.jpg" for number in range(3, 40, 3))):
        shutil.copy(root / "train/a/000.jpg", root / copy)
    trainer = build(root, *words, f"data.cache={'pixels' if words else 'none'}")
    notes = [note for note in trainer.notes if "to the byte" in note]
    fix = "data.group=copies keeps them on one side" if words else "data.exclude=audit.csv leaves them out"
    typed = shlex.join(["audit", f"data.root={root}", *words])
    said = f": scores are too good; {PROGRAM} {typed} shows them, {fix}"
    assert [note[note.index(": scores") :] for note in notes] == [said] * (words != ("data.check=0",))
    assert capsys.readouterr().err == "".join(f"effloop: warning: {note}\n" for note in notes)


def test_frozen_layers_stay(photos, here):
    trainer = build(photos, "model.freeze=[features]", advise=advise)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train_epoch(trainer.train.epoch(0))
    changed = [name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["head.weight", "head.bias"]
    assert any("are frozen" in note for note in trainer.notes)


def test_training_starts_from_given_weights(photos, here):
    """But those of a checkpoint come before them."""
    assert train(photos, "run=a", "epochs=1") == 0
    resumed = build(photos, "resume=outputs/a", "model.weights=nowhere.pt")
    assert "weights: those of outputs/a/checkpoints/last.ckpt; model.weights is not read" in resumed.notes
    trainer = build(photos, "model.weights=outputs/a")
    state = torch.load("outputs/a/checkpoints/best.ckpt", weights_only=True)["model"]
    assert all(torch.equal(value, state[name]) for name, value in trainer.model.state_dict().items())
    assert any(note.startswith("weights: ") for note in trainer.notes)


def test_growing_sizes(photos, here):
    trainer = build(photos, "progressive=[16,24]", "image_size=32", "epochs=3")
    sizes = [next(iter(trainer.train.epoch(epoch))).images.shape[-1] for epoch in range(3)]
    assert sizes == [16, 16, 24]
    assert next(iter(trainer.val.epoch(0))).images.shape[-1] == 32


def test_a_size_for_evaluation_alone(photos, here):
    """FixRes: a run's config has it by the names of the keys that it is short for."""
    assert train(photos, "run=a", "epochs=1", "image_size=16", "eval_image_size=[24,20]") == 0
    kept = load(Path("outputs/a/config.yaml"))
    assert (kept.image_size, kept.progressive, kept.eval_image_size) == ([24, 20], [16], None)
    assert effloop.load("outputs/a").image_size == (24, 20)
    sizes = [effloop.build_loader(kept, split).samples([0]).images.shape[2:] for split in ("train", "val")]
    assert sizes == [(16, 16), (24, 20)]
    assert (alone(kept, "progressive=[]").size, alone(kept).size) == ((16, 16), (24, 20))  # what is measured
    assert not effloop.compose(["image_size=16", "eval_image_size=[16,16]"]).progressive
    with pytest.raises(ConfigError, match=r"^eval_image_size contradicts progressive=\[16\]"):
        effloop.compose(["progressive=[16]", "eval_image_size=24"])


def test_a_global_batch_is_made_of_batches(photos, here):
    """As by `batch_size` and `accumulate`; the run's config keeps what was asked for."""
    assert train(photos, "run=a", "epochs=1", "batch_size=6", "global_batch=16") == 0
    assert train(photos, "run=b", "epochs=1", "batch_size=4", "accumulate=4") == 0
    assert "step   16 images = 4 per rank x 1 (ranks) x 4 (accumulated)" in Path("outputs/a/log.txt").read_text()
    kept = load(Path("outputs/a/config.yaml"))
    assert (kept.batch_size, kept.accumulate, kept.global_batch) == (6, 1, 16)
    weights = [torch.load(f"outputs/{run}/checkpoints/last.ckpt", weights_only=True)["model"] for run in "ab"]
    assert all(map(torch.equal, weights[0].values(), weights[1].values()))
    batches = [(torch.zeros(5, 3, 16, 16), torch.zeros(5, dtype=torch.long))] * 4
    with pytest.raises(ConfigError, match=r"^probe, global_batch, parallel.virtual: need images"):
        effloop.build_trainer(effloop.compose([*TINY, "global_batch=16"]), train=batches, val=batches)


@pytest.mark.slow
def test_auto_measures_and_says_so_and_leaves_no_trace(photos, here):
    trainer = build(photos, "channels_last=auto", "cudnn_benchmark=auto")
    plain = build(photos)
    assert [note.partition(" took")[0] for note in trainer.notes[:2]] == [
        "channels_last: auto",
        "cudnn_benchmark: auto",
    ]
    assert all(torch.equal(*pair) for pair in zip(trainer.model.parameters(), plain.model.parameters(), strict=True))
    trainer.train_epoch(trainer.train.epoch(0))
    plain.train_epoch(plain.train.epoch(0))
    assert trainer.task.scores(trainer.metrics.read()) == pytest.approx(
        plain.task.scores(plain.metrics.read()), rel=1e-5
    )


@pytest.mark.slow
def test_compiled_training_is_the_same_to_rounding(photos, here):
    compiled, plain = build(photos, "compile=true"), build(photos)
    assert any(note.startswith("compile  ") for note in compiled.notes)
    for trainer in (compiled, plain):
        trainer.train_epoch(trainer.train.epoch(0))
    assert compiled.task.scores(compiled.metrics.read()) == pytest.approx(
        plain.task.scores(plain.metrics.read()), rel=1e-3
    )
    assert compiled.evaluate(compiled.val.epoch(0)) == pytest.approx(plain.evaluate(plain.val.epoch(0)), rel=1e-2)
    assert compiled.model.state_dict().keys() == plain.model.state_dict().keys()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("compile=maybe", "compile: 'maybe' is not allowed; set true, false or auto"),
        ("progressive=[16,16,16]", "progressive: 3 sizes for epochs=2"),
    ],
)
def test_what_is_refused(override, line):
    with pytest.raises(ConfigError, match="^" + line.replace("[", r"\[")):
        effloop.compose([*TINY, override])


def test_a_run_goes_on_with_what_was_settled(photos, here):
    assert train(photos, "run=a", "epochs=1") == 0
    assert main(["resume", "outputs/a", "epochs=2", "cudnn_benchmark=auto"]) == 0
    assert "cudnn_benchmark: true" in Path("outputs/a/config.yaml").read_text()


def test_a_script_leaves_behind_how_its_run_ended(photos, here):
    def stopping(*_: object) -> bool:
        raise ValueError("no")

    def state(run: str) -> tuple[str, str]:
        found = json.loads(Path("outputs", run, "state.json").read_text())
        return found["state"], found["reason"]

    build(photos, "epochs=1", "run=x").fit()
    assert state("x") == ("done", "")
    trainer = build(photos, "epochs=2", "run=y")
    trainer.prunes = stopping
    with pytest.raises(ValueError, match="no"):
        trainer.fit()
    assert state("y") == ("failed", "ValueError: no")

"""A linear probe: only the head is trained, on features that are computed once, and the run is like any other."""

from itertools import chain
from pathlib import Path

import pytest
import torch
from runs import TINY, rows, train

import effloop
from effloop.cli.main import main
from effloop.data.loader import FeatureStream
from effloop.errors import ConfigError, EffLoopError
from effloop.train.trainer import Trainer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where features are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "effloop"


def state(name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(f"outputs/{name}/checkpoints/last.ckpt", weights_only=True)["model"]
    return found


def build(photos: Path, *overrides: str) -> Trainer:
    silent = ("record=none", "checkpoint=none")
    return effloop.build_trainer(effloop.compose([f"data.root={photos}", *TINY, *silent, *overrides]))


@pytest.mark.slow
def test_the_run_is_the_whole_network_with_another_head(photos, finished, here, cache, capsys):
    words = (f"model.weights={finished}", "probe=5", "amp=true", "run=a")
    assert train(photos, *words) == 0
    given = torch.load(finished / "checkpoints" / "best.ckpt", weights_only=True)["model"]
    ours = state("a")
    assert ours.keys() == given.keys()
    assert {name for name in ours if not torch.equal(ours[name], given[name])} == {"head.weight", "head.bias"}
    last = rows(Path("outputs/a"))[-1]
    assert last["step"] == 2 * 5 * 5
    capsys.readouterr()
    assert main(["eval", "outputs/a/checkpoints/last.ckpt", "amp=true"]) == 0
    assert f"{last['loss']:.4f}" in capsys.readouterr().out  # from images, what the run had from features
    assert train(photos, "model.weights=outputs/a", "run=b", "epochs=1") == 0


def test_features_are_what_the_head_is_given(photos, finished, here, cache):
    trainer = build(photos, f"model.weights={finished}", "probe=3", "data.tail=wrap")
    stream = trainer.train
    assert isinstance(stream, FeatureStream)
    assert len(stream) == 3 * 5
    model = build(photos, f"model.weights={finished}").model.eval()
    config = effloop.compose([f"data.root={photos}", *TINY, "data.val_split=train"])
    for batch in effloop.build_loader(config, "val").epoch(0):
        with torch.no_grad():
            wanted = model.get_submodule("features")(batch.images).mean(dim=(2, 3))
        torch.testing.assert_close(torch.from_numpy(stream.features[batch.ids[batch.valid]]), wanted[batch.valid])
    seen = [batch.ids.tolist() for batch in stream.epoch(0)]
    passes = [sorted(chain.from_iterable(seen[start : start + 5])) for start in (0, 5, 10)]
    assert passes == [[*range(40)]] * 3
    assert seen[:5] != seen[5:10]
    assert seen[7:] == [batch.ids.tolist() for batch in stream.epoch(0, samples_seen=7 * 8)]
    assert all(
        torch.equal(batch.targets, torch.tensor(stream.loader.plan.source.targets[batch.ids]).long())
        for batch in stream.epoch(1)
    )


@pytest.mark.nightly
def test_resumed_to_the_bit(photos, finished, here, cache):
    words = (f"model.weights={finished}", "probe=2", "schedule=constant", "optim.ema=0.9")
    assert train(photos, *words, "run=whole") == 0
    assert train(photos, *words, "run=half", "epochs=1") == 0
    assert train(photos, *words, "run=rest", "resume=outputs/half") == 0
    assert all(torch.equal(value, state("rest")[name]) for name, value in state("whole").items())
    for probe in (0, 3):
        with pytest.raises(ConfigError, match=f"probe: the checkpoint was trained with 2, not {probe}; keep probe=2"):
            build(photos, "schedule=constant", f"probe={probe}", "resume=outputs/half")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["probe=-1"], "probe: -1 is not allowed; set a number of passes, or 0"),
        (
            ["augment.mixup=0.2"],
            "augment.mixup: is for training on images, and probe=1 on features; set augment.mixup=0",
        ),
        (["compile=true"], "compile: is for training on images"),
    ],
)
def test_what_is_refused(words, line, photos, here, cache):
    with pytest.raises(EffLoopError) as caught:
        build(photos, "probe=1", *words)
    assert str(caught.value).startswith(line)
    assert not list(here.iterdir())

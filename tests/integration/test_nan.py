"""`nan=stop` and `nan=skip`: losses and gradients that aren't finite."""

import json
import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from poisoned import outcome, positions
from ranks import run_script
from runs import TINY, once, rows, train

from effloop.errors import DivergedError
from effloop.parallel import Parallel, ParallelConfig
from effloop.runs.reader import read_run
from effloop.train.nan import StopOrSkip, all_finite

WORDS = "device=cpu batch_size=4 record.tensorboard=false schedule=constant"
RUN = once(*TINY, *WORDS.split())
POISONED = int(os.environ.get("EFFLOOP_POISONED", "20"))


def in_ranks(
    overrides: list[str], where: list[int], tmp_path: Path, *, out: bool = False, resume: str = ""
) -> list[dict[str, Any]]:
    """What `outcome` says on each of two ranks."""
    (tmp_path / "asked.json").write_text(json.dumps([overrides, where, out, resume]))
    here = Path(__file__).parents[1]
    script = f"""
        import runpy, sys
        sys.path.insert(0, {str(here)!r})
        sys.argv = ["poisoned", {str(tmp_path / "asked.json")!r}]
        runpy.run_module("poisoned", run_name="__main__")
    """
    ended = run_script(script, tmp_path)
    assert [code for code, _, _ in ended] == [0, 0], ended
    return [json.loads(said.splitlines()[-1]) for _, said, _ in ended]


def check_skipped(
    found: dict[str, Any], without: dict[str, Any], ranks: list[dict[str, Any]], where: list[int]
) -> None:
    """The poisoned updates are listed with their samples, and the weights are as without them."""
    assert not found["line"]
    assert [entry["step"] for entry in found["list"]] == where
    for entry in found["list"]:
        given = [rank["ids"][str(entry["step"])] for rank in ranks]
        poisoned = entry["step"] // 2 % len(ranks)
        by_loss = entry["step"] % 2 == 0
        assert entry["what"] == ("loss" if by_loss else "gradient")
        assert entry["ids"] == sorted(given[poisoned] if by_loss else [*chain(*given)])
        assert len(entry["names"]) == len(entry["ids"])
    assert found["weights"] == without["weights"]
    assert all(found["kept"])


def plain(found: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(found)))


@pytest.mark.slow
def test_skipped_batches_leave_no_trace(photos, here):
    where = positions(6, 40)
    overrides = [f"data.root={photos}", *once(*RUN, "epochs=4"), "optim.ema=0.9"]
    found, left_out = (plain(outcome([*overrides, f"run={out}", "nan=skip"], where, out=out)) for out in (False, True))
    check_skipped(found, left_out, [found], where)


@pytest.mark.nightly
def test_ranks_skip_the_same_batches(photos, tmp_path):
    epochs = max(4, POISONED * 12 // 5)
    where = positions(POISONED, epochs * 5, seed=2)
    overrides = [f"data.root={photos}", *once(*RUN, f"epochs={epochs}"), "nan=skip"]
    overrides += ["parallel=ddp", "precision=bf16"]
    ranks = in_ranks([*overrides, "run=found"], where, tmp_path)
    left_out = in_ranks([*overrides, "run=out"], where, tmp_path, out=True)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    for rank, without in zip(ranks, left_out, strict=True):
        check_skipped(rank, without, ranks, where)


@pytest.mark.nightly
@pytest.mark.parametrize("poison", [14, 15])  # a loss, a gradient
def test_ranks_stop_together(photos, tmp_path, poison):
    one, other = in_ranks(
        [f"data.root={photos}", *once(*RUN, "epochs=4"), "parallel=ddp", "run=run"], [poison], tmp_path
    )
    assert one["line"] == other["line"]
    assert f"epoch {poison // 5}, step {poison}, lr" in one["line"]
    assert "last good checkpoint is outputs/run/checkpoints/last.ckpt" in one["line"]
    assert all(one["kept"])


AGAIN = ["nan=skip", "run=run", "checkpoint.every_steps=2", "checkpoint.keep=20", "record.log_every=100"]


@pytest.mark.nightly
def test_what_ranks_do_again_is_listed_once(photos, tmp_path):
    """From the step 4 on; and counted once."""
    words = [f"data.root={photos}", *once(*RUN, "epochs=2"), *AGAIN, "parallel=ddp"]
    whole = in_ranks(words, [3, 6, 9], tmp_path)
    again = in_ranks(words, [3, 6, 9], tmp_path, resume="outputs/run/checkpoints/step-00000004.ckpt")
    for before, after in zip(whole, again, strict=True):
        assert not after["line"]
        assert after["loaded"] == {"updates": 4, "skipped": 1, "in_a_row": 1}
        assert [row["step"] for row in after["list"]] == [3, 6, 9]
        assert after["counts"] == before["counts"] == {"updates": 10, "skipped": 3, "in_a_row": 1}
        assert (after["list"], after["weights"]) == (before["list"], before["weights"])


@pytest.mark.parametrize("left_out", [[9], pytest.param(list(range(10)), marks=pytest.mark.slow)])
def test_an_epoch_that_ends_before_its_last_batch_has_a_line(photos, here, left_out):
    words = [f"data.root={photos}", *once(*RUN, "epochs=1"), "run=run", "record.log_every=100"]
    assert not outcome(words, left_out, out=True)["line"]
    assert [row["split"] for row in rows(here / "outputs/run")] == ["train", "val"]


def test_it_stops_with_the_samples_and_keeps_the_last_good_checkpoint(photos, here):
    overrides = [f"data.root={photos}", *RUN, "run=run", "accumulate=2"]
    found = outcome(overrides, [16])
    (entry,) = found["list"]
    assert "nan: epoch 1, step 8, lr 0.003: the loss is nan, samples " in found["line"]
    assert entry["ids"] == sorted(found["ids"][16])
    assert "last good checkpoint is outputs/run/checkpoints/last.ckpt" in found["line"]
    assert found["kept"]
    assert all(found["kept"])


@pytest.mark.parametrize("poison", [pytest.param(7, marks=pytest.mark.slow), 9])
def test_it_names_the_update_whose_gradient_is_not_finite(photos, here, poison):
    found = outcome([f"data.root={photos}", *once(*RUN, "epochs=4"), "run=run"], [poison, 10])
    (entry,) = found["list"]
    assert (entry["step"], entry["what"], entry["ids"]) == (poison, "gradient", sorted(found["ids"][poison]))
    assert f"step {poison}, lr 0.003: a gradient is not finite, though the loss is, samples " in found["line"]
    assert found["step"] == poison
    assert all(found["kept"])


def test_weights_that_no_gradient_shows_are_not_saved(here):
    model = torch.nn.Conv2d(1, 1, 1, bias=False)
    single = Parallel(ParallelConfig(name="none"), torch.device("cpu"))
    parts = {"parallel": single, "sums": torch.zeros(1), "scaler": torch.amp.GradScaler(enabled=False)}
    model.weight.grad = torch.zeros_like(model.weight)
    policy = StopOrSkip(skip=False, model=model, averaged=model, accumulate=1, run_dir=here, name=str, **parts)
    policy.update(lambda: True, 0, 3, 1.0)
    policy.check()
    model.weight.data.fill_(float("inf"))
    with pytest.raises(DivergedError, match="step 3, lr 1: the weights are not finite after it"):
        policy.check()


def test_a_learning_rate_that_is_far_too_high(photos, here, capsys):
    assert train(photos, "lr=1e30", "run=run", "record.tensorboard=false") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for word in ("nan: epoch 0, step 1, lr 1e+30: the loss is nan", ".jpg), ", "try a lower lr, max_grad_norm=1"):
        assert word in err
    assert read_run(here / "outputs/run").state == "failed"
    assert not list((here / "outputs/run").glob("checkpoints/*.ckpt"))


@pytest.mark.slow
def test_skipping_ends(photos, here):
    words = [f"data.root={photos}", *RUN, "nan=skip"]
    found = outcome([*words, "run=row"], list(range(3, 20)))
    assert "step 12, lr" in found["line"]
    assert "the 10th skipped update in a row" in found["line"]
    found = outcome(once(*words, "run=share", "epochs=12"), [*range(0, 60, 5), 110])
    assert "13 of 111 updates were skipped" in found["line"]


def test_large_values_are_finite():
    large = torch.full((3,), 3e38)
    assert all_finite([large, torch.zeros(2, dtype=torch.bfloat16)])
    assert not all_finite([large, torch.tensor([float("nan")])])
    assert not all_finite([torch.tensor([1.0, float("inf")])])
    assert all_finite([])

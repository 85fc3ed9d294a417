"""Whether a checkpoint fits what a run is told to do with it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import effloop
from effloop.assemble import checks
from effloop.assemble.environment import batches_of_update, resolved
from effloop.config import to_dict
from effloop.errors import ConfigError
from effloop.parallel import OwnSlice
from effloop.task import TaskConfig


def test_another_task_is_refused():
    config = effloop.compose()
    state: dict[str, Any] = {"config": to_dict(config)}
    checks.check_same_model(config, state)
    with pytest.raises(ConfigError, match="task: the checkpoint was trained with task=classification, not other; "):
        checks.check_same_model(replace(config, task=TaskConfig("other")), state)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["model=resnet18"], "model: the checkpoint holds model=cnn, not model=resnet18; keep model=cnn"),
        (["model=timm", "model.arch=resnet18"], "model: the checkpoint holds model=cnn, not model=timm model.arch=re"),
        (["model.width=8"], "model: the checkpoint holds width 16, not width 8; keep the model"),
    ],
)
def test_another_model_is_named(words, wanted):
    with pytest.raises(ConfigError) as error:
        checks.check_same_model(effloop.compose(words), {"config": to_dict(effloop.compose())})
    assert str(error.value).startswith(wanted)


def test_a_model_of_an_earlier_release_had_no_arguments():
    config = effloop.compose(["model=resnet18"])
    state = to_dict(config)
    del state["model"]["args"], state["model"]["drop_path"]
    checks.check_same_model(config, {"config": state})
    with pytest.raises(
        ConfigError, match=r"^model: the checkpoint holds args \{\}, not args \{'zero_init_residual': Tr"
    ):
        checks.check_same_model(
            effloop.compose(["model=resnet18", "model.args.zero_init_residual=true"]), {"config": state}
        )


def test_other_values_are_one_line():
    config = effloop.compose(["seed=3"])
    state = to_dict(effloop.compose(["augment.ops.flip=null", "run=other"]))
    del state["eval_every"]  # of an earlier release, which hadn't it
    (line,) = checks.changed_values(config, {"config": state})
    assert line.startswith("config not what the checkpoint was trained with: ")
    assert "seed: 0 then, 3 now" in line
    assert "augment.ops.flip.p: not there then, 0.5 now" in line
    assert "run" not in line
    assert "eval_every" not in line
    assert checks.changed_values(config, {"config": to_dict(config)}) == []


@pytest.mark.parametrize(
    ("words", "ranks", "wanted"),
    [
        ("batch_size=8 accumulate=3", 2, (8, 3)),
        ("global_batch=2048 batch_size=128", 2, (128, 8)),
        ("global_batch=2048 batch_size=128", 1, (128, 16)),
        ("global_batch=96 batch_size=40", 1, (32, 3)),
        ("global_batch=96 batch_size=40", 3, (32, 1)),
        ("global_batch=4 batch_size=40", 4, (1, 1)),
        ("global_batch=3 batch_size=2", 1, (1, 3)),
        ("global_batch=13 batch_size=12", 1, "global_batch: 13 images make batches of 1, .*; set global_batch=12, or"),
        ("global_batch=64", 3, "global_batch: 64 images can't be divided among 3 ranks; set global_batch=66"),
        ("global_batch=2", 3, "global_batch: 2 images can't be divided among 3 ranks; set global_batch=3"),
        ("global_batch=8 accumulate=2", 1, "accumulate: 2 contradicts global_batch=8; set 1"),
    ],
)
def test_global_batch(words, ranks, wanted):
    if isinstance(wanted, tuple):
        assert batches_of_update(effloop.compose(words.split()), ranks) == wanted
        return
    with pytest.raises(ConfigError, match=f"^{wanted}"):
        batches_of_update(effloop.compose(words.split()), ranks)


@pytest.mark.parametrize(
    ("then", "now", "wanted"),
    [
        ((2, "global_batch=64 batch_size=16"), (1, "global_batch=64 batch_size=16"), None),
        ((2, "global_batch=64 batch_size=16"), (4, "global_batch=64 batch_size=8"), None),
        ((2, "global_batch=64 batch_size=16"), (2, "batch_size=16 accumulate=2"), None),
        ((1, "batch_size=16 accumulate=2"), (1, "global_batch=32 batch_size=16"), None),
        ((1, "global_batch=64 batch_size=16"), (1, "global_batch=32 batch_size=16"), "accumulate: .* 4, not 2; keep"),
        ((2, "global_batch=64 batch_size=16"), (1, "batch_size=16 accumulate=4"), "batch_size: .* keep batch_size=32"),
    ],
)
def test_a_global_batch_is_kept_on_other_ranks(then, now, wanted):
    state = {"config": to_dict(effloop.compose(then[1].split())), "world_size": then[0], "progress": {"epoch": 0}}
    del state["config"]["global_batch" if "global" not in then[1] else "nan"]  # as of an earlier release
    ranks = OwnSlice(0, now[0], now[0], torch.device("cpu"))
    config = resolved(effloop.compose(now[1].split()), ranks)
    if wanted is None:
        checks.check_resumable(config, state, world_size=now[0], in_place=True)
        return
    with pytest.raises(ConfigError, match=f"^{wanted}"):
        checks.check_resumable(config, state, world_size=now[0], in_place=True)


def test_other_tensors_are_listed_up_to_five():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    tensors: dict[str, Any] = dict(model.state_dict())
    checks.check_same_tensors(model, tensors)
    tensors["0.bias"] = torch.zeros(7)
    tensors["more"] = 3
    del tensors["1.weight"]
    words = r"model: 3 of the .*: 1\.weight is missing; more is none of the model's; 0\.bias is \(7,\), not \(3,\); use"
    with pytest.raises(ConfigError, match=words):
        checks.check_same_tensors(model, tensors)
    with pytest.raises(ConfigError, match=r"model: 6 of .*: 0\.weight is missing; .*2\.weight is missing; and 1 more;"):
        checks.check_same_tensors(model, {})


def test_a_position_behind_the_end_of_an_epoch():
    state = {"progress": {"epoch": 0, "samples_seen": 40, "step": 5}}
    checks.check_position(state, 40)
    with pytest.raises(ConfigError, match="the checkpoint is 40 samples into an epoch, which has 39 here; continue"):
        checks.check_position(state, 39)

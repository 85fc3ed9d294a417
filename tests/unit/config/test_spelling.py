"""What an unknown key probably means."""

from __future__ import annotations

import pytest

import effloop
from effloop.config import Config
from effloop.config.keys import keys_of
from effloop.config.spelling import OTHER_NAMES, suggestion
from effloop.registry import groups

CHOSEN = {"data": "folder", "optim": "adamw", "engine": "threads"}


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("batchsize", "did you mean 'batch_size'?"),
        ("optim.weight_decy", "did you mean 'optim.weight_decay'?"),
        ("weight_decay", "did you mean 'optim.weight_decay'?"),
        ("momentum", "did you mean 'optim.momentum' of optim=sgd?"),
        ("optimizer", "did you mean 'optim'?"),
        ("max_epochs", "did you mean 'epochs'?"),
        ("model.pretrained", "write model.weights=DEFAULT"),
        ("data_root", "did you mean 'data.root'?"),
        ("data.skip_broken", None),
        ("outputs", None),
        ("max_steps", None),
        ("x", None),
    ],
)
def test_hints(key: str, hint: str | None) -> None:
    keys = {name: [*each.defaults] for name, each in keys_of(Config).items()}
    assert suggestion(key, keys, groups, CHOSEN) == hint


def test_other_names_stand_for_what_is_there_and_are_no_keys_themselves() -> None:
    keys = {*keys_of(Config), *groups}
    assert {key.partition("=")[0] for key in OTHER_NAMES.values()} - keys == set()
    assert keys & {*OTHER_NAMES} == set()
    for override in OTHER_NAMES.values():
        if "=" in override:
            effloop.compose(["model=torchvision", "model.arch=resnet18", override])

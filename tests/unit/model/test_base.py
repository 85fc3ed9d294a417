"""What every model can be told."""

from __future__ import annotations

import pytest

import effloop
from effloop.errors import ConfigError


def test_fields_reach_the_config() -> None:
    config = effloop.compose(
        [
            "model=resnet18",
            "model.checkpointing=true",
            'model.freeze=[conv1,*.bn1,"layer[12]"]',
            "model.weights=DEFAULT",
        ]
    ).model
    assert config.checkpointing
    assert config.freeze == ["conv1", "*.bn1", "layer[12]"]
    assert type(config.freeze) is list
    assert config.weights == "DEFAULT"


def test_nothing_is_the_default() -> None:
    config = effloop.compose(["model=cnn"]).model
    assert (config.checkpointing, config.freeze, config.weights) == (False, [], None)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.freeze=['']", "model.freeze: .* has an empty pattern; set"),
        ("model.weights=''", "model.weights: '' is not allowed; set"),
        ("model.checkpointing=blocks", "model.checkpointing"),
        ("model.freeze=conv1", "model.freeze"),
    ],
)
def test_what_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        effloop.compose(["model=cnn", override])
    assert "\n" not in str(caught.value)

"""Keys of the config, described from dataclasses."""

from dataclasses import dataclass, field
from typing import Any

from effloop.config.messages import keys_of
from effloop.model import ModelConfig, models


@dataclass
class OddConfig(ModelConfig):
    """Fields of types that EffLoop's own parts don't have.

    Attributes:
        pair: two of them.
    """

    pair: tuple[int, int] = (1, 2)
    values: list[Any] = field(default_factory=list)
    raw: bytes = b""


def test_keys_of_any_type(monkeypatch):
    monkeypatch.setattr(models, "_found", {**models})  # all are imported now
    models.register("odd", OddConfig)(lambda num_classes: None)
    keys = keys_of()
    pair = keys["model.pair"]
    assert (pair.allowed, pair.meaning, pair.default) == ("any value", "two of them.", "[1, 2]")
    assert pair.owners == "model=odd"
    assert keys["model.values"].allowed == "a list of values"
    assert keys["model.raw"].default == "\"b''\""


def test_a_key_that_parts_have_each_their_own_way():
    loss = keys_of()["task.loss"]
    assert "; bce, focal or asymmetric (multilabel); mse, l1 or huber (regression)" in loss.allowed
    assert " multilabel: bce, " in loss.meaning
    assert " regression: mse (squared error)" in loss.meaning

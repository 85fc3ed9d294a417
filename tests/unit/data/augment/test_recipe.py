import math
from typing import Any

import numpy as np
import pytest

from effloop.batch import ImageSize
from effloop.data.augment import recipe
from effloop.data.augment.base import RecipeConfig
from effloop.data.augment.operation import BadParameterError, check_number, check_range
from effloop.errors import ConfigError


class Grow:
    def __init__(self, size: int, by: float = 2.0) -> None:
        if by <= 0:
            raise BadParameterError(f"by: {by} is not allowed; set a number above 0")
        self.size, self.by = size, by


class Turn:
    def __init__(self, degrees: int = 90) -> None:
        self.degrees = 90 / degrees


OPERATIONS = {"Grow": Grow, "Turn": Turn}


def read(ops: dict[str, Any], order: list[str] | None = None) -> list[recipe.Step[Any]]:
    return recipe.build_steps(RecipeConfig(name="some", ops=ops, order=order), OPERATIONS, ImageSize(32, 32))


def test_the_order_is_the_recipes():
    steps = read({"turn": {"op": "Turn"}, "Grow": {}, "more": {"op": "Grow", "size": 7, "by": 3.0}})
    assert [(step.label, step.name) for step in steps] == [("turn", "Turn"), ("Grow", "Grow"), ("more", "Grow")]
    assert [(step.op.size, step.op.by) for step in steps[1:]] == [(32, 2.0), (7, 3.0)]


def test_null_leaves_out_and_order_reorders():
    ops = {"turn": {"op": "Turn"}, "Grow": None, "more": {"op": "Grow"}}
    assert [step.label for step in read(ops)] == ["turn", "more"]
    assert [step.label for step in read(ops, ["more", "turn"])] == ["more", "turn"]
    assert [step.label for step in read(ops, ["more"])] == ["more"]


def test_random_numbers_are_an_operations_own_wherever_it_stands():
    keys = np.arange(9, dtype=np.uint64)
    first, second, third = read({"a": {"op": "Turn"}, "b": {"op": "Grow"}, "c": {"op": "Grow"}})
    streams = [step.keys(keys) for step in (first, second, third)]
    assert len(np.unique(np.concatenate(streams))) == 27
    (alone,) = read({"b": {"op": "Grow"}})
    np.testing.assert_array_equal(alone.keys(keys), second.keys(keys))
    np.testing.assert_array_equal(second.keys(keys)[3:4], second.keys(keys[3:4]))


REFUSED: tuple[tuple[dict[str, Any], list[str] | None, str], ...] = (
    ({"a": {"op": "Trun"}}, None, "augment.ops.a: no operation 'Trun'; have Grow, Turn; did you mean 'Turn'?"),
    ({"a": {"op": "os.system"}}, None, "augment.ops.a: no operation 'os.system'; have Grow, Turn"),
    (
        *({"flip": {"op": "Turn"}, "Grow": {}, "flp": {"by": 3}, "x": {}, "f": 3}, None),
        "augment.ops.flp: no operation 'flp'; did you mean 'flip' of the recipe? A new one needs",
    ),
    ({"flip": {"op": "Turn"}, "turn": {}}, None, "augment.ops.turn: no operation 'turn'; have Grow, Turn; did you"),
    ({"a": {"op": "Turn", "degree": 3}}, None, "augment.ops.a: Turn has no parameter 'degree'; have degrees; did you"),
    ({"a": {"op": "Grow", "by": -1}}, None, "augment.ops.a.by: -1 is not allowed; set a number above 0"),
    ({"a": {"op": "Turn", "degrees": "x"}}, None, "augment.ops.a: Turn can't take its parameters: unsupported operand"),
    ({"a": 3}, None, "augment.ops.a: 3 is not allowed; write {op: NAME, PARAMETER: VALUE}, or null to leave it out"),
    ({"a": {"op": "Turn"}}, ["b"], "augment.order: no operation is called 'b'; have a"),
    ({"a": {"op": "Turn"}}, ["a", "a"], "augment.order: 'a' stands in it twice; name each operation once"),
    ({"a": None}, None, "augment.ops: the recipe is empty; choose an existing one ("),
)


def test_refuses():
    for ops, order, message in REFUSED:
        with pytest.raises(ConfigError) as caught:
            read(ops, order)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


def test_what_comes_out_has_one_size():
    recipe.check_output_sizes(np.array([[32, 32], [32, 32]]), ImageSize(32, 32))
    with pytest.raises(ConfigError, match="leaves images of several sizes"):
        recipe.check_output_sizes(np.array([[32, 32], [32, 40]]), ImageSize(32, 32))
    with pytest.raises(ConfigError, match="gives images of 40x40, and image_size is 32; set image_size=40, or leave"):
        recipe.check_output_sizes(np.array([[40, 40]]), ImageSize(32, 32))
    with pytest.raises(ConfigError, match="gives images of 32x40, and image_size is 32; set image_size="):
        recipe.check_output_sizes(np.array([[32, 40]]), ImageSize(32, 32))


def test_what_is_no_number_is_refused():
    for value in ("1", None, True, math.nan, math.inf, -math.inf, 10**320, -(10**320)):
        with pytest.raises(BadParameterError, match=r"^p: .* is not allowed; set a number from 0 to 1$"):
            check_number("p", value, 0, 1)
        with pytest.raises(BadParameterError, match=r"^by: .* is not allowed"):
            check_number("by", value, -math.inf, math.inf)
        for pair in ([value, 1], [0, value]):
            with pytest.raises(BadParameterError, match=r"^by: .* is not allowed"):
                check_range("by", pair, -math.inf, math.inf, above=True)


def test_bounds_are_allowed_or_above_them():
    assert [check_number("by", value, 2, 3) for value in (2, 3.0)] == [2.0, 3.0]
    assert check_range("by", (2, 3), 2, 3) == (2.0, 3.0)
    with pytest.raises(BadParameterError, match=r"^by: 3.5 is not allowed; set a number from 2 to 3$"):
        check_number("by", 3.5, 2, 3)
    with pytest.raises(BadParameterError, match=r"^by: \[2, 3\] is not .* above 2 and at most 3$"):
        check_range("by", [2, 3], 2, 3, above=True)

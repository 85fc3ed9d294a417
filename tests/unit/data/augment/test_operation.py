from __future__ import annotations

import math

import pytest

from effloop.data.augment.operation import BadParameterError, check_number, check_probability, check_range

NONE = ["1", None, True, math.nan, math.inf, -math.inf, 10**320, -(10**320)]


@pytest.mark.parametrize("value", NONE, ids=lambda value: str(value)[:9])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(BadParameterError, match=r"^p: .* is not allowed; set a probability from 0 to 1$"):
        check_probability("p", value)
    with pytest.raises(BadParameterError, match=r"^by: .* is not allowed; set a number of at least -inf$"):
        check_number("by", value, -math.inf, math.inf)
    for pair in ([value, 1], [0, value]):
        with pytest.raises(BadParameterError, match=r"^by: .* is not allowed; set \[smallest, largest\], above -inf$"):
            check_range("by", pair, -math.inf, math.inf, above=True)


def test_bounds_are_allowed_or_above_them() -> None:
    assert [check_number("by", value, 2, 3) for value in (2, 3.0)] == [2.0, 3.0]
    assert check_range("by", (2, 3), 2, 3) == (2.0, 3.0)
    with pytest.raises(BadParameterError, match=r"^by: 3.5 is not allowed; set a number from 2 to 3$"):
        check_number("by", 3.5, 2, 3)
    with pytest.raises(BadParameterError, match=r"^by: \[2, 3\] is not .* above 2 and at most 3$"):
        check_range("by", [2, 3], 2, 3, above=True)

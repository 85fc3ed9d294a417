"""No number changes: batches, losses, scores, fingerprints and written files are what they were when last recorded."""

from __future__ import annotations

import pytest
from golden.cases import CASES, RECORD, Lab, golden

GOLDEN = golden()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * case.slow) for name, case in CASES.items()]
)
def test_it_is_what_it_was(name: str, lab: Lab) -> None:
    case, was, here = CASES[name], GOLDEN["environment"], lab.environment
    if differs := [f"{need} is {here[need]}, was {was[need]}" for need in case.needs if here[need] != was[need]]:
        pytest.skip(f"recorded elsewhere: {'; '.join(differs)}; {RECORD} records anew")
    assert case.compute(lab) == GOLDEN["values"][case.key]


def test_nothing_else_is_recorded() -> None:
    assert {case.key for case in CASES.values()} == GOLDEN["values"].keys()

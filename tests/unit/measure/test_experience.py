"""Predictions that are corrected by what came out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import effloop
from effloop import config as configs
from effloop.config import Config
from effloop.measure.diagnosis import Override
from effloop.measure.experience import Experience, note_outcome
from effloop.runs.findings import Findings


def with_overrides(config: Config, *overrides: str) -> Config:
    return configs.from_dict(configs.to_dict(config), overrides, "the config")


@pytest.fixture
def config() -> Config:
    return effloop.compose(["num_workers=1"])


@pytest.fixture
def findings(tmp_path: Path) -> Findings:
    return Findings(tmp_path / "findings.jsonl")


def measured(config: Config) -> Any:
    return SimpleNamespace(
        loop=SimpleNamespace(images_per_s=100.0), with_overrides=lambda *words: with_overrides(config, *words)
    )


def test_what_was_tried_corrects_later_predictions(config: Config, findings: Findings) -> None:
    experience = Experience(findings, config)
    predicted = Override("num_workers=2", 200.0, 2.0, "cores are idle")
    assert experience.corrected(predicted) == predicted
    experience.keep(measured(config), [Override("num_workers=2", 200.0, 2.0, "cores are idle", measured=150.0)])
    found = experience.corrected(predicted)
    assert (found.images_per_s, found.gain, found.factor) == (150.0, 1.5, 0.75)
    assert found.learned is not None
    assert found.learned.startswith("predicted x 0.75, as measured here on 20")
    other = Override("decode=pillow", 200.0, 2.0, "")
    assert experience.corrected(other) == other
    assert Experience(findings, effloop.compose(["num_workers=1", "image_size=32"])).corrected([predicted]) == [
        predicted
    ]


def test_a_correction_is_not_corrected_again(config: Config, findings: Findings) -> None:
    experience = Experience(findings, config)
    for _ in range(3):
        found = experience.corrected(Override("num_workers=2", 200.0, 2.0, ""))
        experience.keep(measured(config), [Override(**{**vars(found), "measured": 150.0})])
    assert experience.corrected(Override("num_workers=2", 200.0, 2.0, "")).images_per_s == pytest.approx(150.0)


def test_a_run_that_was_predicted_is_an_outcome(config: Config, findings: Findings) -> None:
    experience = Experience(findings, config)
    experience.keep(
        measured(config), [Override("num_workers=2", 200.0, 2.0, ""), Override("eval_every=9", None, 2.0, "")]
    )
    note_outcome(findings, config, 90.0)  # as it was: nothing was predicted for that
    assert not findings.rows("outcome")
    note_outcome(findings, with_overrides(config, "num_workers=2", "epochs=3"), 180.0)
    note_outcome(findings, with_overrides(config, "num_workers=2", "seed=3"), 120.0)  # the first one counts
    (row,) = findings.rows("outcome")
    assert (row["override"], row["measured"]) == ("num_workers=2", 1.8)
    assert experience.corrected(Override("num_workers=2", 200.0, 2.0, "")).images_per_s == pytest.approx(180.0)


@pytest.mark.parametrize(
    "row", [{}, {"override": "num_workers=2"}, {"override": "num_workers=2", "measured": 0.0, "predicted": 1.0}]
)
def test_rows_that_lack_something(row: dict[str, Any], config: Config, findings: Findings) -> None:
    experience = Experience(findings, config)
    experience.keep(measured(config), [Override("num_workers=2", 200.0, 2.0, "", measured=150.0)])
    pipeline = findings.rows("outcome")[0]["pipeline"]
    findings.add("outcome", pipeline, **row)
    assert experience.corrected(Override("num_workers=2", 200.0, 2.0, "")).images_per_s == 150.0

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from effloop.report.differences import differences, short_names, swept_values
from effloop.runs.reader import RunRecord


def run(config: dict[str, Any] | None = None) -> RunRecord:
    return RunRecord(path=Path("/run"), config=config or {})


def job(*overrides: str) -> RunRecord:
    return RunRecord(path=Path("/sweep/0"), config={"lr": 1}, job={"overrides": [*overrides]})


class TestSwept:
    def test_overrides_of_jobs(self) -> None:
        jobs = [job("seed=1", "+optim.lr=1e-5", "amp=true"), job("seed=1", "+optim.lr=0.1", "amp=auto")]
        assert swept_values(jobs) == {"optim.lr": [1e-5, 0.1], "amp": ["true", "auto"]}
        assert swept_values(jobs[:1]) == {}

    def test_config_keys_of_any_runs(self) -> None:
        first = {"lr": 0.1, "seed": 1, "run": "a", "resume": None, "objective": "wait", "sweep": {"prune": False}}
        other = {"lr": 0.2, "seed": 1, "run": "b", "resume": "a", "objective": "seconds", "sweep": {"prune": True}}
        runs = [run({**first, "optim": {"lr": 0.1}}), run({**other, "optim": {"lr": 0.2}}), run()]
        assert swept_values(runs) == {"lr": [0.1, 0.2, None]}

    def test_a_part_stands_for_what_only_it_has(self) -> None:
        sgd = {"optim": {"name": "sgd", "lr": 1, "momentum": 0.9}}
        adamw = {"optim": {"name": "adamw", "lr": 2, "betas": [0.9, 0.99]}}
        assert swept_values([run(sgd), run(adamw)]) == {"optim": ["sgd", "adamw"], "optim.lr": [1, 2]}

    def test_models_are_told_apart(self) -> None:
        runs = [run({"model": {"name": "torchvision", "arch": arch}}) for arch in ("resnet18", "resnet50")]
        assert swept_values(runs) == {"model.arch": ["resnet18", "resnet50"]}
        cnn = run({"model": {"name": "cnn", "width": 8}})
        assert swept_values([*runs, cnn]) == {"model": ["resnet18", "resnet50", "cnn"]}
        assert swept_values([runs[0], cnn, run({"model": {"name": "cnn", "width": 16}})]) == {
            "model": ["resnet18", "cnn", "cnn"],
            "model.width": [None, 8, 16],
        }

    @pytest.mark.parametrize(("amp", "wanted"), [(None, "precision"), (False, "amp")])
    def test_amp_beside_precision(self, amp: bool | None, wanted: str) -> None:
        runs = [run({"amp": amp, "precision": {"name": "fp32"}}), run({"amp": True, "precision": {"name": "amp"}})]
        assert list(swept_values(runs)) == [wanted]

    def test_what_never_began_differs_in_nothing(self) -> None:
        assert differences([{"a": 1, "b": 1}, {}, {"a": 2, "b": 1}]) == {"a": [1, None, 2]}


def test_short_names() -> None:
    assert short_names(["lr", "optim.eps", "optim.name", "model.name"]) == {
        **{"lr": "lr", "optim.eps": "eps"},
        **{"optim.name": "optim.name", "model.name": "model.name"},
    }

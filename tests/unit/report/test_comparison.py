import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from effloop.report.comparison import compare_runs, differences, short_names, swept_values, time_by_part
from effloop.report.values import to_text
from effloop.runs.reader import RunRecord

NUMBER = itertools.count()


def run(config: dict[str, Any] | None = None, top1: float | None = None, **facts: Any) -> RunRecord:
    metrics = [] if top1 is None else [{"split": "val", "epoch": 0, "step": 5, "top1": top1, "loss": 1 - top1}]
    path = facts.pop("path", Path(f"/runs/{next(NUMBER)}"))
    return RunRecord(path=path, config=config or {}, metrics=metrics, **facts)


def job(number: int, *overrides: str, state: str = "done", top1: float | None = None) -> RunRecord:
    facts = {"number": number, "overrides": list(overrides), "state": state}
    return run({"lr": 1, "optim": {"lr": 1}}, top1, job=facts, path=Path(f"/sweep/{number}"))


class TestBest:
    def test_all_scores_are_of_the_epoch_that_the_checkpoint_is_of(self):
        """Before there is a summary, too."""
        scores = [(0.5, 0.2), (0.7, 0.4), (0.7, 0.3), (None, 0.1)]
        rows = [
            {"split": "val", "epoch": epoch, "step": epoch, "top1": top1, "loss": loss}
            for epoch, (top1, loss) in enumerate(scores)
        ]
        for by, best in (("top1", (1, 0.7, 0.4)), ("loss", (3, math.nan, 0.1))):
            found = RunRecord(path=Path("/run"), config={"checkpoint": {"best_by": by}}, metrics=rows)
            shown = (found.best["epoch"], found.value("val/top1"), found.value("val/loss"))
            assert shown == pytest.approx(best, nan_ok=True)

    def test_of_those_that_count(self):
        states = ("done", "failed", "killed", "running", "pruned")
        jobs = [job(number, state=state, top1=0.1 * number) for number, state in enumerate(states)]
        assert compare_runs(jobs, "val/top1").best == 4
        assert compare_runs(jobs, "val/loss").best == 4
        assert compare_runs(jobs[:4], "val/top1").best == 3
        assert compare_runs(jobs[:3], "val/top1").best is None  # of one
        assert compare_runs(jobs, "images/s").best is None

    def test_order_and_series(self):
        jobs = [job(n, f"lr={lr}", f"seed={n}", top1=t) for n, (lr, t) in enumerate([(1, 0.2), (2, 0.9), (1, 0.4)])]
        jobs += [job(3, "lr=2", "seed=9", state="failed", top1=1.0)]
        found = compare_runs(jobs, "val/top1")
        assert (found.order, found.series) == ([1, 2, 0, 3], [[1, 3], [2, 0]])
        assert [found.setting(runs) for runs in found.series] == ["lr=2", "lr=1"]
        assert [found.spread("val/top1", runs) for runs in found.series] == ["90.00%", "30.00% ± 14.14%"]
        assert [found.counted(runs) for runs in found.series] == ["1/2", "2"]
        assert compare_runs(jobs, "val/loss").order == [1, 2, 0, 3]

    def test_folds(self):
        words = [(lr, fold) for lr in (1, 2) for fold in (0, 1)]
        jobs = [
            replace(job(n, f"lr={lr}", f"data.fold={fold}", top1=n / 10), data={"val": {"sha256": str(fold)}})
            for n, (lr, fold) in enumerate(words)
        ]
        found = compare_runs(jobs, "val/top1")
        assert (found.over, found.same_data, found.best) == ("folds", True, None)
        assert (found.series, found.best_series) == ([[3, 2], [1, 0]], [3, 2])
        other = [*jobs[:3], replace(jobs[3], data={"val": {"sha256": "other"}})]
        found = compare_runs(other, "val/top1")
        assert (found.same_data, found.best_series) == (False, None)
        seeds = [job(n, f"seed={n % 2}", f"data.fold={n // 2}", top1=n / 10) for n in range(4)]
        found = compare_runs(seeds, "val/top1")
        assert (found.over, found.series) == ("folds and seeds", [[3, 2, 1, 0]])
        assert found.spread("val/top1", found.series[0]) == "15.00% ± 12.91%"


def test_names():
    assert compare_runs([job(0), job(1)], "val/top1").names == ["0", "1"]
    paths = [Path(f"/runs/{day}/{time}/0") for day in "ab" for time in "cd"]
    assert compare_runs([run(path=path, job={"number": 0, "state": "done"}) for path in paths], "wait").names == [
        *("a/c/0", "a/d/0"),
        *("b/c/0", "b/d/0"),
    ]


def test_label():
    comparison = compare_runs([job(0, "optim.lr=1", "a=b"), job(1, "optim.lr=2")], "wait")
    assert [comparison.label(index) for index in (0, 1)] == ["0: lr=1 a=b", "1: lr=2"]
    assert comparison.counts() == "2 runs: 2 done"
    drawn = compare_runs([job(0, "lr=0.0023456789012345"), job(1, "lr=1e-5")], "wait")
    assert [drawn.label(index) for index in (0, 1)] == ["0: lr=0.00234568", "1: lr=1e-05"]


class TestTimeSplit:
    def test_of_the_summary(self):
        times = {"wait": 1.0, "step": 2, "evaluation": 0.5, "checkpoint": 0, "other": None, "more": 9}
        rows = [{"span": "train", "seconds": 100, "wait_s": 1}]
        assert time_by_part(run(summary={"time": times}, perf=rows)) == {"wait": 1.0, "step": 2.0, "evaluation": 0.5}

    def test_so_far(self):
        rows: list[dict[str, Any]] = [
            {"span": "train", "seconds": 3.0, "wait_s": 1.0},
            {"span": "train", "seconds": 2.0, "wait_s": 0.5},
            {"span": "train", "seconds": None},
            {"span": "evaluation", "seconds": 0.25},
            {"span": "checkpoint", "seconds": "long"},
            {"span": "unheard of", "seconds": 1},
        ]
        assert time_by_part(run(perf=rows)) == {"wait": 1.5, "step": 3.5, "evaluation": 0.25}
        assert time_by_part(run()) == {}


def test_words():
    assert [to_text(value) for value in (None, True, 0.1, [1, None], "a\nb", "\x1b[31m", "\udcff")] == [
        *("-", "true", "0.1", "[1,null]", "a\\nb", "\\x1b[31m", "\\udcff")
    ]
    written = compare_runs([RunRecord(path=Path("/run"))], "val/top1").format
    shown = [written("val/top1", 0.5), written("images/s", 1234.5), written("wait", math.nan)]
    assert shown == ["50.00%", "1,234", "-"]
    assert [written("val/loss", value) for value in (1.7, 1e28, math.inf)] == ["1.7000", "1.00e+28", "-"]


def run_differences(config: dict[str, Any] | None = None) -> RunRecord:
    return RunRecord(path=Path("/run"), config=config or {})


def job_differences(*overrides: str) -> RunRecord:
    return RunRecord(path=Path("/sweep/0"), config={"lr": 1}, job={"overrides": [*overrides]})


class TestSwept:
    def test_overrides_of_jobs(self):
        jobs = [
            job_differences("seed=1", "+optim.lr=1e-5", "amp=true"),
            job_differences("seed=1", "+optim.lr=0.1", "amp=auto"),
        ]
        assert swept_values(jobs) == {"optim.lr": [1e-5, 0.1], "amp": ["true", "auto"]}
        assert swept_values(jobs[:1]) == {}

    def test_config_keys_of_any_runs(self):
        first = {"lr": 0.1, "seed": 1, "run": "a", "resume": None, "objective": "wait", "sweep": {"prune": False}}
        other = {"lr": 0.2, "seed": 1, "run": "b", "resume": "a", "objective": "seconds", "sweep": {"prune": True}}
        runs = [
            run_differences({**first, "optim": {"lr": 0.1}}),
            run_differences({**other, "optim": {"lr": 0.2}}),
            run_differences(),
        ]
        assert swept_values(runs) == {"lr": [0.1, 0.2, None]}

    def test_a_part_stands_for_what_only_it_has(self):
        sgd = {"optim": {"name": "sgd", "lr": 1, "momentum": 0.9}}
        adamw = {"optim": {"name": "adamw", "lr": 2, "betas": [0.9, 0.99]}}
        assert swept_values([run_differences(sgd), run_differences(adamw)]) == {
            "optim": ["sgd", "adamw"],
            "optim.lr": [1, 2],
        }

    def test_models_are_told_apart(self):
        runs = [run_differences({"model": {"name": "torchvision", "arch": arch}}) for arch in ("resnet18", "resnet50")]
        assert swept_values(runs) == {"model.arch": ["resnet18", "resnet50"]}
        cnn = run_differences({"model": {"name": "cnn", "width": 8}})
        assert swept_values([*runs, cnn]) == {
            "model": ["torchvision", "torchvision", "cnn"],
            "model.arch": ["resnet18", "resnet50", None],
        }


def test_short_names_and_differences():
    assert differences([{"a": 1, "b": 1}, {}, {"a": 2, "b": 1}]) == {"a": [1, None, 2]}  # one that never began
    assert short_names(["lr", "optim.eps", "optim.name", "model.name"]) == {
        **{"lr": "lr", "optim.eps": "eps"},
        **{"optim.name": "optim.name", "model.name": "model.name"},
    }

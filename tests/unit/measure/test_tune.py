"""The search for the fastest setting, on machines that are simulated; and what a run takes of what was found."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from runs import TINY, once, train

from effloop.cli.main import main
from effloop.errors import ConfigError
from effloop.measure import loops
from effloop.measure.tune import Search, Setting, Turn

USUAL = Setting(num_workers=4, prefetch=2)


class Machine:
    """Loads `per_worker` images/s with each of at most `cores` workers, and trains `step` images/s.

    Attributes:
        seconds: that all turns took so far, one each.
    """

    def __init__(self, per_worker: float, cores: float, step: float, noise: float = 0.0, jitter: float = 0.0) -> None:
        self.per_worker, self.cores, self.step, self.noise, self.jitter = per_worker, cores, step, noise, jitter
        self.seconds = 0.0
        self.random = random.Random(3)

    def speed(self, setting: Setting) -> float:
        ahead = 1 - self.jitter / setting.prefetch  # batches that take longer than others make the loop wait
        loads = self.per_worker * min(setting.num_workers, self.cores) * ahead
        crowd = 1 - 0.01 * max(0.0, setting.num_workers - self.cores)  # they take turns
        return min(loads, self.step) * crowd

    def turn(self, setting: Setting) -> Turn:
        self.seconds += 1
        speed = self.speed(setting)
        return Turn(speed * self.random.uniform(1 - self.noise, 1 + self.noise), max(0.0, 1 - speed / self.step))

    def search(self, minutes: float = 1.0, usual: Setting = USUAL) -> tuple[Setting, Search]:
        search = Search(self.turn, 60 * minutes, clock=lambda: self.seconds)
        return search.run(usual), search

    def best_of_grid(self) -> float:
        grid = (replace(USUAL, num_workers=n, prefetch=p) for n in range(1, 33) for p in (1, 2, 4, 8))
        return max(map(self.speed, grid))


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    "machine",
    [
        *(Machine(100, 1, 1e9), Machine(100, 2, 1e9), Machine(100, 3, 1e9), Machine(100, 12, 1e9)),
        *(Machine(100, 16, 250), Machine(100, 16, 90), Machine(100, 6, 540), Machine(100, 4, 1e9, jitter=0.5)),
    ],
    ids=lambda machine: f"{machine.cores}-{machine.step:g}-{machine.jitter}",
)
def test_as_good_as_the_grid_in_less_time(machine, noise):
    machine = Machine(machine.per_worker, machine.cores, machine.step, noise, machine.jitter)
    best, search = machine.search()
    assert machine.speed(best) >= (0.95 - noise / 2) * machine.best_of_grid()
    assert machine.seconds <= 60
    assert search.ended != ""


def test_the_smaller_setting_where_more_changes_nothing():
    best, search = Machine(100, 16, 90).search()
    assert (best.num_workers, best.prefetch) == (1, 2)
    assert search.ended == "the loop is fed"
    best, search = Machine(100, 2, 1e9).search()
    assert (best.num_workers, best.prefetch) == (2, 2)
    assert search.ended == "more changes little"


@pytest.mark.parametrize(("minutes", "noise"), [(0.1, 0.1), (0.02, 0.0)])
def test_time_is_bounded(minutes, noise):
    """What wasn't compared isn't taken: where there is time for a turn or two, the usual setting stays."""
    machine = Machine(100, 64, 1e9, noise)
    best, search = machine.search(minutes)
    assert machine.seconds <= 8
    assert search.ended == f"{minutes} min are over"
    assert best in search.turns
    assert minutes > 0.1 or noise or (best, search.compared) == (USUAL, False)


def test_a_machine_that_slows_down_decides_nothing():
    machine = Machine(100, 4, 1e9)
    speed = machine.speed
    machine.speed = lambda setting: speed(setting) * (1 - machine.seconds / 100)  # type: ignore[method-assign]
    assert machine.search()[0].num_workers == 4


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Turns of no time; findings of this test alone."""
    monkeypatch.setattr(loops, "TURN_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tune(photos: Path, *words: str) -> int:
    return main(once("tune", f"data.root={photos}", *TINY, "num_workers=auto", *words))


@pytest.mark.nightly
def test_what_is_found_is_used_later(photos, here, short, capsys):
    assert tune(photos, "out=tuned") == 0
    out = capsys.readouterr().out
    result = json.loads((here / "tuned" / "tune.json").read_text())
    words = result["overrides"]
    assert f"train with: effloop train data.root={photos}" in out
    assert out.count(words[0]) == 1
    assert "num_workers=auto" not in out.partition("or with")[0]
    assert list(here.iterdir()) == [here / "tuned"]

    number = result["taken"]["num_workers"]
    assert train(photos, "num_workers=auto", "run=later") == 0
    log = (here / "outputs" / "later" / "log.txt").read_text()
    assert f"num_workers: auto took {number}, as tune found on " in log
    assert "num_workers: auto\n" in (here / "outputs" / "later" / "config.yaml").read_text()
    assert train(photos, "num_workers=auto", "run=other", "batch_size=4") == 0
    assert "num_workers: auto" not in (here / "outputs" / "other" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("engine=inline", "engine: inline loads in the training thread, without workers; set engine=threads"),
        ("parallel=ddp", "parallel: tune measures one process, not ddp; set parallel=none"),
    ],
)
def test_refused(photos, here, capsys, words, line):
    assert tune(photos, words) == ConfigError.exit_code
    assert line in capsys.readouterr().err


def test_out_that_cannot_be_written(photos, here, capsys):
    (here / "file").write_text("")
    assert tune(photos, "out=file/folder") == ConfigError.exit_code
    assert "out: file/folder can't be made: Not a directory; set out=FOLDER" in capsys.readouterr().err

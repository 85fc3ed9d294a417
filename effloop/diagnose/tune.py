"""The fastest number of workers, of batches ahead and of images in a batch, measured on the training loop itself."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from effloop.assemble.resolve import num_workers
from effloop.bench.tables import print_table
from effloop.config import Config
from effloop.data.source.splits import open_split
from effloop.diagnose.tune_search import Search, Setting
from effloop.diagnose.tuned_loop import TunedLoop
from effloop.errors import ConfigError
from effloop.report.figures import BarPanel, plot_bars
from effloop.runs.findings import TUNED, Findings, pipeline_key
from effloop.system.files import write_text

_OTHER_BATCHES = 3  # sizes that are tried beside the one that is asked for


def remembered(config: Config, *, batch: bool) -> dict[str, Any] | None:
    """What an earlier `tune` on this machine has found for this data and pipeline; None if there was none.

    Returns:
        `date`, `overrides` (words for the command line) and `images_per_s`.

    Raises:
        ConfigError, DataError: the training split can't be opened, or there is nothing that could be tuned.
    """
    _check(config)
    asked = _asked(config, batch=batch)
    found = [row for row in _findings(config).rows("tune") if row.get("asked") == asked]
    return found[-1] if found else None


def tune(config: Config, *, minutes: float, batch: bool) -> dict[str, Any]:
    """Measure settings of the loader until the training loop is fed, or more of them changes little; and keep that.

    Args:
        config: what is trained.
        minutes: for measuring.
        batch: also try other sizes of a batch, with `accumulate` such that an update has as many images.

    Returns:
        The figures as they go to JSON: `settings`, the `taken` one among them, its `overrides`, and why it `ended`.

    Raises:
        ConfigError, DataError: the run can't be built, or there is nothing that could be tuned.
    """
    _check(config)
    usual = Setting(config.batch_size, config.accumulate, max(1, num_workers(config)), config.engine.prefetch)
    with (
        tempfile.TemporaryDirectory(prefix="effloop-tune-") as folder,
        closing(TunedLoop(config, Path(folder))) as loop,
    ):
        search = Search(loop.turn, 60 * minutes, loop.most_prefetch())
        others = [each for each in _batches(config) if loop.fits(*each)] if batch else []
        best = search.run(usual, others)
        data = loop.describe()
    result = _result(config, search, usual, best, data)
    chosen = replace(config, batch_size=best.batch_size, accumulate=best.accumulate)
    facts = {key: result[key] for key in ("overrides", "images_per_s")}
    keys = {"num_workers": best.num_workers, "prefetch": best.prefetch, "asked": _asked(config, batch=batch)}
    if search.compared:
        _findings(config).add("tune", pipeline_key(chosen, without=TUNED), **keys, **facts)
    return result


def _check(config: Config) -> None:
    """Refuse what no setting of the loader changes, and what one process can't measure.

    Raises:
        ConfigError: that is asked for.
    """
    if config.parallel.name != "none":
        raise ConfigError(f"parallel: tune measures one process, not {config.parallel.name}; set parallel=none")
    if config.probe:
        raise ConfigError(f"probe: {config.probe} loads the images once, so there is nothing to tune; set probe=0")
    if not config.engine.host_batches("cpu"):
        raise ConfigError(
            f"engine: {config.engine.name} loads in the training thread, without workers; set engine=threads"
        )


def _findings(config: Config) -> Findings:
    return Findings.of(config, open_split(config.data, "train").fingerprint())


def _asked(config: Config, *, batch: bool) -> str:
    """What identifies a question to `tune`."""
    return pipeline_key(config, without=TUNED) + "-batch" * batch


def _batches(config: Config) -> list[tuple[int, int]]:
    """Other sizes of a batch, the largest first, each with its `accumulate`, for updates of as many images."""
    images = config.batch_size * config.accumulate
    sizes = [(images // parts, parts) for parts in (1, 2, 4, 8, 16, 32) if images % parts == 0 and images // parts > 1]
    larger = [each for each in sizes if each[0] > config.batch_size]
    smaller = [each for each in sizes if each[0] < config.batch_size]
    return [*larger[:_OTHER_BATCHES], *smaller[: max(1, _OTHER_BATCHES - len(larger))]]


def _result(config: Config, search: Search, usual: Setting, best: Setting, data: str) -> dict[str, Any]:
    settings = [
        {
            **asdict(setting),
            "images_per_s": [turn.images_per_s for turn in turns],
            "wait": statistics.median(turn.wait for turn in turns),
        }
        for setting, turns in sorted(search.turns.items())
    ]
    overrides = [f"num_workers={best.num_workers}", f"engine.prefetch={best.prefetch}"]
    if best.batch_size != config.batch_size:
        overrides += [f"batch_size={best.batch_size}", f"accumulate={best.accumulate}"]
    return {
        "what": "tune",
        "data": data,
        "model": config.model.name,
        "engine": config.engine.name,
        "settings": settings,
        "taken": asdict(best),
        "usual": asdict(usual),
        "overrides": overrides,
        "images_per_s": statistics.median(turn.images_per_s for turn in search.turns[best]),
        "ended": search.ended,
    }


_KEYS = ("batch_size", "accumulate", "num_workers", "prefetch")


def print_curve(result: Mapping[str, Any]) -> None:
    """Print what was measured: a row for each setting."""
    keys = _KEYS if len({row["batch_size"] for row in result["settings"]}) > 1 else _KEYS[2:]
    rows = []
    for row in result["settings"]:
        speeds, own = row["images_per_s"], {key: row[key] for key in _KEYS}
        marks = ["taken"] * (own == result["taken"]) + ["without tuning"] * (own == result["usual"])
        numbers = [f"{value:,.0f}" for value in (statistics.median(speeds), min(speeds), max(speeds))]
        rows.append(
            [*(str(row[key]) for key in keys), *numbers, f"{row['wait']:.0%}", str(len(speeds)), ", ".join(marks)]
        )
    headings = (*keys, "images/s", "least", "most", "waiting", "turns", "")
    print_table(headings, rows, left=("",), min_width=110, title=f"model={result['model']}, {result['data']}")
    print(f"medians of turns of training; ended as {result['ended']}")


def write_files(result: Mapping[str, Any], folder: Path) -> None:
    """Write `tune.json`, `tune.png` and `overrides.txt`."""
    write_text(folder / "tune.json", json.dumps(result, indent=2) + "\n")
    write_text(folder / "overrides.txt", " ".join(result["overrides"]) + "\n")
    batches = sorted({(row["batch_size"], row["accumulate"]) for row in result["settings"]})
    plot_bars(folder / "tune.png", [_panel(result, *each) for each in batches])


def _panel(result: Mapping[str, Any], batch_size: int, accumulate: int) -> BarPanel:
    """The speeds with a batch size: a group for each number of workers, a series for each of batches ahead."""
    rows = [row for row in result["settings"] if row["batch_size"] == batch_size]
    groups = sorted({row["num_workers"] for row in rows})
    bars: dict[str, list[tuple[float, float, float] | None]] = {}
    for prefetch in sorted({row["prefetch"] for row in rows}):
        speeds = {row["num_workers"]: row["images_per_s"] for row in rows if row["prefetch"] == prefetch}
        bars[f"engine.prefetch={prefetch}"] = [_spread(speeds.get(workers)) for workers in groups]
    title = f"model={result['model']}, batch_size={batch_size}" + f", accumulate={accumulate}" * (accumulate > 1)
    return BarPanel(title, "images/s", "num_workers", [str(workers) for workers in groups], bars)


def _spread(speeds: Sequence[float] | None) -> tuple[float, float, float] | None:
    return (statistics.median(speeds), min(speeds), max(speeds)) if speeds else None

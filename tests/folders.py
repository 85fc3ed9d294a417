"""Folders of runs that never ran: what a run or a sweep writes, with made-up scores."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import effloop
from effloop import config as configs
from effloop.system.processes import describe_process

EPOCHS = 8
HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=document.title='taken'>"
"""What must not do anything, wherever it stands in a run folder."""


def make_run(folder: Path, *overrides: str, height: float = 0.7, speed: float = 900.0, epochs: int = EPOCHS) -> Path:
    """A run that came to its end; its top1 goes up to `height`, at `speed` images/s."""
    config = configs.to_dict(effloop.compose([f"epochs={epochs}", *overrides]))
    write_config(folder, config, overrides)
    write_rows(folder, height, speed, epochs)
    return folder


def write_config(folder: Path, config: Mapping[str, Any], overrides: Sequence[str] = ()) -> None:
    """What a run writes before its first step."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(config), sort_keys=False))
    (folder / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    its_own = {"started": f"in {folder}", "command": ["effloop", *overrides]}
    environment = {**its_own, "python": "3.11.9", "packages": {"torch": "2.11.0"}}
    (folder / "environment.json").write_text(json.dumps(environment))
    split = {"samples": 1280, "bytes": 1_000_000, "sha256": "ab" * 32}
    (folder / "data.json").write_text(json.dumps({"classes": [*"abcdef"], "train": split, "val": split}))


def write_rows(
    folder: Path, height: float, speed: float, epochs: int, *, done: bool = True, per_epoch: int = 4
) -> None:
    """metrics.jsonl, perf.jsonl and, if it is done, summary.json."""
    metrics, perf = [], []
    seconds = 1280 / speed / per_epoch
    wait = 0.1 * seconds + 20 / speed / per_epoch
    for epoch in range(epochs):
        for part in range(per_epoch):
            progress = epoch + (part + 1) / per_epoch
            at: dict[str, Any] = {"epoch": epoch, "step": int(40 * progress)}
            loss = 2.3 * math.exp(-progress * height) + 0.1 * math.sin(7 * progress) ** 2
            metrics.append({"split": "train", **at, "loss": loss, "top1": height, "top5": 1.0, "lr": 0.1})
            told = {"seconds": seconds, "wait_s": wait, "images_per_s": speed * (1 + 0.03 * math.sin(9 * progress))}
            perf.append({"span": "train", **at, **told, "wait": wait / seconds})
        top1 = height * (1 - math.exp(-(epoch + 1) / 2))
        scores = {"loss": 2.3 - 2 * top1, "top1": top1, "top5": min(1.0, top1 + 0.2)}
        metrics.append({"split": "val", "epoch": epoch, "step": 40 * (epoch + 1), **scores})
        perf.append({"span": "evaluation", "epoch": epoch, "step": 40 * (epoch + 1), "seconds": 0.2})
        perf.append({"span": "checkpoint", "epoch": epoch, "step": 40 * (epoch + 1), "seconds": 0.05})
    for name, rows in (("metrics", metrics), ("perf", perf)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if done:
        times = {"wait": epochs * per_epoch * wait, "step": epochs * per_epoch * (seconds - wait)}
        times |= {"evaluation": 0.2 * epochs, "checkpoint": 0.05 * epochs, "other": 0.7}
        last = {**scores, "epoch": epochs - 1}
        told = {"seconds": sum(times.values()), "images_per_s": speed, "wait": wait / seconds, "time": times}
        (folder / "summary.json").write_text(json.dumps({"best": last, "last": last, "step": 40 * epochs, **told}))


def job(folder: Path, number: int, overrides: Sequence[str], state: str = "done", reason: str = "") -> Path:
    """Say that a folder is a sweep's job."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"number": number, "overrides": list(overrides), "state": state, "reason": reason, "seconds": 3.5}
    told |= describe_process() if state == "running" else {}
    (folder / "job.json").write_text(json.dumps(told))
    return folder


def make_sweep(folder: Path, swept: Mapping[str, Sequence[Any]], *common: str, objective: str = "val/top1") -> Path:
    """A sweep over a grid, whose jobs are done."""
    folder.mkdir(parents=True, exist_ok=True)
    typed = [*common, *(f"{key}={','.join(map(str, values))}" for key, values in swept.items())]
    (folder / "sweep.json").write_text(json.dumps({"overrides": typed, "objective": objective}))
    for number, values in enumerate(itertools.product(*swept.values())):
        chosen = [f"{key}={value}" for key, value in zip(swept, values, strict=True)]
        height = 0.4 + 0.4 * abs(math.sin(1 + 1.3 * number))
        make_run(folder / str(number), *common, *chosen, height=height, speed=600 + 150 * (number % 7))
        job(folder / str(number), number, chosen)
    return folder


def make_troubled_sweep(folder: Path) -> Path:
    """A sweep of five learning rates: two jobs are done, one failed, one never began, one is under way."""
    make_sweep(folder, {"lr": [0.003, 0.01, 0.1]}, "batch_size=64")
    (folder / "2/summary.json").unlink()
    job(folder / "2", 2, ["lr=0.1"], "failed", f"it ended with signal 9 {HOSTILE}")
    job(folder / "3", 3, ["lr=10"], "killed")
    config = configs.to_dict(configs.load(folder / "0/config.yaml", ["lr=20"]))
    write_config(folder / "4", config)
    write_rows(folder / "4", 0.5, 700, 2, done=False)
    job(folder / "4", 4, ["lr=20"], "running")
    (folder / "4/perf.jsonl").unlink()
    return folder

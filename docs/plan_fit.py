"""Fit `effloop/plan/factors.json`, check it, and draw plan.md's picture: `python docs/plan_fit.py FOLDER [trace]`.

FOLDER has three files of timm's `results/` (huggingface/pytorch-image-models): `train-nhwc.csv` and `train-nchw.csv` of
an RTX 3090 (torch 1.12, AMP), and `infer.csv`, which has the inference of an RTX 4090 and of an RTX 3090 (torch 2.4).
With `trace`, models are traced, which takes a core half an hour; a line of traces.jsonl there is kept for each.

Half of the models, by a hash of their name, is fitted: seconds of training on the RTX 3090, and by how much the RTX
4090 is faster in inference, which tells apart what bandwidth does and what instructions do. On plan_h100.csv, measured
on an H100 SXM with torch 2.11 and SGD, nothing is fitted but how wide ranges are, of which the other half has a part,
and `bfloat16_batch_norms`: what its two rows of ResNet-50 in bfloat16 and float16 differ by.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from scipy.optimize import least_squares, minimize

import effloop
from effloop.assemble.environment import resolved
from effloop.errors import EffLoopError
from effloop.plan import speed
from effloop.plan.cards import Card, cards
from effloop.plan.speed import Time
from effloop.plan.trace import Op, Trace, trace
from effloop.task import tasks

DOCS = Path(__file__).parent
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
GROUPS = (  # kinds that take as many instructions for a byte, each with its backward pass, in forward passes
    {f"{kind}convolutions": 2.0 for kind in ("", "1x1 ", "grouped ", "depthwise ")}
    | {"norms": 1.5, "activations": 1.5, "additions": 1.0},
    {"products": 2.0, "attention": 2.0},
    {"copies": 1.0, "elementwise": 1.5},
    {"average pooling": 1.0},
    {"joining": 1.0},
)
COMPUTING = (
    "convolutions",
    "1x1 convolutions",
    "grouped convolutions",
    "depthwise convolutions",
    "products",
    "attention",
)
START = [1.0, 1.0, 0.1, 0.05, 1.0, 0.7, 0.2, 0.4, 0.4, 0.4, 0.4, 0.9, 3e-6, 5e-5, 2e-5]
LOOSE = (
    [0.1, 0.1, 0.3, 0.3, 0.1, 0.3] + [3.0] * 5 + [0.05] + [0.5] * 3
)  # standard deviations of their logarithms before a figure is seen
BAD = ("others", "grouped convolutions", "depthwise convolutions", "launching")  # kinds whose errors are fitted
COVERED = 0.85  # share of held-out figures that lie in their range


def traced(job: tuple[str, str, str, bool]) -> dict[str, Any]:
    """A line of traces.jsonl. timm's figures are of attention whose weights are in memory."""
    arch, size, precision, _ = job
    torch.set_num_threads(1)
    words = ["model=timm", f"model.arch={arch}", f"image_size={size}", "channels_last=true"]
    line: dict[str, Any] = {"job": job}
    try:
        config = resolved(effloop.compose([*words, f"precision={precision}"]))
        line |= asdict(trace(config, tasks.build(config.task).for_outputs(1000), 1000, HALF.get(precision)))
    except EffLoopError as error:
        line["error"] = str(error)
    return line


def table(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV."""
    with path.open() as file:
        return list(csv.DictReader(file))


def jobs(folder: Path) -> dict[tuple[str, str, str, bool], None]:
    """What has to be traced."""
    training = {(row["model"], row["train_img_size"], "fp16", False): None for row in table(folder / "train-nhwc.csv")}
    return training | {
        (row["model"], row["size"], row["precision"], True): None for row in table(DOCS / "plan_h100.csv")
    }


def trace_all(folder: Path) -> None:
    """Write traces.jsonl, or what is missing of it."""
    path = folder / "traces.jsonl"
    done = {tuple(json.loads(line)["job"]) for line in path.read_text().splitlines()} if path.exists() else set()
    todo = [job for job in jobs(folder) if job not in done]
    for fused in (False, True):
        os.environ["TIMM_FUSED_ATTN"] = str(int(fused))  # which timm reads when it is imported
        with get_context("spawn").Pool(2, maxtasksperchild=20) as pool, path.open("a") as file:
            for line in pool.imap_unordered(traced, [job for job in todo if job[3] == fused]):
                file.write(json.dumps(line) + "\n")
                file.flush()


class Rows:
    """Measured seconds of models on a card, in half precision, and what their operations are."""

    def __init__(self, card: Card, rows: list[tuple[str, Trace, float, float]]) -> None:
        self.card, self.count = card, len(rows)
        self.models, self.traces, batch, self.seconds = (np.array(each, object) for each in zip(*rows, strict=True))
        self.held = np.array([sha256(name.encode()).digest()[0] % 2 == 1 for name in self.models])
        self.batch, self.seconds = batch.astype(float), self.seconds.astype(float)
        sizes = [len(each.ops) for each in self.traces]
        self.row = np.repeat(np.arange(self.count), sizes)
        self.kinds = np.concatenate([speed.kinds_of(each) for each in self.traces])
        _, dtypes, *numbers = zip(*(op for each in self.traces for op in each.ops), strict=True)
        flops, each, fixed, self.needed, _ = np.array(numbers, float)
        self.flops, self.moved = flops * self.batch[self.row], each * self.batch[self.row] + fixed
        self.peak = np.where(np.isin(dtypes, ("float16", "bfloat16")), card.fp16, card.fp32)
        self.launches, self.trained, self.tensors = (
            np.array(each, float)
            for each in (sizes, *zip(*((x.trained, x.parameters) for x in self.traces), strict=True))
        )

    def forward(self) -> Any:
        """Seconds of each forward pass."""
        times = speed.forward_times(self.kinds, self.flops, self.moved, self.peak, self.card)
        return np.bincount(self.row, times, self.count)

    def step(self, update: float = 0.0, *, channels_last: bool = True) -> Any:
        """Seconds of each training step; `update` is what torch 1.12 took to update a tensor, one after the other."""
        kinds = (self.kinds, self.flops, self.moved, self.peak, self.card)
        times = speed.forward_times(*kinds, channels_last=channels_last)
        backward = np.array([*speed.factors["kinds"].values()])[self.kinds, 2]
        busy = np.bincount(self.row, times * (1 + self.needed * backward), self.count) + update * self.tensors
        busy += 5 * self.trained / (self.card.bandwidth * speed.factors["bandwidth"])
        return speed.with_launching(busy, self.launches)


def use(logs: Any, **others: Any) -> None:
    """Make these the factors."""
    values = np.exp(logs)
    shares, instructions = dict(zip(COMPUTING, values, strict=False)), values[6:11]
    kinds = {
        kind: [shares.get(kind, 1.0), number, backward]
        for group, number in zip(GROUPS, instructions, strict=True)
        for kind, backward in group.items()
    }
    names = ("bandwidth", "kernel", "launch")
    speed.factors["kinds"].update(kinds)  # in their order
    speed.factors.update(**dict(zip(names, values[11:14], strict=True)), **others)


def fit(training: Rows, slow: Rows, fast: Rows) -> Any:
    """Logarithms of the factors, as in START."""

    def errors(logs: Any) -> Any:
        use(logs)
        of_steps = np.log(training.step(np.exp(logs[-1])) / training.seconds)[~training.held]
        faster = np.log(slow.forward() / fast.forward() / (slow.seconds / fast.seconds))[~slow.held]
        return np.concatenate([of_steps, faster, 0.3 * (logs - np.log(START)) / LOOSE])

    return least_squares(errors, np.log(START), loss="soft_l1", f_scale=0.1).x


def report(name: str, errors: Any) -> None:
    """How far off predictions are."""
    off = np.abs(np.expm1(errors))
    within, median, most, bias = np.mean(off <= 0.2), np.median(off), np.quantile(off, 0.9), np.expm1(np.median(errors))
    print(f"| {name} | {len(off)} | {within:.0%} | {median:.1%} | {most:.0%} | {bias:+.0%} |")


def fit_layout(rows: Rows, update: float) -> None:
    """What convolutions are of the other memory layout, on half of the models."""

    def errors(logs: Any) -> Any:
        speed.factors["channels_first"] = dict(zip(("traffic", "grouped"), np.exp(logs), strict=True))
        return np.log(rows.step(update, channels_last=False) / rows.seconds)[~rows.held]

    errors(least_squares(errors, np.log([3.0, 1.0]), loss="soft_l1", f_scale=0.1).x)


def fit_spread(errors: Any, times: list[Time], there: int) -> None:
    """How far off kinds are: widths of Laplace distributions, times what makes ranges cover COVERED of the errors.

    The last so many are of the H100.
    """
    known = np.array([[each.parts.get(kind, 0.0) / each.seconds for kind in BAD[1:]] for each in times])
    shares = np.column_stack([1 - known.sum(1), known])

    def surprise(logs: Any) -> float:
        widths = shares @ np.exp(logs)
        return float(np.mean(np.log(widths) + np.abs(errors) / widths))

    widths = np.exp(minimize(surprise, np.log([0.1, 0.4, 0.4, 0.4]), method="Nelder-Mead").x)
    widths *= np.quantile(np.abs(errors) / (shares @ widths), COVERED)
    speed.factors["spread"] = dict(zip(BAD, widths, strict=True))
    inside = np.abs(errors) <= shares @ widths
    print(f"\n{inside.mean():.0%} in their range, {inside[-there:].mean():.0%} on the H100")


def load_traces(folder: Path) -> dict[tuple[str, ...], Trace]:
    """{(model, side, precision, whether attention is fused): what it does}."""
    lines = [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]
    return {
        tuple(line.pop("job")): Trace(**line | {"ops": [Op(*each) for each in line["ops"]]})
        for line in lines
        if "ops" in line
    }


def published(folder: Path, traces: Mapping[Any, Trace], name: str, card: str, columns: str) -> Rows:
    """Rows of one of timm's files, by their columns of images/s, batch and side."""
    rate, batch, side = columns.split()
    rows = [(row, traces.get((row["model"], row[side], "fp16", False))) for row in table(folder / name)]
    return Rows(
        cards[card],
        [(row["model"], kept, float(row[batch]), float(row[batch]) / float(row[rate])) for row, kept in rows if kept],
    )


def predicted(rows: Rows) -> list[Time]:
    """What users get, for the held-out half."""
    held = zip(rows.traces[rows.held], rows.batch[rows.held], strict=True)
    return [speed.step_time(kept, batch, rows.card, torch.float16) for kept, batch in held]


def on_h100(traces: Mapping[Any, Trace]) -> tuple[list[dict[str, str]], list[Time]]:
    """Rows of plan_h100.csv, and what is predicted of them."""
    rows = [
        row for row in table(DOCS / "plan_h100.csv") if (row["model"], row["size"], row["precision"], True) in traces
    ]
    times = [
        speed.step_time(
            traces[row["model"], row["size"], row["precision"], True],
            int(row["batch"]),
            cards["h100"],
            HALF.get(row["precision"]),
            tf32=row["precision"] == "tf32",
            channels_last=row["channels_last"] == "true",
        )
        for row in rows
    ]
    return rows, times


def draw(groups: Mapping[str, Any]) -> None:
    """Predicted against measured images/s."""
    axes = Figure(figsize=(6.4, 6.2), layout="constrained").add_subplot()
    ends = np.array([2, 30000])
    axes.fill_between(ends, ends / 1.2, ends * 1.2, color="#b4bcc8", alpha=0.4, linewidth=0, label="within 20 %")
    for (name, pairs), colour in zip(groups.items(), ("#8a94a3", "#2f6fd0", "#d0582f"), strict=True):
        axes.plot(*pairs, "o", markersize=3.5, color=colour, alpha=0.8, markeredgewidth=0, label=name)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.set(xlabel="measured images/s", ylabel="predicted images/s", title="Training steps of timm's models")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    path = DOCS / "pictures" / "plan_speed.png"
    axes.figure.savefig(path, dpi=130)
    Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def rounded(value: Any) -> Any:
    """Numbers of three digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else float(f"{value:.3g}")


def main(folder: Path) -> None:
    """Fit, check, write, draw."""
    traces = load_traces(folder)
    of_training = "train_samples_per_sec train_batch_size train_img_size"
    training, first = (
        published(folder, traces, f"train-{each}.csv", "rtx3090", of_training) for each in ("nhwc", "nchw")
    )
    of_inference = "{0}_samples_per_sec {0}_batch_size infer_img_size"
    slow = published(folder, traces, "infer.csv", "rtx3090", of_inference.format("rtx3090"))
    fast = published(folder, traces, "infer.csv", "rtx4090", of_inference.format("infer"))
    logs = fit(training, slow, fast)
    use(logs)
    update = float(np.exp(logs[-1]))
    fit_layout(first, update)
    print("| | rows | within 20 % | median error | nine of ten | bias |\n| --- | --- | --- | --- | --- | --- |")
    steps = training.step(update)
    errors = np.log(steps / training.seconds)
    report("RTX 3090, half that is fitted", errors[~training.held])
    report("RTX 3090, other half", errors[training.held])
    layout = np.log(first.step(update, channels_last=False) / first.seconds)
    report("RTX 3090, `channels_last=false`, other half", layout[first.held])
    faster = np.log(slow.forward() / fast.forward() / (slow.seconds / fast.seconds))
    report("RTX 4090, inference by that of an RTX 3090, other half", faster[slow.held])
    speed.factors["kinds"]["joining"] = speed.factors["kinds"]["copies"]  # torch 1.12 was slow at it
    rows, times = on_h100(traces)
    batch, measured = np.array([[float(row["batch"]), float(row["step_ms"]) / 1000] for row in rows]).T
    there = np.array([each.seconds for each in times])
    report("H100", np.log(there / measured))
    for kind in BAD[1:]:
        much = np.array([each.parts.get(kind, 0.0) > 0.25 * each.seconds for each in (*predicted(training), *times)])
        report(f"of more than 25 % {kind}", np.concatenate([errors[training.held], np.log(there / measured)])[much])
    often = training.held.sum() // len(rows)  # each card counts as much as the other
    fit_spread(
        np.concatenate([errors[training.held], *[np.log(there / measured)] * often]),
        predicted(training) + times * often,
        len(times) * often,
    )
    here = training.batch / training.seconds, training.batch / steps
    draw(
        {
            "RTX 3090, fitted": [each[~training.held] for each in here],
            "RTX 3090, other models": [each[training.held] for each in here],
            "H100, nothing fitted": [batch / measured, batch / there],
        }
    )
    text = json.dumps(rounded(speed.factors), indent=2)
    text = re.sub(r"\[\s+([^]]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    Path(speed.__file__).with_name("factors.json").write_text(f"{text}\n")
    worst = np.argsort(-np.abs(errors))[:30]
    print("worst:", ", ".join(f"{training.models[each]} {np.expm1(errors[each]):+.0%}" for each in worst))
    worst = np.argsort(-np.abs(np.log(there / measured)))[:12]
    print("worst:", ", ".join(f"{rows[each]['model']} {there[each] / measured[each] - 1:+.0%}" for each in worst))


if __name__ == "__main__":
    if sys.argv[2:] == ["trace"]:
        trace_all(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]))

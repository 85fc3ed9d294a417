"""`eval`: the scores of a checkpoint, and where it fails."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from effloop.batch import Preview
from effloop.cli.command import RunOptions, command
from effloop.data.loader import Loader
from effloop.errors import warn
from effloop.inference.trained import Trained
from effloop.measure.turns import output_folder, print_table
from effloop.report.evaluation import EVALUATIONS, Evaluation, cell_text, write_evaluation
from effloop.task.details import NUM_BINS, Details, Row
from effloop.train.evaluation import View, compare

_MAX_ROWS, _MAX_MISTAKES = 20, 8
"""Classes, and pairs of them that are confused, on the screen."""


@dataclass(frozen=True)
class EvalOptions(RunOptions):
    """Options of `eval`.

    Attributes:
        run: the folder of a run, a .ckpt file, or a file by export.
        split: val, train or any other split of the data, e.g. test; its images are never augmented.
        tta: test-time augmentation: the mean over each image and its mirror image.
        out: the folder for tables and pictures; without it RUN/eval/SPLIT, or FILE.eval/SPLIT.
    """

    split: str = "val"
    tta: tuple[View, ...] = ()
    out: Path | None = None


@command("eval", EvalOptions, "outputs/first split=test tta=flip")
def evaluate(options: EvalOptions, overrides: list[str]) -> int:
    """Score a run's best checkpoint, or a file, and show where it fails.

    Scores of each class, the confusion matrix, calibration and the worst samples are also files, for the run's report.
    """
    trained = Trained.open(options.run, overrides)
    loader = trained.loader(options.split)
    if options.out:
        output_folder(options.out, "eval")
    source, scorers = loader.plan.source, trained.scorers(options.tta, keeps=True)
    started = time.perf_counter()
    found = trained.evaluate(loader, options.tta, scorers)
    speed = len(source) / (time.perf_counter() - started)
    print(f"{trained.describe()}, on {loader.describe()}, {speed:,.0f} images/s")
    details, scored = scorers[-1].details(source.target_names)
    _print_scores(options, trained, found, scored)
    if left_out := len(source) - scored:
        print(f"{left_out:,} left out: on_error=skip, of images that can't be loaded")
    if details:
        _print_details(details, source.target_names)
        told = {
            "split": options.split,
            "tta": [*options.tta],
            "model": str(trained.path),
            "epoch": trained.facts["progress"]["epoch"] - 1,
            "data": source.where,
            "samples": scored,
            "skipped": left_out,
            "scores": found[-1],
        }
        _write(options, Evaluation(told, source.target_names, details), trained, loader)
    return 0


def _print_scores(options: EvalOptions, trained: Trained, found: Sequence[dict[str, float]], samples: int) -> None:
    """A row of the task's scores without and, if there is any, with test-time augmentation."""
    meters = [meter for meter in trained.task.meters if meter.name in found[0]]
    names = ("none", f"{','.join(options.tta)}: 2 views")[: len(found)] if len(found) > 1 else ("",)
    rows = [
        [name, f"{samples:,}", *(meter.text(scores[meter.name]) for meter in meters)]
        for name, scores in zip(names, found, strict=True)
    ]
    start = len(found) == 1  # without the first column
    headings = ["tta", "samples", *(meter.name for meter in meters)]
    print_table(headings[start:], [row[start:] for row in rows])


def _print_details(details: Details, names: Sequence[str]) -> None:
    """The worst classes or outputs, which classes are confused most often, and the calibration error."""
    _print_rows(details.rows, details.percent)
    counts = {row.get("class"): row.get(details.unit) for row in details.rows}
    mistakes = [
        {"class": names[label], "taken_for": names[other], details.unit: count, "share": count / counts[names[label]]}
        for label, other, count in details.mistakes[:_MAX_MISTAKES].tolist()
    ]
    if len(names) > 2 and mistakes:  # of two classes the table above says it all
        print("most often confused:")
        _print_rows(mistakes, details.percent)
    if details.calibration_error is not None:
        print(f"calibration error {details.calibration_error:.2%}, by {NUM_BINS} bins of the probability")


def _print_rows(rows: Sequence[Row], percent: bool) -> None:
    left = [name.replace("_", " ") for name in rows[0] if any(isinstance(row[name], str) for row in rows)]
    cells = [[cell_text(value, percent=percent) for value in row.values()] for row in rows[:_MAX_ROWS]]
    title = f"the worst {_MAX_ROWS} of {len(rows):,}" if len(rows) > _MAX_ROWS else ""
    print_table([name.replace("_", " ") for name in rows[0]], cells, left=left, title=title)


def _folder(options: EvalOptions) -> Path:
    """Where tables and pictures go."""
    if options.out:
        return options.out
    split, run = re.sub(r"[^\w-]", "_", options.split), options.run
    return (run / EVALUATIONS if run.is_dir() else run.with_name(f"{run.name}.{EVALUATIONS}")) / split


def _write(options: EvalOptions, found: Evaluation, trained: Trained, loader: Loader) -> None:
    """Write the files and say where they are, or why they can't be."""
    worst, folder = [row["id"] for row in found.details.worst], _folder(options)
    keys = [loader.plan.source.key(sample) for sample in worst]
    try:
        if trained.task.spatial:
            pictures = compare(trained.model, loader, trained.precision, worst)
        else:
            pictures = Preview(loader.pictures(worst)[:, None], rows=tuple(keys), columns=("image",))
        names = write_evaluation(folder, found, keys, pictures)
    except OSError as error:
        warn(f"'{error.filename or folder}' can't be written: {error.strerror}; set out=FOLDER for tables and pictures")
        return
    print(f"{folder}: {', '.join(names)}")

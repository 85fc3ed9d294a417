"""`eval`, `predict` and `export`: a trained model in use."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from effloop.batch import Batch, Preview
from effloop.cli.command import RunOptions, command
from effloop.config.overrides import key_of, quoted
from effloop.data.check import listed
from effloop.data.image.header import EXTENSIONS
from effloop.data.loader import Loader
from effloop.data.remote.location import is_remote
from effloop.data.source import Source
from effloop.data.source.auto import format_of as data_format
from effloop.data.source.files import Unlabelled, find_images
from effloop.data.source.root import expand_root
from effloop.data.source.table_source import listed_images
from effloop.data.source.tables import NoTargetsError
from effloop.errors import PROGRAM, ConfigError, DataError, warn
from effloop.inference import options
from effloop.inference.options import Average, Id
from effloop.lazy import LazyModule, Tensor
from effloop.measure.turns import output_folder
from effloop.record.grid import encode
from effloop.report.evaluation import EVALUATIONS, Evaluation, cell_text, write_evaluation
from effloop.system.progress import Meter as Progress
from effloop.system.progress import print_table
from effloop.task.details import NUM_BINS, Details, Row
from effloop.train.evaluation import Scorer, View, compare

if TYPE_CHECKING:
    from effloop.inference import ensemble, formats, submission, together
    from effloop.inference import export as exporting
    from effloop.inference import predict as predicting
    from effloop.inference.predict import Columns, Mask, MaskFiles, Predictions
    from effloop.inference.trained import Trained
else:  # they import torch, and help and a wrong option need none of it
    _NAMES = ("ensemble", "formats", "submission", "together", "export", "predict")
    ensemble, formats, submission, together, exporting, predicting = (
        LazyModule(f"effloop.inference.{name}") for name in _NAMES
    )

_MAX_ROWS, _MAX_MISTAKES = 20, 8  # classes, and pairs of them that are confused, on the screen


@dataclass(frozen=True)
class EvalOptions(RunOptions):
    """Options of `eval`.

    Attributes:
        run: the folder of a run, a .ckpt file, or a file by export; of a sweep, or of RUN,RUN, the mean.
        split: val, train or any other split of the data, e.g. test; its images are never augmented.
        tta: test-time augmentation: the mean over images and mirror images (flip), moved ones (shift), or both.
        average: of several runs: the mean of their probabilities, or of their logits.
        out: the folder for tables and pictures; without it RUN/eval/SPLIT, or FILE.eval/SPLIT.
    """

    split: str = "val"
    tta: tuple[View, ...] = ()
    average: Average = "probabilities"
    out: Path | None = None


@command("eval", EvalOptions, "outputs/first split=test tta=flip")
def evaluate(options: EvalOptions, overrides: list[str]) -> int:
    """Score a run's best checkpoint, or a file, and show where it fails.

    Scores of each class, the confusion matrix, calibration and the worst samples are also files, for the run's report.
    Masks are scored at the model's size and, as predict writes them, at their images' own sizes. It computes in
    float32, as predict and exported files do, whatever trained the run; amp=true computes as training with it did.
    """
    trained = ensemble.open_runs(options.run, overrides, options.average, options.split)
    loader = trained.loader(options.split)
    if options.out:
        output_folder(options.out, "eval")
    source, scorers = loader.plan.source, trained.scorers(options.tta, keeps=True)
    if isinstance(loader, together.Together) and loader.folds is not None:
        scorers[-1] = Tabled(scorers[-1], source.target_names)
    started = time.perf_counter()
    found = trained.evaluate(loader, options.tta, scorers)
    speed = len(source) / (time.perf_counter() - started)
    print(f"{trained.describe()}, on {loader.describe()}, {speed:,.0f} images/s", flush=True)
    if loader.note:
        print(loader.note)
    details, scored = scorers[-1].details(source.target_names)
    full_size = _full_size(options, trained, source) if trained.task.spatial else []
    _print_scores(options, trained, [*((str(trained.config.size), scored, scores) for scores in found), *full_size])
    if left_out := len(source) - scored:
        print(f"{left_out:,} left out: on_error=skip, of images that can't be loaded")
    if details:
        _print_details(details, source.target_names, f"of masks of {trained.config.size}" * trained.task.spatial)
        told = {
            "split": options.split,
            "tta": [*options.tta],
            "model": str(trained.path),
            "epoch": [each.epoch for each in trained.members] or trained.epoch,
            "data": source.where,
            "precision": trained.computes_in,
            "samples": scored,
            "skipped": left_out,
            "scores": found[-1],
            "full_size": full_size[0][2] if full_size else None,
        }
        _write_details(options, scorers[-1], Evaluation(told, source.target_names, details), trained, loader)
    return 0


Scored = tuple[str, int, dict[str, float]]  # size of the masks, images, scores


def _full_size(options: EvalOptions, trained: Trained, source: Source) -> list[Scored]:
    try:
        return [("full size", *predicting.full_size_scores(trained, source, options.tta))]
    except ConfigError as error:
        warn(f"masks of full size have no scores: {error}")
        return []


def _print_scores(options: EvalOptions, trained: Trained, rows: Sequence[Scored]) -> None:
    """The task's scores without and, if there is any, with test-time augmentation, and of which masks they are."""
    meters = [meter for meter in trained.task.meters if meter.name in rows[0][2]]
    views, spatial = ",".join(options.tta), trained.task.spatial
    headings = [*["tta"] * bool(options.tta), *["masks"] * spatial, "samples", *(meter.name for meter in meters)]
    lines = []
    for number, (size, samples, scores) in enumerate(rows):
        about = [views if number else "none"] * bool(options.tta) + [size] * spatial
        values = (meter.text(scores[meter.name]) if meter.name in scores else "-" for meter in meters)
        lines.append([*about, f"{samples:,}", *values])
    print_table(headings, lines)


def _print_details(details: Details, names: Sequence[str], title: str) -> None:
    """The worst classes or outputs, which classes are confused most often, and the calibration error."""
    _print_rows(details.rows, details.percent, title)
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


def _print_rows(rows: Sequence[Row], percent: bool, title: str = "") -> None:
    left = [name.replace("_", " ") for name in rows[0] if any(isinstance(row[name], str) for row in rows)]
    cells = [[cell_text(value, percent=percent) for value in row.values()] for row in rows[:_MAX_ROWS]]
    title = f"the worst {_MAX_ROWS} of {len(rows):,} {title}".rstrip() if len(rows) > _MAX_ROWS else title
    print_table([name.replace("_", " ") for name in rows[0]], cells, left=left, title=title)


class Tabled(Scorer):
    """Another one, and the predictions for each sample, for a table."""

    def __init__(self, scorer: Scorer, names: Sequence[str]) -> None:
        super().__init__(scorer.task, scorer.metrics, keeps=True)
        self.names = names
        self._found: list[tuple[NDArray[np.int64], Columns]] = []

    def add(self, outputs: Tensor, batch: Batch) -> None:
        super().add(outputs, batch)
        valid = batch.valid.cpu()
        found = self.task.predictions(outputs.cpu()[valid], self.names, every=True)
        self._found.append((batch.ids[valid].numpy(), found))

    def write(self, path: Path, source: Source, folds: NDArray[np.int64]) -> None:
        """A row for each sample, in the order of the data: its path, fold, predictions and target."""
        ids = np.concatenate([ids for ids, _ in self._found])
        order = np.argsort(ids)
        samples = ids[order].tolist()
        columns: dict[str, Any] = {"path": _paths(source, samples), "fold": [int(folds[each]) for each in samples]}
        for name in self._found[0][1]:
            values = np.concatenate([np.asarray(found[name]) for _, found in self._found])[order]
            columns[_free(name, self._found[0][1])] = values if values.dtype == np.float32 else values.tolist()
        with predicting.writing(path, self.task.digits) as write:
            write({**columns, "target": [source.target_name(each) for each in samples]})


def _write_details(options: EvalOptions, scorer: Scorer, found: Evaluation, trained: Trained, loader: Loader) -> None:
    """Write the files and say where they are, or why they can't be."""
    run, split = options.run, re.sub(r"[^\w-]", "_", options.split)
    beside = run / EVALUATIONS if run.is_dir() else run.with_name(f"{run.name}.{EVALUATIONS}")
    if trained.members and not run.is_dir():  # the names of several runs
        beside = Path("outputs") / EVALUATIONS / time.strftime("%Y-%m-%d/%H-%M-%S")
    folder = options.out or beside / split
    source, worst = loader.plan.source, [row["id"] for row in found.details.worst]
    try:
        if trained.task.spatial:
            pictures = compare(trained.model, loader, trained.precision, worst)
        else:
            pictures = Preview(loader.pictures(worst)[:, None], rows=tuple(map(source.key, worst)), columns=("image",))
        names = write_evaluation(folder, found, _paths(source, worst), pictures)
        if isinstance(scorer, Tabled) and isinstance(loader, together.Together) and loader.folds is not None:
            scorer.write(folder / PREDICTIONS, source, loader.folds)
            names = [*names, PREDICTIONS]
    except OSError as error:
        warn(f"'{error.filename or folder}' can't be written: {error.strerror}; set out=FOLDER for tables and pictures")
        return
    print(f"{folder}: {', '.join(names)}")


PREDICTIONS = "predictions.csv"  # of folds, each sample's by the models that weren't trained on it
Batches = Iterator[tuple[NDArray[np.int64], "Columns"]]  # ids of samples, and columns that they are the rows of
_OWN = ("path", "target", "error")  # columns beside the task's
_SHOWN = 20  # rows on the screen
_NAMED = 5  # classes of an image on the screen


def _check_options(options: PredictOptions, trained: Trained) -> None:
    task, is_spatial = trained.config.task.name, trained.task.spatial
    if options.top > 1 and not trained.task.ranks:
        raise ConfigError(f"top: {options.top}, but task={task} ranks no classes; leave top out")
    if options.masks and not is_spatial:
        raise ConfigError(f"masks: task={task} gives no pixel a class; leave masks out")
    for key, given in (("like", options.like), ("columns", options.columns)):
        if given and (is_spatial or options.scores or options.top > 1):
            what = f"task={task} gives masks" if is_spatial else "it says which columns there are"
            raise ConfigError(f"{key}: {what}; leave out {key if is_spatial else 'scores and top'}")
    if options.id and not (options.like or options.columns):
        raise ConfigError(f"id: {options.id} is for a table of your own; add columns=[id,label] or like=FILE")
    if is_spatial and options.scores:
        raise ConfigError(f"scores: of task={task} the table has each class's share; leave scores out")


def _mask_columns(found: Predictions, masks: MaskFiles | None, *, on_screen: bool) -> Batches:
    """The columns of each batch, while files of its masks are written; on the screen the largest classes in words."""
    names = found.trained.target_names
    for ids, batch in found.masks():
        for sample, mask in zip(ids.tolist(), batch, strict=True):
            if masks and mask is not None:
                masks.write(sample, encode(mask))
        yield ids, {"classes": _largest(batch, names)} if on_screen else predicting.share_columns(batch, names)


def _largest(masks: Sequence[Mask | None], names: Sequence[str]) -> list[str]:
    """`road 41.2%, sky 20.0%` for each image; empty without a mask."""
    words = []
    for row in np.stack([*predicting.share_columns(masks, names).values()], axis=1):
        best = [place for place in np.argsort(-row, kind="stable")[:_NAMED] if row[place] > 0]
        words.append(", ".join(f"{names[place]} {row[place]:.1%}" for place in best))
    return words


@dataclass(frozen=True)
class PredictOptions(RunOptions):
    """Options of `predict`.

    Attributes:
        run: the folder of a run, for its best checkpoint, a .ckpt file, or a file by export; as of eval several.
        paths: images, folders of images, or patterns in quotes such as 'photos/*.jpg'; or a dataset. Without any,
            the run's own data, or that of data.root.
        split: of a dataset: val, which is the default, train or any other.
        out: a table with a row for each image: .csv or .jsonl; without it the first 20 are shown.
        top: how many classes for each image; of a task that ranks them.
        scores: add the score of each class.
        id: what images are called in a table with columns or like: path, name (of the file), stem (without extension).
        columns: names of the table's columns, and nothing else in it: ids, and the class, labels or number that is
            predicted, or a column for each class or number, by its name.
        like: a file whose columns, rows and kinds of values the table has, such as Kaggle's sample_submission.csv.
        masks: of task=segmentation: the folder for a PNG file for each image, of its size, with its pixels' classes.
        tta, average: as of eval.
    """

    paths: tuple[Path, ...] = field(default=(), metadata={"positional": "PATH"})
    split: str | None = None
    out: Path | None = None
    top: Annotated[int, range(1, 1001)] = 1
    scores: bool = False
    id: Id | None = None
    columns: tuple[str, ...] = ()
    like: Path | None = None
    masks: Path | None = None
    tta: tuple[View, ...] = ()
    average: Average = "probabilities"


@command("predict", PredictOptions, "outputs/first photos/ out=scores.csv")
def predict(options: PredictOptions, overrides: list[str]) -> int:
    """What a run's model says of images: classes and scores, or masks.

    Images are prepared as for the run's validation, but for masks always whole. Those that can't be read are listed,
    and have a row without scores.
    """
    if options.out:
        predicting.check_writable(options.out)
    images, overrides = _images(options, overrides)
    trained = ensemble.open_runs(options.run, overrides, options.average, None if images else options.split or "val")
    if trained.folds is not None:
        eval_of = f"{PROGRAM} eval {shlex.quote(str(options.run))}"
        raise ConfigError(f"predict: each run saw the others' folds; name images, or type {eval_of} for the folds")
    root = "" if images else os.path.expanduser(trained.config.data.root or "")
    for read in (*options.paths, options.like or "", root):
        if options.out and options.out.exists() and os.path.isfile(read) and options.out.samefile(read):
            raise ConfigError(f"out: '{options.out}' is what is read, and would be lost; name another file")
    _check_options(options, trained)
    source, has_targets = (images, False) if images else _dataset(options, overrides, trained)
    form = None
    if options.like or options.columns:
        form, source = submission.submission(trained, source, options.id, options.columns, options.like)
    predictions, columns = _predicted(options, trained, Unlabelled(source))
    print(f"{trained.describe()}, on {predictions.loader.describe()}", flush=True)
    if form:
        print(f"columns: {', '.join(form.header[1:])} {'is' if len(form.header) == 2 else 'are'} {form.words}")
    started = time.perf_counter()
    targets = source if has_targets and not trained.task.spatial else None
    table = partial(form.table, predictions.problems) if form else partial(_table, predictions, targets)
    shown = _write(options, predictions, columns, table)
    seconds = time.perf_counter() - started
    if shown:
        _show(shown, len(predictions), ".4f" if trained.task.digits else ".6g")
    _warn(predictions, f"they have the values of {options.like}" if options.like else "they have no scores")
    if note := predictions.note():
        print(note)
    places = [str(place) for place in (options.out, options.masks) if place]
    to = f" -> {', '.join(places)}" if places else ""
    what = f"{len(predictions):,} image{'s' * (len(predictions) != 1)}"
    print(f"{what} in {seconds:.1f} s, {len(predictions) / seconds:,.0f} images/s{to}")
    return 0


def _predicted(options: PredictOptions, trained: Trained, source: Source) -> tuple[Predictions, Batches]:
    """What is predicted, and the columns of the table, batch by batch; they take what is wrong with samples along."""
    predictions = predicting.Predictions(trained, source, options.tta)
    if trained.task.spatial:
        samples = predictions.loader.plan.source
        masks = predicting.MaskFiles(options.masks, samples) if options.masks else None
        return predictions, _mask_columns(predictions, masks, on_screen=options.out is None)
    return predictions, predictions.columns(options.top, every=options.scores or bool(options.like or options.columns))


def _images(options: PredictOptions, overrides: list[str]) -> tuple[Source | None, list[str]]:
    """The images that paths name, or the overrides with the dataset that a path is."""
    for path in options.paths:
        if is_remote(url := str(path).replace(":/", "://", 1)) and not path.exists():  # a path has one slash
            raise ConfigError(f"predict: '{url}' is a URL, not a path; write data.root={url} instead")
    known = [path for path in options.paths if os.path.exists(path) and path.suffix.lower() not in EXTENSIONS]
    datasets = [path for path in known if data_format(path) not in (None, "folder")]  # of packed formats
    if not options.paths:
        return None, overrides
    keys = [*map(key_of, overrides)]
    for key in ("data.root", "data.images"):
        if key in keys and (key == "data.root" or not datasets):
            raise ConfigError(f"predict: '{options.paths[0]}' contradicts {key}; drop one of them")
    if not datasets:
        if options.split:
            raise ConfigError(
                f"split: '{options.paths[0]}' is taken as images, which have no splits; leave split out, or set "
                f"data.root={options.paths[0]} instead"
            )
        return find_images(options.paths), overrides
    if len(options.paths) > 1:
        raise ConfigError(f"predict: '{datasets[0]}' is a dataset, which stands alone; drop the other paths")
    chosen = ["data=auto"] * ("data" not in keys)
    return None, [*chosen, f"data.root={quoted(str(datasets[0]))}", *overrides]


def _dataset(options: PredictOptions, overrides: Sequence[str], trained: Trained) -> tuple[Source, bool]:
    """The images of a dataset, and whether they have targets, which those of a table may lack."""
    data = trained.config.data
    try:
        return trained.source(options.split or "val"), True
    except NoTargetsError:
        if options.split or "data.label" in map(key_of, overrides) or not (root := expand_root(data)).is_file():
            raise
        return listed_images(data, root), False


def _write(
    options: PredictOptions, predictions: Predictions, found: Batches, tabled: Callable[[list[int], Columns], Columns]
) -> list[dict[str, Any]]:
    """Write the table of samples and their columns; returns the first rows if there is no file."""
    rows: list[dict[str, Any]] = []
    digits = predictions.trained.task.digits
    as_is = bool(options.like or options.columns)
    writing = predicting.writing(options.out, digits, as_is=as_is) if options.out else nullcontext()
    with writing as write, Progress() as progress:
        progress.begin("predicted", len(predictions))
        for ids, columns in found:
            table = tabled(ids.tolist(), columns)
            if write:
                write(table)
            elif len(rows) < _SHOWN:
                rows += predicting.rows_of(table, digits)
            progress.advance(len(ids))
        if len(predictions.problems) == len(predictions):  # before a file takes its name
            _warn(predictions)
            raise DataError(f"{predictions.loader.plan.source.where}: none of the images can be used; name others")
    return rows[:_SHOWN]


def _warn(predictions: Predictions, fate: str = "they have no scores") -> None:
    """List the images that can't be used, if there are any."""
    source, found = predictions.loader.plan.source, predictions.problems
    if found:
        what = f"{len(found):,} of {len(predictions):,} images can't be used"
        lines = [f"{source.name(sample)} {found[sample]}" for sample in sorted(found)]
        print(f"effloop: warning: {listed(what, lines, fate)}", file=sys.stderr)


def _table(predictions: Predictions, source: Source | None, ids: Sequence[int], columns: Columns) -> Columns:
    """Columns with the images' names, their targets if there are any, and what is wrong with them."""
    return {
        "path": _paths(predictions.loader.plan.source, ids),
        **{_free(name, columns): values for name, values in columns.items()},
        **({"target": [source.target_name(sample) for sample in ids]} if source else {}),
        "error": [predictions.problems.get(sample, "") for sample in ids],
    }


def _paths(source: Source, samples: Sequence[int]) -> list[str]:
    """The samples' files, or their keys where they have none."""
    return [source.file_path(sample).decode("utf-8", "backslashreplace") for sample in samples]


def _free(name: str, columns: Columns) -> str:
    """A name for a column of the task's: that of a number can be one that the table has itself."""
    free = name
    while free in _OWN or (free != name and free in columns):
        free = f"output_{free}"
    return free


def _show(rows: Sequence[dict[str, Any]], count: int, form: str) -> None:
    """Print rows as a table, without columns that have nothing in them, and paths from the folder that all are in."""
    folders = [os.path.dirname(row.get("path", "")) for row in rows]
    if len({os.path.isabs(folder) for folder in folders}) == 1 and os.path.commonpath(folders) not in ("", "/"):
        rows = [{**row, "path": os.path.relpath(row["path"], os.path.commonpath(folders))} for row in rows]
    names = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    left = [name for name in names if any(isinstance(row[name], str) for row in rows)]
    columns = [
        [cell if isinstance(cell := row[name], str) else "" if cell is None else f"{cell:{form}}" for row in rows]
        for name in names
    ]
    title = f"the first {len(rows)} of {count:,} images" if count > len(rows) else ""
    print_table(names, zip(*columns, strict=True), left=left, title=title, fold=True)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(options.ExportOptions, RunOptions):
    """Options of `export`.

    Attributes:
        run: the folder of a run, or a .ckpt file.
    """


@command("export", ExportOptions, "outputs/first to=onnx")
def export_model(options: ExportOptions, overrides: list[str]) -> int:
    """Write a run's best model to a file for other programs, and check it.

    The scored weights, BatchNorm fused, with preprocessing and classes in the file's metadata. A file that predicts
    otherwise for more than 0.1 % of the images, or as int8 loses more than a percentage point, isn't kept.
    """
    from effloop.inference.trained import Trained

    if formats.format_of(options.run) is not None and options.run.is_file():
        raise ConfigError(f"export: {options.run} was exported already; name its run folder or a .ckpt file")
    trained = Trained.open(options.run, overrides)
    done = exporting.export(trained, options)
    for line in (trained.describe(), *done.notes):
        print(line)
    meter, parity = trained.task.meters[0], done.parity
    name = options.to + ", int8" * options.int8 + ", half" * options.half
    figures = (f"{done.size / 1e6:.2f}", f"{parity.images:,}", f"{parity.difference:.2g}", f"{parity.agreement:.2%}")
    scores = (meter.text(values[meter.name]) for values in (parity.before, parity.after))
    headings = ("format", "MB", "images", "largest difference", "agreement", f"{meter.name} before", "after")
    print_table(headings, [(name, *figures, *scores)], left=("format",), min_width=90)
    print(f"file: {done.path}   score: {PROGRAM} eval {shlex.quote(str(done.path))}")
    return 0

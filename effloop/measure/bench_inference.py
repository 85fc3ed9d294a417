"""`bench what=inference`: a trained model's size, score and speed in each format."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from effloop.batch import ImageSize
from effloop.config import Config
from effloop.config.typed import key_of
from effloop.errors import ConfigError, EffLoopError
from effloop.inference.export import ExportOptions, export
from effloop.inference.formats import INPUT, OUTPUT, formats
from effloop.inference.parity import compare
from effloop.inference.trained import Trained
from effloop.measure.turns import in_turns, print_table, scratch_folder
from effloop.record.rows import finite
from effloop.registry import choices
from effloop.report.figures import BarPanel, plot_bars, write_csv
from effloop.system.hardware import available_cores

# What `bench what=inference` compares: a trained model in PyTorch, and exported in each way.

_VARIANTS: dict[str, dict[str, Any]] = {"": {}, "_int8": {"int8": True}, "_half": {"half": True}}
_EXPORTED = {
    name + suffix: ExportOptions(to=name, **options)
    for name, kind in formats.items()
    if kind.fuses  # else it is pytorch once more
    for suffix, options in _VARIANTS.items()
    if kind.int8 or suffix != "_int8"
}
"""Names of exported formats -> how they are made."""

_ONLY_NAMED = ("compiled", *(name for name in _EXPORTED if name.endswith("_half")))
"""Measured where they are asked for by name: half a minute to compile; float16 is slow on most CPUs."""

NAMES = ("pytorch", "compiled", *_EXPORTED, "cuda", "tensorrt")


@dataclass(frozen=True)
class Side:
    """One way to run a model.

    Attributes:
        name: of `NAMES`.
        open: makes the model, for as many threads as torch has then.
        bytes: of its weights or file.
        score: the task's first score.
        agreement: share of the images with the prediction of the trained model.
        keep: whether the model serves all turns, as opening it takes long.
        device: where its images are.
        unavailable: why it can't be measured here; empty where it can.
    """

    name: str
    open: Callable[[], nn.Module] = nn.Identity
    bytes: int = 0
    score: float = float("nan")
    agreement: float = float("nan")
    keep: bool = False
    device: str = "cpu"
    unavailable: str = ""


def side_names(words: str) -> list[str]:
    """The sides that `formats=` names.

    Raises:
        ConfigError: there is no such.
    """
    if words == "all":
        return [name for name in NAMES if name not in _ONLY_NAMED]
    names = list(dict.fromkeys(words.split(",")))
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"formats: no format '{name}'; {choices(name, ['all', *NAMES])}")
    return names


def make_side(name: str, trained: Trained, score: float, scratch: Path) -> Side:
    """Export a model, or say why that can't be done.

    Args:
        name: of `NAMES`.
        trained: the model, on the CPU.
        score: of it.
        scratch: a folder for files.
    """
    weights = sum(each.numel() * each.element_size() for each in trained.model.state_dict().values())
    if name == "pytorch":
        return Side(name, lambda: trained.model, weights, score, 1.0)
    if name == "compiled":
        return Side(name, partial(_compiled, trained.model), weights, score, 1.0, keep=True)
    try:
        return _GPU[name](trained, scratch) if name in _GPU else _exported(name, trained, scratch)
    except EffLoopError as error:  # a package isn't installed, the model can't be exported so, or loses too much
        return Side(name, unavailable=str(error))


def _compiled(model: nn.Module) -> nn.Module:
    """A copy that is compiled when it is first called."""
    copied = copy.deepcopy(model)
    copied.compile(dynamic=False)
    return copied


def _exported(name: str, trained: Trained, scratch: Path) -> Side:
    how = _EXPORTED[name]
    path = scratch / f"{name}{formats[how.to].suffix}"
    done = export(trained, ExportOptions(to=how.to, int8=how.int8, half=how.half, out=path))
    meter = trained.task.meters[0].name
    opened = partial(formats[how.to](half=how.half).open, path, torch.device("cpu"), trained.network)
    return Side(name, opened, done.size, done.parity.after[meter], done.parity.agreement)


class OnCuda(nn.Module):
    """A model in float16 and channels_last on a GPU, for float32 images on any device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).half()
        self.model.to(device="cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        half = images.to("cuda", torch.float16, memory_format=torch.channels_last)
        outputs: Tensor = self.model(half)
        return outputs.to(images.device, torch.float32)


def _cuda(trained: Trained, scratch: Path) -> Side:
    del scratch
    if not torch.cuda.is_available():
        return Side("cuda", unavailable="no GPU here that PyTorch can use")
    model = OnCuda(trained.model)
    size = sum(each.numel() * each.element_size() for each in model.model.state_dict().values())
    return _scored(Side("cuda", lambda: model, size, keep=True, device="cuda"), model, trained)


class TensorRt(nn.Module):
    """A session of ONNX Runtime's TensorRT, in float16 where that is faster."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        ort: Any = importlib.import_module("onnxruntime")
        provider: Any = ("TensorrtExecutionProvider", {"trt_fp16_enable": True})
        self.session = ort.InferenceSession(path, providers=[provider])

    def forward(self, images: Tensor) -> Tensor:
        (outputs,) = self.session.run([OUTPUT], {INPUT: images.contiguous().cpu().numpy()})
        return torch.from_numpy(outputs)


def _tensorrt(trained: Trained, scratch: Path) -> Side:
    if importlib.util.find_spec("onnxruntime") is None:
        return Side("tensorrt", unavailable="it runs in onnxruntime, which isn't installed")
    ort: Any = importlib.import_module("onnxruntime")
    if "TensorrtExecutionProvider" not in ort.get_available_providers() or not torch.cuda.is_available():
        return Side("tensorrt", unavailable="no GPU, or ONNX Runtime without TensorRT (onnxruntime-gpu has it)")
    path = scratch / "tensorrt.onnx"
    size = export(trained, ExportOptions(to="onnx", out=path)).size
    model = TensorRt(path)
    return _scored(Side("tensorrt", lambda: model, size, keep=True), model, trained)


def _scored(side: Side, model: nn.Module, trained: Trained) -> Side:
    """With the score and agreement of a model on the validation split."""
    parity = compare(trained.model, model, trained.loader(), trained.task)
    score = parity.after[trained.task.meters[0].name]
    return Side(side.name, side.open, side.bytes, score, parity.agreement, side.keep, side.device)


_GPU: dict[str, Callable[[Trained, Path], Side]] = {"cuda": _cuda, "tensorrt": _tensorrt}


_CALLS, _SECONDS = 10, 0.3
"""A measurement takes so many calls at least, and so long at least."""


def inference(
    config: Config,
    repeats: int,
    *,
    run: str | Path,
    formats: str,
    cores: str,
    batch: str,
    work: str,
    overrides: Sequence[str],
) -> dict[str, Any]:
    """Size, score, milliseconds for one image and images/s of batches, for each format and number of threads.

    The formats take turns, and each turn opens the file anew, so that no other's threads wait for work meanwhile.
    Images are those of the validation split, prepared before; a call is from a tensor of images to one of outputs.

    Args:
        config: not used; the run has its own.
        repeats: turns.
        run: a run folder or .ckpt file.
        formats: names with commas between, or `all`.
        cores: numbers of threads with commas between, or `auto` for 1 and the cores this process may use.
        batch: images in a batch.
        work: a folder for the files; empty is the system's place for temporary files.
        overrides: of the run's config.

    Raises:
        ConfigError: no run, no such format, or numbers that aren't.
    """
    del config
    if not run:
        raise ConfigError("bench: what=inference needs the run that is measured; name a run folder or a .ckpt file")
    names, size, found = side_names(formats), _number("batch", batch), available_cores()
    counts = sorted({1, found}) if cores == "auto" else [_number("cores", word) for word in cores.split(",")]
    trained = _trained(Path(run), overrides)
    score = trained.evaluate(trained.loader())[trained.task.meters[0].name]
    with scratch_folder(work) as scratch:
        sides = _sides(trained, names, score, scratch)
        measured = _in_turns(sides, counts, _images(trained, size), repeats)
    rows = [_row(side, count, measured.get(f"{side.name} {count}")) for side in sides for count in counts]
    rows = [row for row in rows if row["ms"] or (row["unavailable"] and row["threads"] == counts[0])]
    result = {"what": "inference", "run": str(run), **_about(trained)}
    result |= {"batch": size, "repeats": repeats, "cores": found, "rows": rows}
    _print(result, trained.task.meters[0].text)
    return {**result, "rows": [finite(row) for row in rows]}


def _trained(run: Path, overrides: Sequence[str]) -> Trained:
    """The run's model in float32 on the CPU, whatever the overrides say of that."""
    own = [override for override in overrides if key_of(override) not in ("device", "precision", "amp")]
    return Trained.from_checkpoint(run, [*own, "device=cpu", "precision=fp32", "amp=null"])


def _about(trained: Trained) -> dict[str, Any]:
    model, size = trained.config.model, trained.config.image_size
    return {"model": getattr(model, "arch", model.name), "image_size": size, "score": trained.task.meters[0].name}


def _sides(trained: Trained, names: Sequence[str], score: float, scratch: Path) -> list[Side]:
    """What is compared, exported where it has to be; `score` is the trained model's."""
    sides = []
    with threads_restored(), Console(stderr=True).status("") as status:
        for name in names:
            status.update(f"exporting: {name}")
            sides.append(make_side(name, trained, score, scratch))
    return sides


def _in_turns(
    sides: Sequence[Side], counts: Sequence[int], images: Tensor, repeats: int
) -> dict[str, list[tuple[list[float], float]]]:
    """What `_measure` gives in each turn, by "NAME THREADS"."""
    runs = {
        f"{side.name} {count}": partial(_measure, side, count, images, {})
        for count in counts
        for side in sides
        if not side.unavailable and (count == counts[0] or side.device == "cpu")
    }
    with threads_restored(), Console(stderr=True).status(f"measuring {len(runs)} in turns"):
        return in_turns(runs, repeats, warm_up=1)


def _number(key: str, word: str) -> int:
    if not (word.isascii() and word.isdigit()) or not 0 < int(word) <= 65_536:
        raise ConfigError(f"{key}: '{word}' is not allowed; set a whole number from 1 to 65,536")
    return int(word)


@contextmanager
def threads_restored() -> Iterator[None]:
    """Around what changes the number of torch's threads."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _images(trained: Trained, count: int) -> Tensor:
    """(count, 3, H, W) of the validation split, some of them several times if it is smaller."""
    loader = trained.loader()
    ids = np.resize(np.arange(len(loader.plan.source)), count)
    images = loader.samples(ids.tolist()).images
    loader.close()
    return images


def _measure(side: Side, threads: int, images: Tensor, kept: dict[str, nn.Module]) -> tuple[list[float], float]:
    """Seconds of each call with one image, and images/s of calls with all; `kept` has a model of earlier turns."""
    torch.set_num_threads(threads)
    model = kept.get(side.name) or side.open().eval()
    if side.keep:
        kept[side.name] = model
    given = images.to(side.device)
    with torch.inference_mode():
        calls = [_calls(model, each, side.device) for each in (given[:1], given)]
    return calls[0], len(images) / statistics.median(calls[1])


def _calls(model: nn.Module, images: Tensor, device: str) -> list[float]:
    """Seconds of each of many calls, after two that don't count."""
    seconds: list[float] = []
    for number in range(-2, 1_000_000):
        started = time.perf_counter()
        model(images)
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 0:
            seconds.append(time.perf_counter() - started)
        if len(seconds) >= _CALLS and sum(seconds) >= _SECONDS:
            break
    return seconds


def _row(side: Side, threads: int, measured: Sequence[tuple[list[float], float]] | None) -> dict[str, Any]:
    """A row for JSON."""
    facts = {"format": side.name, "threads": threads, "megabytes": side.bytes / 1e6}
    facts |= {"score": side.score, "agreement": side.agreement, "unavailable": side.unavailable}
    ms = [1000 * second for seconds, _ in measured or () for second in seconds]
    speeds = [speed for _, speed in measured or ()]
    middle = {"ms_p50": float(np.percentile(ms, 50)), "ms_p95": float(np.percentile(ms, 95))} if ms else {}
    return {**facts, **middle, "ms": ms, "images_per_s": speeds}


def _print(result: Mapping[str, Any], text: Any) -> None:
    """Print a result's table."""
    rows = [row for row in result["rows"] if row["ms"]]
    base = {row["threads"]: statistics.median(row["images_per_s"]) for row in rows if row["format"] == "pytorch"}
    cells, ends = [], []
    for number, row in enumerate(rows):
        speed = statistics.median(row["images_per_s"])
        over = f"{speed / base[row['threads']]:.2f}" if row["threads"] in base else ""
        facts = [f"{row['megabytes']:.2f}", text(row["score"]), f"{row['agreement']:.2%}", str(row["threads"])]
        cells.append([row["format"], *facts, f"{row['ms_p50']:.2f}", f"{row['ms_p95']:.2f}", f"{speed:,.0f}", over])
        ends += [number] * (number + 1 < len(rows) and rows[number + 1]["format"] != row["format"])
    speed_of = f"images/s\nat batch {result['batch']}"
    headings = (
        "format",
        "MB",
        result["score"],
        "agreement",
        "threads",
        "ms p50\n1 image",
        "p95",
        speed_of,
        "over\npytorch",
    )
    title = (
        f"{result['run']}: {result['model']} at {ImageSize.of(result['image_size'])} pixels; {result['repeats']} turns"
    )
    print_table(headings, cells, left=("format",), sections=ends, min_width=110, title=title)
    for row in result["rows"]:
        if row["unavailable"]:
            print(f"{row['format']}: {row['unavailable']}")


def write_inference_files(result: Mapping[str, Any], out: Path) -> None:
    """Write a result as CSV and as a plot, beside its JSON file `out`."""
    rows = [row for row in result["rows"] if row["ms"]]
    columns = ("format", "threads", "megabytes", "score", "agreement", "ms_p50", "ms_p95")
    table = [
        {**{key: row[key] for key in columns}, "images_per_s": statistics.median(row["images_per_s"])} for row in rows
    ]
    write_csv(out.with_suffix(".csv"), table)
    names = list(dict.fromkeys(row["format"] for row in rows))
    by_threads: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_threads.setdefault(f"threads: {row['threads']}", {})[row["format"]] = row
    single = {
        key: [
            (found[name]["ms_p50"], found[name]["ms_p50"], found[name]["ms_p95"]) if name in found else None
            for name in names
        ]
        for key, found in by_threads.items()
    }
    many = {
        key: [_spread(found[name]["images_per_s"]) if name in found else None for name in names]
        for key, found in by_threads.items()
    }
    groups = [name.replace("_", "\n") for name in names]
    of = f"{result['model']} at {ImageSize.of(result['image_size'])} pixels"
    panels = [
        BarPanel(f"{of}: one image", "ms, median to p95", "", groups, single),
        BarPanel(f"{of}: batches of {result['batch']}", "images/s", "", groups, many),
    ]
    plot_bars(out.with_suffix(".png"), panels)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)

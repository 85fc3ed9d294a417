"""`bench what=inference`: a trained model's size, score and speed in each format."""

from __future__ import annotations

import copy
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from effloop.config.overrides import key_of
from effloop.errors import ConfigError, EffLoopError
from effloop.inference.export import ExportOptions, compare, export
from effloop.inference.formats import INPUT, OUTPUT, formats
from effloop.inference.trained import Trained
from effloop.measure.turns import chosen, in_turns, print_table, scratch_folder, spread
from effloop.record.rows import finite
from effloop.report.figures import Bar, BarPanel, plot_bars, write_csv
from effloop.system.hardware import available_cores

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
"""Measured only when they are named: half a minute to compile; float16 is slow on most CPUs."""

NAMES = ("pytorch", "compiled", *_EXPORTED, "cuda", "tensorrt")

_CALLS, _SECONDS = 10, 0.3
"""A measurement takes so many calls at least, and so long at least."""


@dataclass(frozen=True)
class Side:
    """One way to run a model.

    Attributes:
        open: makes the model, for as many threads as torch has then.
        bytes: of its weights or file.
        score: the task's first score.
        agreement: share of the images with the prediction of the trained model.
        keep: whether the model serves all turns, as opening it takes long.
        device: where its images are.
    """

    open: Callable[[], nn.Module]
    bytes: int
    score: float
    agreement: float = 1.0
    keep: bool = False
    device: str = "cpu"


def side_names(words: str) -> list[str]:
    """The sides that `formats=` names.

    Raises:
        ConfigError: there is no such.
    """
    names = chosen("formats", words, NAMES, "format")
    return [name for name in names if words != "all" or name not in _ONLY_NAMED]


def _open_side(name: str, trained: Trained, score: float, scratch: Path) -> Side:
    """Export a model where it has to be.

    Raises:
        EffLoopError: a package isn't installed, the model can't be exported so, or loses too much.
    """
    if name == "pytorch":
        return Side(lambda: trained.model, _weights(trained.model), score)
    if name == "compiled":
        return Side(partial(_compiled, trained.model), _weights(trained.model), score, keep=True)
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("no GPU here that PyTorch can use")
        on_gpu = OnCuda(trained.model)
        return Side(lambda: on_gpu, _weights(on_gpu), *_scored(on_gpu, trained), keep=True, device="cuda")
    if name == "tensorrt":
        with suppress(ImportError):
            providers = importlib.import_module("onnxruntime").get_available_providers()
            if "TensorrtExecutionProvider" in providers and torch.cuda.is_available():
                size = export(trained, ExportOptions(to="onnx", out=scratch / "tensorrt.onnx")).size
                model = TensorRt(scratch / "tensorrt.onnx")
                return Side(lambda: model, size, *_scored(model, trained), keep=True)
        raise ConfigError("no GPU, or ONNX Runtime without TensorRT (onnxruntime-gpu has it)")
    how = _EXPORTED[name]
    path = scratch / f"{name}{formats[how.to].suffix}"
    done = export(trained, ExportOptions(to=how.to, int8=how.int8, half=how.half, out=path))
    opened = partial(formats[how.to](half=how.half).open, path, torch.device("cpu"), trained.network)
    return Side(opened, done.size, done.parity.after[trained.task.meters[0].name], done.parity.agreement)


def _compiled(model: nn.Module) -> nn.Module:
    """A copy that is compiled when it is first called."""
    copied = copy.deepcopy(model)
    copied.compile(dynamic=False)
    return copied


def _weights(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.state_dict().values())


def _scored(model: nn.Module, trained: Trained) -> tuple[float, float]:
    """Score and agreement of a model on the validation split."""
    parity = compare(trained.model, model, trained.loader(), trained.task)
    return parity.after[trained.task.meters[0].name], parity.agreement


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


def inference(
    config: Config,
    repeats: int,
    *,
    run: str | Path = "",
    formats: str = "all",
    cores: str | Sequence[int] = "auto",
    batch: int = 32,
    work: str = "",
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Size, score, milliseconds for one image and images/s of batches, for each format and number of threads.

    The formats take turns, and each turn opens the file anew, so that no other's threads wait for work meanwhile.
    Images are those of the validation split, prepared before; a call is from a tensor of images to one of outputs.

    Raises:
        ConfigError: no run, or no such format.
    """
    if not run:
        raise ConfigError("bench: what=inference needs the run that is measured; name a run folder or a .ckpt file")
    names, found = side_names(formats), available_cores()
    counts = sorted({1, found} if cores == "auto" else {*map(int, cores)})
    # In float32 on the CPU, whatever the overrides.
    own = [override for override in overrides if key_of(override) not in ("device", "precision", "amp")]
    trained = Trained.open(Path(run), [*own, "device=cpu", "precision=fp32", "amp=null"])
    meter = trained.task.meters[0]
    score = trained.evaluate(trained.loader())[0][meter.name]
    sides: dict[str, Side] = {}
    unavailable: dict[str, str] = {}
    with scratch_folder(work) as scratch, threads_restored(), Console(stderr=True).status("") as status:
        for name in names:
            status.update(f"exporting: {name}")
            try:
                sides[name] = _open_side(name, trained, score, scratch)
            except EffLoopError as error:
                unavailable[name] = str(error)
        status.update("measuring in turns")
        images, kept = _images(trained, batch), dict[tuple[str, int], nn.Module]()
        runs = {
            (name, count): partial(_measure, name, side, count, images, kept)
            for count in counts
            for name, side in sides.items()
            if count == counts[0] or side.device == "cpu"
        }
        measured = in_turns(runs, repeats, warm_up=1) if runs else {}
    rows = []
    for name in names:
        rows += [_row(name, sides[name], count, measured[name, count]) for count in counts if (name, count) in measured]
        if name in unavailable:
            rows.append({"format": name, "threads": counts[0], "unavailable": unavailable[name]})
    model, size = trained.config.model, trained.config.image_size
    facts = {"model": getattr(model, "arch", model.name), "image_size": size, "score": meter.name}
    result = {"what": "inference", "run": str(run), **facts, "batch": batch, "repeats": repeats, "cores": found}
    result["rows"] = rows
    _print(result, meter.text)
    return {**result, "rows": [finite(row) for row in rows]}


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
    images = loader.samples(np.resize(np.arange(len(loader.plan.source)), count).tolist()).images
    loader.close()
    return images


def _measure(
    name: str, side: Side, threads: int, images: Tensor, kept: dict[tuple[str, int], nn.Module]
) -> tuple[list[float], float]:
    """Seconds of each call with one image, and images/s of calls with all; `kept` has models of earlier turns."""
    torch.set_num_threads(threads)
    model = kept.get((name, threads)) or side.open().eval()
    if side.keep:
        kept[name, threads] = model
    given = images.to(side.device)
    with torch.inference_mode():
        one, all_of_them = (_calls(model, each) for each in (given[:1], given))
    return one, len(images) / statistics.median(all_of_them)


def _calls(model: nn.Module, images: Tensor) -> list[float]:
    """Seconds of each of many calls, after two that don't count."""
    seconds: list[float] = []
    for number in range(-2, 1_000_000):
        started = time.perf_counter()
        model(images)
        if images.is_cuda:
            torch.cuda.synchronize()
        if number >= 0:
            seconds.append(time.perf_counter() - started)
        if len(seconds) >= _CALLS and sum(seconds) >= _SECONDS:
            break
    return seconds


def _row(name: str, side: Side, threads: int, turns: Sequence[tuple[list[float], float]]) -> dict[str, Any]:
    ms = [1000 * second for seconds, _ in turns for second in seconds]
    return {
        "format": name,
        "threads": threads,
        "megabytes": side.bytes / 1e6,
        "score": side.score,
        "agreement": side.agreement,
        "unavailable": "",
        "ms_p50": float(np.percentile(ms, 50)),
        "ms_p95": float(np.percentile(ms, 95)),
        "ms": ms,
        "images_per_s": [speed for _, speed in turns],
    }


def _print(result: Mapping[str, Any], text: Callable[[float], str]) -> None:
    rows = [row for row in result["rows"] if not row["unavailable"]]
    base = {row["threads"]: statistics.median(row["images_per_s"]) for row in rows if row["format"] == "pytorch"}
    cells, ends = [], []
    for number, row in enumerate(rows):
        speed = statistics.median(row["images_per_s"])
        over = f"{speed / base[row['threads']]:.2f}" if row["threads"] in base else ""
        facts = [f"{row['megabytes']:.2f}", text(row["score"]), f"{row['agreement']:.2%}", str(row["threads"])]
        cells.append([row["format"], *facts, f"{row['ms_p50']:.2f}", f"{row['ms_p95']:.2f}", f"{speed:,.0f}", over])
        ends += [number] * (number + 1 < len(rows) and rows[number + 1]["format"] != row["format"])
    headings = ["format", "MB", result["score"], "agreement", "threads", "ms p50\n1 image", "p95"]
    headings += [f"images/s\nat batch {result['batch']}", "over\npytorch"]
    title = f"{result['run']}: {_workload(result)}; {result['repeats']} turns"
    print_table(headings, cells, left=("format",), sections=ends, min_width=110, title=title)
    for row in result["rows"]:
        if row["unavailable"]:
            print(f"{row['format']}: {row['unavailable']}")


def _workload(result: Mapping[str, Any]) -> str:
    return f"{result['model']} at {ImageSize.of(result['image_size'])} pixels"


def write_inference_files(result: Mapping[str, Any], out: Path) -> None:
    """Write a result as CSV and as a plot, beside its JSON file `out`."""
    rows = [row for row in result["rows"] if not row["unavailable"]]
    columns = ("format", "threads", "megabytes", "score", "agreement", "ms_p50", "ms_p95")
    speeds = [{"images_per_s": statistics.median(row["images_per_s"])} for row in rows]
    table = [{**{key: row[key] for key in columns}, **speed} for row, speed in zip(rows, speeds, strict=True)]
    write_csv(out.with_suffix(".csv"), table)
    single, many = [], []
    for row in rows:
        name = (row["format"].replace("_", "\n"), f"threads: {row['threads']}")
        single.append(Bar(*name, (row["ms_p50"], row["ms_p50"], row["ms_p95"])))
        many.append(Bar(*name, spread(row["images_per_s"])))
    panels = [
        BarPanel(f"{_workload(result)}: one image", "ms, median to p95", "", single),
        BarPanel(f"{_workload(result)}: batches of {result['batch']}", "images/s", "", many),
    ]
    plot_bars(out.with_suffix(".png"), panels)

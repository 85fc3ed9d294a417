"""`effloop export`: a trained model as a file for other programs, kept only if it gives what the model gives."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

import effloop
from effloop import config as configs
from effloop.batch import Batch
from effloop.config import Config
from effloop.data.augment.base import Evaluation, RecipeConfig
from effloop.data.augment.native.crops import PADDING
from effloop.data.loader import Loader
from effloop.errors import ConfigError, ParityError, reason, warn
from effloop.inference.formats import INPUT, OUTPUT, VERSION, Format, formats, one_line_errors, trace
from effloop.inference.options import ExportOptions
from effloop.inference.trained import FixedBatch, Trained
from effloop.record import Metrics
from effloop.system.files import explained_writing
from effloop.system.hardware import has_vnni
from effloop.task import Meter, Task
from effloop.task.outputs import OutputTransform, unwrap
from effloop.train.evaluation import Scorer


@dataclass(frozen=True)
class Exported:
    """A file that was written: its bytes with what belongs to it, its `Parity`, and what was done to the model."""

    path: Path
    size: int
    parity: Parity
    notes: tuple[str, ...]


def export(trained: Trained, options: ExportOptions) -> Exported:
    """Write a trained model to a file, kept if it gives the model's predictions; else a ParityError."""
    if trained.precision.dtype:
        raise ConfigError("amp: a file computes in float32; leave amp and precision out, or set half=true")
    if trained.config.data.mean is None:
        raise ConfigError("data.mean: null, so the model takes uint8 images; export needs data.mean and data.std")
    form = formats[options.to](dynamic=options.fixed is None, half=options.half)
    kind = "_int8" * options.int8 + "_half" * options.half
    path = options.out or run_folder(trained.path) / f"model{kind}{form.suffix}"
    program, notes = _program(trained, form, options)
    facts = describe(trained, options)

    def saved(file: Path) -> nn.Module:
        with one_line_errors(f"{file.name} can't be written"):
            form.save(program, file, json.dumps(facts, ensure_ascii=False))
        with one_line_errors("the exported file can't be opened"):
            model = form.open(file, trained.device, trained.network).eval()
        return FixedBatch(model, options.fixed) if options.fixed else model

    with _in_place(form, path) as temporary, closing(trained.loader("val")) as loader:
        model = saved(temporary)
        count = None if options.parity == "all" else options.parity
        parity = compare(trained.model, model, loader, trained.task, count)
        parity.check(trained.task.meters[0], int8=options.int8)
        del model
        facts["measured"] = {"split": facts["config"]["data"]["val_split"], **asdict(parity)}
        saved(temporary)  # again, now that the scores are known
        size = sum(each.stat().st_size for each in form.files(temporary))
    return Exported(path, size, parity, notes)


def _program(trained: Trained, form: Format, options: ExportOptions) -> tuple[Any, tuple[str, ...]]:
    model = copy.deepcopy(unwrap(trained.model)).requires_grad_(False)
    model.to(device="cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    size = trained.config.size
    shape = options.fixed or 2, trained.config.data.channels, *size
    example = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    notes: list[str] = []
    if form.fuses:
        height, width = trained.model.input_size(size) if isinstance(trained.model, OutputTransform) else size
        model, done = simplify(model, example[:, :, :height, :width], dynamic=form.dynamic)
        notes += done
    model = trained.task.to(torch.device("cpu")).with_output_transform(model)
    with one_line_errors(f"to={options.to} can't take this model"):
        program = form.convert(model, example)
    if options.int8:
        images = _calibration_images(trained, options)
        with one_line_errors(f"int8: to={options.to} can't quantize this model"):
            program = form.quantize(program, images)
    return program, tuple(notes)


def _calibration_images(trained: Trained, options: ExportOptions) -> list[Tensor]:
    """Batches of training images, chosen by the run's seed, without augmentation."""
    with closing(trained.loader("train")) as loader:
        chosen = np.random.default_rng(trained.config.seed).permutation(len(loader.plan.source))[: options.calibrate]
        step = options.fixed or loader.global_batch
        if options.fixed:
            chosen = np.resize(chosen, -(-len(chosen) // step) * step)  # the first once more
        parts = [chosen[start : start + step].tolist() for start in range(0, len(chosen), step)]
        return [loader.samples(part).images for part in parts]


@contextmanager
def _in_place(form: Format, path: Path) -> Iterator[Path]:
    """A name in a new folder beside `path`, from which the files are moved at the end, that of `path` itself last."""
    beside = TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent, ignore_cleanup_errors=True)
    with explained_writing("out", path, "set out=FILE"), beside as folder:
        temporary = Path(folder) / path.name
        yield temporary
        for source, target in reversed([*zip(form.files(temporary), form.files(path), strict=True)]):
            os.replace(source, target)


# Whether an exported model is the trained one: both on the same images.

_LEAST_AGREEMENT = 0.999  # share of images that a file's predictions have to be the same for, unless it is int8
_FEW_AGREE = 0.95  # share below which int8 is kept with a warning: its score can be as good by chance
_MOST_LOST = 0.01  # of the task's first score, by int8: a percentage point, 0.01 of R², or 1 % of a score in units


@dataclass(frozen=True)
class Parity:
    """An exported model beside the trained one."""

    images: int  # that both were given
    difference: float  # the largest absolute difference of outputs
    agreement: float  # share of the images for which both predict the same
    before: dict[str, float]  # scores of the trained model
    after: dict[str, float]  # scores of the exported one

    def check(self, meter: Meter, *, int8: bool) -> None:
        """Refuse a model that isn't good enough: by the task's first score with int8, else by the agreement."""
        before, after = self.before[meter.name], self.after[meter.name]
        scores = f"{meter.name} {meter.text(before)} before, {meter.text(after)} after"
        if int8:
            allowed = _MOST_LOST if meter.percent or meter.of_one else _MOST_LOST * abs(before)
            if not (before - after) * (1 if meter.higher_is_better else -1) <= allowed:  # NaN is refused, too
                raise ParityError(
                    f"int8 costs more than {meter.text(allowed)} on {self.images:,} images: {scores}; "
                    "no file was written; try calibrate=1000, or leave int8 out"
                )
            if self.agreement < _FEW_AGREE:
                warn(
                    f"int8 predicts the same for {self.agreement:.2%} of {self.images:,} images only, though its score "
                    f"holds ({scores}); try calibrate=1000, or compare both on more images"
                )
        elif not self.agreement >= _LEAST_AGREEMENT:
            raise ParityError(
                f"the exported model predicts the same for {self.agreement:.2%} of {self.images:,} images, "
                f"{_LEAST_AGREEMENT:.1%} are needed: outputs differ by up to {self.difference:.3g}, {scores}; "
                "no file was written; try another format, or without half"
            )


def compare(expected: nn.Module, exported: nn.Module, loader: Loader, task: Task, images: int | None = None) -> Parity:
    """Run both models on a split, or on so many of its images, spread evenly: most splits are sorted by class."""
    device, size = loader.transfer.device, len(loader.plan.source)
    batches: Iterable[Batch] = loader.epoch(0)
    if images is not None:
        ids = np.linspace(0, size - 1, min(images, size)).round().astype(np.int64).tolist()
        parts = range(0, len(ids), loader.global_batch)
        batches = (loader.samples(ids[start : start + loader.global_batch]) for start in parts)
    scorers = [Scorer(task, Metrics(task.num_sums, device)) for _ in range(2)]
    difference, agreeing, count = torch.zeros((), device=device), torch.zeros((), device=device), 0
    with torch.inference_mode():
        for batch in batches:
            pair = [model(batch.images).float() for model in (expected, exported)]
            if pair[0].shape != pair[1].shape:
                raise ParityError(
                    f"the exported model gives {tuple(pair[1].shape)} outputs where the trained one gives "
                    f"{tuple(pair[0].shape)}; no file was written; try another format"
                )
            for outputs, scorer in zip(pair, scorers, strict=True):
                scorer.add(outputs, batch)
            ours, others = (outputs[batch.valid] for outputs in pair)
            count += len(ours)
            difference = torch.maximum(difference, (ours - others).abs().nan_to_num(torch.inf).max())
            finite = others.flatten(1).isfinite().all(dim=1)
            agreeing += (task.agreement(others, ours) & finite).sum()
    before, after = (scorer.scores() for scorer in scorers)
    return Parity(count, float(difference), float(agreeing) / count, before, after)


# Metadata of an exported file: all that another program needs to use it, and EffLoop to score it.


def describe(trained: Trained, options: ExportOptions) -> dict[str, Any]:
    """The metadata of a file, but for its scores."""
    shape = [options.fixed or "batch", trained.config.data.channels, *trained.config.size]
    int8 = None
    if options.int8:
        images = min(options.calibrate, len(trained.source("train")))
        int8 = {"images": images, "weights_bits": 8 if has_vnni() else 7}
    return {
        "version": VERSION,
        "format": options.to,
        "int8": int8,
        "half": options.half,
        "preprocessing": preprocessing(trained.config),
        "input": {"name": INPUT, "shape": shape, "dtype": "float32"},
        "output": {
            "name": OUTPUT,
            "shape": [shape[0], trained.num_outputs, *(shape[2:] if trained.task.spatial else ())],
            "dtype": "float32",
            "meaning": trained.task.outputs,
        },
        "task": trained.config.task.name,
        "task_state": trained.task.state_dict(),
        "classes": list(trained.classes),
        "target_names": list(trained.target_names),
        "num_outputs": trained.num_outputs,
        "provenance": {
            "run": run_folder(trained.path).resolve().name,
            "epoch": trained.facts["progress"]["epoch"] - 1,
            "data": trained.facts.get("data"),
            "effloop": effloop.__version__,
            "torch": str(torch.__version__),
        },
        "config": portable(trained.config),
    }


def preprocessing(config: Config) -> list[dict[str, Any]]:
    """The steps from a file's bytes to the model's input, as the validation split goes through them."""
    grey = {"channels": "grey", "grey": "a JPEG's luminance; else round(0.299 R + 0.587 G + 0.114 B)"}
    deep: dict[str, Any] = {"grey_of_16_bits": "value // 256"}
    if config.decode.window is not None:
        scaled = "clip(round((value - low) * 255 / (high - low)), 0, 255); auto: an image's own least and greatest"
        deep = {"window": config.decode.window, "grey_of_16_bits": scaled}
    exif = {"exif_orientation": "applied" if config.decode.exif else "not applied"}
    return [
        {"step": "decode", **({"channels": "RGB"} if config.data.channels == 3 else grey), **deep, **exif},
        *_to_size(config),
        {"step": "scale", "divide_by": 255, "dtype": "float32"},
        {"step": "normalize", "mean": config.data.mean, "std": config.data.std},
        {"step": "layout", "order": "NCHW"},
    ]


def _to_size(config: Config) -> list[dict[str, Any]]:
    size: dict[str, Any] = config.size._asdict()
    if not isinstance(config.augment, RecipeConfig):  # of a plugin
        return [{"step": f"augment={config.augment.name}, for evaluation", **size}]
    resize = {"step": "resize", **size, "filter": "bilinear", "antialias": True, "dtype": "uint8"}
    if config.augment.eval is Evaluation.squash:
        return [resize]
    even = "a half to the even number"
    if config.augment.eval is Evaluation.letterbox:  # height and width are those of the step `pad`
        fit = {
            "height": f"max(1, round(scale * image_height)), {even}",
            "width": f"max(1, round(scale * image_width)), {even}",
            "scale": "min(height / image_height, width / image_width)",
        }
        bars = {"value": PADDING, "top": "(height - resized_height) // 2", "left": "(width - resized_width) // 2"}
        return [resize | fit, {"step": "pad", **size, **bars}]
    crop = {"step": "crop", "shape": "square, centred", "share": config.augment.eval_ratio}
    rows, columns = (side // math.gcd(*config.size) for side in config.size)
    if rows == columns:
        crop |= {"side": f"max(1, round(share * min(height, width))), {even}"}
    else:
        crop |= {
            "shape": f"{rows} x {columns}, centred",
            "unit": f"share * min(height / {rows}, width / {columns})",
            "rows": f"max(1, round({rows} * unit)), {even}",
            "columns": f"max(1, round({columns} * unit)), {even}",
        }
    names = ("side", "side") if rows == columns else ("rows", "columns")
    return [{**crop, "top": f"(height - {names[0]}) // 2", "left": f"(width - {names[1]}) // 2"}, resize]


def run_folder(checkpoint: Path) -> Path:
    """The run folder of a checkpoint, or the folder that it lies in."""
    folder = checkpoint.parent
    return folder.parent if folder.name == "checkpoints" else folder


def portable(config: Config) -> dict[str, Any]:
    """A config without this machine's paths, but for the data, which `eval` reads; computing in float32."""
    plain = configs.to_dict(config)
    plain["model"] |= {"weights": None, "freeze": [], "checkpointing": False}
    plain["data"] |= {key: None for key in ("index_dir", "download_dir") if key in plain["data"]}
    fixed = {"precision": {"name": "fp32"}, "amp": None, "probe": 0, "profile": {"name": "none"}}
    return {**plain, **fixed, "resume": None, "out": "outputs", "run": "exported"}


# Fewer operations with the same outputs: branches merged, BatchNorm folded into the layer before it.

_ATEN = torch.ops.aten
# Operations with (input, weight, bias), which a BatchNorm after them can be folded into.
_FUSE: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    _ATEN.conv1d.default: fuse_conv_bn_weights,
    _ATEN.conv2d.default: fuse_conv_bn_weights,
    _ATEN.conv3d.default: fuse_conv_bn_weights,
    _ATEN.conv2d.padding: fuse_conv_bn_weights,
    _ATEN.linear.default: fuse_linear_bn_weights,
}
_CLOSE = 1e-3  # difference of fused outputs, as a share of the largest output: float32 gives 1e-6 to 1e-5


def simplify(model: nn.Module, example: Tensor, *, dynamic: bool) -> tuple[nn.Module, list[str]]:
    """A model on the CPU re-parameterised and fused, as far as its outputs stay the same; what was done."""
    merged, notes = model, list[str]()
    with torch.no_grad():
        expected = model(example)
        if importlib.util.find_spec("timm") is not None:
            from timm.utils.model import reparameterize_model

            # Parallel branches of RepVGG, MobileOne, FastViT and others become one convolution, in a copy.
            merged = reparameterize_model(model)
            if not _close(merged(example), expected):
                return model, ["re-parameterising changes its outputs, and was left out"]
            if saved := sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in merged.parameters()):
                notes.append(f"re-parameterised: {saved:,} parameters fewer")
        try:
            graph = trace(merged, example, dynamic=dynamic).module(check_guards=False)
            assert isinstance(graph, fx.GraphModule)
            count = fold_batch_norm(graph)
            same = _close(graph(example), expected)
        except Exception as error:  # tracing fails in many ways, which the export itself reports
            return merged, [*notes, f"BatchNorm isn't fused: {reason(error)}"]
    if not same:
        return merged, [*notes, "fusing BatchNorm changes its outputs, and was left out"]
    return (graph, [*notes, f"BatchNorms fused: {count}"]) if count else (merged, notes)


def fold_batch_norm(graph: fx.GraphModule) -> int:
    """Fold each BatchNorm of an ATen graph into the convolution or linear layer that it alone reads; how many."""
    count = 0
    for norm in list(graph.graph.nodes):
        if norm.target is not _ATEN.batch_norm.default or norm.args[5]:  # [5]: in training
            continue
        layer = norm.args[0]
        if layer.target not in _FUSE or len(layer.users) > 1:
            continue
        weight, bias = layer.args[1], layer.args[2] if len(layer.args) > 2 else None
        scale, shift, mean, variance = norm.args[1:5]
        nodes = (weight, bias, mean, variance, scale, shift)
        if any(each is not None and getattr(each, "op", "") != "get_attr" for each in nodes) or len(weight.users) > 1:
            continue  # a weight that is computed, or used twice
        tensors = [None if each is None else operator.attrgetter(each.target)(graph) for each in nodes]
        fused = _FUSE[layer.target](*tensors[:4], norm.args[7], *tensors[4:])
        with graph.graph.inserting_before(layer):
            made = []
            for part, value in zip(("weight", "bias"), fused, strict=True):
                name = f"fused_{count}_{part}"
                graph.register_parameter(name, nn.Parameter(value.detach().clone(), requires_grad=False))
                made.append(graph.graph.get_attr(name))
        layer.args = (layer.args[0], *made, *layer.args[3:])
        norm.replace_all_uses_with(layer)
        graph.graph.erase_node(norm)
        count += 1
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return count


def _close(outputs: Tensor, expected: Tensor) -> bool:
    return bool((outputs - expected).abs().max() <= _CLOSE * expected.abs().max())

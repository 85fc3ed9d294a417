"""`effloop export`: a trained model as a file for other programs, kept only if it gives what the model gives."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

import effloop
from effloop import config as configs
from effloop.config import Config
from effloop.data.augment.base import Evaluation, RecipeConfig
from effloop.data.augment.native.augment import Resize
from effloop.data.augment.native.crops import PADDING
from effloop.errors import ConfigError, ParityError, reason
from effloop.inference.formats import INPUT, OUTPUT, VERSION, Format, formats, one_line_errors
from effloop.inference.parity import Parity, compare
from effloop.inference.program import trace
from effloop.inference.trained import FixedBatch, Trained
from effloop.system.hardware import has_vnni
from effloop.task.base import OutputTransform, unwrap

_SAME = 1e-4
"""Difference of a file's outputs from its own in another reading, as a share of the largest."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of `export`.

    Attributes:
        to: the format.
        out: the file; without it model.SUFFIX in the run folder, or model_int8.SUFFIX or model_half.SUFFIX.
        int8: quantize weights and activations to 8 bits, statically, by the ranges that training images give.
        half: store weights, and in some formats compute, in float16; input and output stay float32.
        batch: how many images the file takes at once; dynamic is any number.
        calibrate: how many training images int8 is calibrated by.
        parity: how many images of the validation split, spread evenly over it, the file is checked on; all is all.

    Raises:
        ConfigError: options contradict each other or the format, or `out` can't be written.
    """

    to: Annotated[str, formats]
    out: Path | None = None
    int8: bool = False
    half: bool = False
    batch: Literal["dynamic"] | Annotated[int, range(1, 65_537)] = "dynamic"
    calibrate: Annotated[int, range(1, 1_000_001)] = 256
    parity: Literal["all"] | Annotated[int, range(1, 1_000_000_001)] = "all"

    def __post_init__(self) -> None:
        kind = formats[self.to]
        if self.int8 and self.half:
            raise ConfigError("half: contradicts int8, whose weights have 8 bits; drop one of them")
        if self.int8 and not kind.int8:
            able = " or ".join(name for name, each in formats.items() if each.int8)
            raise ConfigError(f"int8: to={self.to} has no static quantization; set to={able}")
        if self.batch != "dynamic" and not kind.fuses:
            raise ConfigError(f"batch: to={self.to} has weights only, for batches of any size; leave batch out")
        if self.out is not None and self.out.suffix != kind.suffix:
            raise ConfigError(f"out: {self.out} would not be found to be {self.to}; set out=FILE{kind.suffix}")
        folder = (self.out or Path()).absolute().parent
        if self.out is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ConfigError(f"out: {self.out} can't be written, {folder} is no folder to write to; set out=FILE")
        for file in kind.files(self.out) if self.out is not None else ():
            if file.is_dir():
                raise ConfigError(f"out: {file} is a folder; set out=FILE{kind.suffix} to another name")

    @property
    def fixed(self) -> int | None:
        """Batch size of the file; None is any number."""
        return self.batch if isinstance(self.batch, int) else None


@dataclass(frozen=True)
class Exported:
    """A file that was written.

    Attributes:
        path: of the file.
        size: bytes of it and what belongs to it.
        parity: beside the trained model.
        notes: what was done to the model, in words.
    """

    path: Path
    size: int
    parity: Parity
    notes: tuple[str, ...]


def export(trained: Trained, options: ExportOptions) -> Exported:
    """Write a trained model to a file and check that file on the validation split.

    What is checked is the file, opened by its own runtime; only then it gets its name.

    Args:
        trained: from a checkpoint.
        options: how.

    Raises:
        ConfigError: the model can't be exported so.
        ParityError: the file doesn't give the model's predictions; there is no file then.
    """
    if trained.config.data.mean is None:
        raise ConfigError("data.mean: null, so the model takes uint8 images; export needs data.mean and data.std")
    form = formats[options.to](dynamic=options.fixed is None, half=options.half)
    kind = "_int8" if options.int8 else "_half" if options.half else ""
    path = options.out or run_folder(trained.path) / f"model{kind}{form.suffix}"
    program, notes = _program(trained, form, options)
    facts = describe(trained, options)

    def save(file: Path) -> nn.Module:
        """Write the file; returns the model in it."""
        with one_line_errors(f"{file.name} can't be written"):
            form.save(program, file, json.dumps(facts, ensure_ascii=False))
        with one_line_errors("the exported file can't be opened"):
            model = form.open(file, trained.device, trained.network).eval()
        return FixedBatch(model, options.fixed) if options.fixed else model

    with _in_place(form, path) as temporary, closing(trained.loader("val")) as loader:
        model = save(temporary)
        count = None if options.parity == "all" else options.parity
        parity = compare(trained.model, model, loader, trained.task, count)
        parity.check(trained.task.meters[0], int8=options.int8)
        some = loader.samples(range(min(len(loader.plan.source), loader.global_batch))).images
        with torch.inference_mode():
            outputs = model(some)
        del model
        # Again, now that the scores are known; what is on the disk is read once more.
        facts["measured"] = {"split": facts["config"]["data"]["val_split"], **asdict(parity)}
        model = save(temporary)
        with torch.inference_mode():
            again = model(some)
        if not (again - outputs).abs().max() <= _SAME * outputs.abs().max():
            raise ParityError("the file gives other outputs when it is read again; no file was written; check the disk")
        size = sum(each.stat().st_size for each in form.files(temporary))
    return Exported(path, size, parity, notes)


def _program(trained: Trained, form: Format, options: ExportOptions) -> tuple[Any, tuple[str, ...]]:
    """The model as the format has it, and what was done to it."""
    model = copy.deepcopy(unwrap(trained.model)).requires_grad_(False)
    model.to(device="cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    size = trained.config.size
    shape = options.fixed or 2, trained.config.data.channels, *size
    example = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    notes = []
    if trained.precision.dtype is not None:
        used = str(trained.precision.dtype).removeprefix("torch.")
        notes.append(f"scores before are of float32; eval of the run computes in {used}, as it was trained")
    if form.fuses:
        height, width = trained.model.input_size(size) if isinstance(trained.model, OutputTransform) else size
        simple = simplify(model, example[:, :, :height, :width], dynamic=form.dynamic)
        model = simple.model
        if simple.reparameterized:
            notes.append(f"re-parameterised: {simple.reparameterized:,} parameters fewer")
        if simple.fused:
            notes.append(f"BatchNorms fused: {simple.fused}")
        if simple.note:
            notes.append(simple.note)
    model = trained.task.to(torch.device("cpu")).with_output_transform(model)
    with one_line_errors(f"to={options.to} can't take this model"):
        program = form.convert(model, example)
    if options.int8:
        images = _calibration_images(trained, options)
        with one_line_errors(f"int8: to={options.to} can't quantize this model"):
            program = form.quantize(program, images)
    return program, tuple(notes)


def _calibration_images(trained: Trained, options: ExportOptions) -> list[Tensor]:
    """Training images, chosen at random by the run's seed, without augmentation: (N, 3, H, W) batches on the device."""
    with closing(trained.loader("train")) as loader:
        chosen = np.random.default_rng(trained.config.seed).permutation(len(loader.plan.source))[: options.calibrate]
        step = options.fixed or loader.global_batch
        if options.fixed:
            chosen = np.resize(chosen, -(-len(chosen) // step) * step)  # the first once more
        parts = [chosen[start : start + step].tolist() for start in range(0, len(chosen), step)]
        return [loader.samples(part).images for part in parts]


@contextmanager
def _in_place(form: Format, path: Path) -> Iterator[Path]:
    """A name in a new folder beside `path`, from which the files are moved to `path` and beside it at the end.

    Raises:
        ConfigError: they can't be.
    """
    try:
        with TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent, ignore_cleanup_errors=True) as folder:
            temporary = Path(folder) / path.name
            yield temporary
            _move(form.files(temporary), form.files(path), Path(folder))
    except OSError as error:
        raise ConfigError(f"out: {path} can't be written: {error.strerror or error}; set out=FILE") from error


def _move(sources: Sequence[Path], targets: Sequence[Path], folder: Path) -> None:
    """Rename files, the first of them last; if one can't be, the others are as they were before."""
    moved: list[tuple[Path, Path]] = []
    try:
        for source, target in zip(sources[1:], targets[1:], strict=True):
            kept = folder / f"before-{target.name}"
            if target.exists():
                os.replace(target, kept)
            moved.append((kept, target))
            os.replace(source, target)
        os.replace(sources[0], targets[0])
    except OSError:
        for kept, target in moved:
            if kept.exists():
                os.replace(kept, target)
            else:
                target.unlink(missing_ok=True)
        raise


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
    decode: dict[str, Any] = {"step": "decode", "channels": "RGB" if config.data.channels == 3 else "grey"}
    if config.data.channels == 1:
        decode["grey"] = "a JPEG's luminance; else round(0.299 R + 0.587 G + 0.114 B)"
    if config.decode.window is not None:
        decode["window"] = config.decode.window
    decode["exif_orientation"] = "applied" if config.decode.exif else "not applied"
    return [
        decode,
        *_to_size(config),
        {"step": "scale", "divide_by": 255, "dtype": "float32"},
        {"step": "normalize", "mean": config.data.mean, "std": config.data.std},
        {"step": "layout", "order": "NCHW"},
    ]


def _to_size(config: Config) -> list[dict[str, Any]]:
    """How an image becomes (H, W, C) uint8."""
    size: dict[str, Any] = config.size._asdict()
    if not isinstance(config.augment, RecipeConfig):  # of a plugin
        return [{"step": f"augment={config.augment.name}, for evaluation", **size}]
    antialias = getattr(config.augment, "resize", Resize.exact) is Resize.exact  # a key of augment=native
    resize = {"step": "resize", **size, "filter": "bilinear", "antialias": antialias, "dtype": "uint8"}
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
    if config.size.height == config.size.width:
        crop |= {
            "side": f"max(1, round(share * min(height, width))), {even}",
            "top": "(height - side) // 2",
            "left": "(width - side) // 2",
        }
        return [crop, resize]
    rows, columns = (side // math.gcd(*config.size) for side in config.size)
    crop |= {
        "shape": f"{rows} x {columns}, centred",
        "unit": f"share * min(height / {rows}, width / {columns})",
        "rows": f"max(1, round({rows} * unit)), {even}",
        "columns": f"max(1, round({columns} * unit)), {even}",
        "top": "(height - rows) // 2",
        "left": "(width - columns) // 2",
    }
    return [crop, resize]


def run_folder(checkpoint: Path) -> Path:
    """The run folder of a checkpoint, or the folder that it lies in."""
    folder = checkpoint.parent
    return folder.parent if folder.name == "checkpoints" else folder


def portable(config: Config) -> dict[str, Any]:
    """A config without this machine's paths, but for the data, which `eval` reads; computing in float32."""
    plain = configs.to_dict(config)
    plain["model"] |= {"weights": None, "freeze": [], "checkpointing": False}
    plain["distill"]["teacher"] = None
    plain["data"] |= {key: None for key in ("index_dir", "download_dir") if key in plain["data"]}
    fixed = {"precision": {"name": "fp32"}, "amp": None, "probe": 0, "profile": {"name": "none"}}
    return {**plain, **fixed, "resume": None, "out": "outputs", "run": "exported"}


# Fewer operations with the same outputs: branches merged, BatchNorm folded into the layer before it.

_ATEN = torch.ops.aten
_FUSE: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    _ATEN.conv1d.default: fuse_conv_bn_weights,
    _ATEN.conv2d.default: fuse_conv_bn_weights,
    _ATEN.conv3d.default: fuse_conv_bn_weights,
    _ATEN.conv2d.padding: fuse_conv_bn_weights,
    _ATEN.linear.default: fuse_linear_bn_weights,
}
"""Operations with (input, weight, bias), which a BatchNorm after them can be folded into."""

_CLOSE = 1e-3
"""Difference of fused outputs, as a share of the largest output. Float32 gives 1e-6 to 1e-5."""


@dataclass(frozen=True)
class Simplified:
    """A model with fewer operations.

    Attributes:
        model: on the CPU, in eval mode.
        reparameterized: how many parameters merging branches has saved.
        fused: how many BatchNorms were folded.
        note: why it is less than could be; empty if it isn't.
    """

    model: nn.Module
    reparameterized: int = 0
    fused: int = 0
    note: str = ""


def simplify(model: nn.Module, example: Tensor, *, dynamic: bool) -> Simplified:
    """A model re-parameterised and fused, if its outputs for random images stay the same; else as it is.

    Args:
        model: on the CPU, in eval mode; it is changed.
        example: (N, 3, H, W) images of the shape to export for.
        dynamic: whether the graph has to take any number of images.
    """
    merged, saved = model, 0
    with torch.no_grad():
        expected = model(example)
        if importlib.util.find_spec("timm") is not None:
            from timm.utils.model import reparameterize_model

            # Parallel branches of RepVGG, MobileOne, FastViT and others become one convolution, in a copy.
            merged = reparameterize_model(model)
            if not _close(merged(example), expected):
                return Simplified(model, note="re-parameterising changes its outputs, and was left out")
            saved = sum(each.numel() for each in model.parameters()) - sum(p.numel() for p in merged.parameters())
        try:
            graph = trace(merged, example, dynamic=dynamic).module(check_guards=False)
            assert isinstance(graph, fx.GraphModule)
            count = fold_batch_norm(graph)
            same = _close(graph(example), expected)
        except Exception as error:  # tracing fails in many ways, which the export itself reports
            return Simplified(merged, saved, note=f"BatchNorm isn't fused: {reason(error)}")
    if not same:
        return Simplified(merged, saved, note="fusing BatchNorm changes its outputs, and was left out")
    return Simplified(graph if count else merged, saved, count)


def fold_batch_norm(graph: fx.GraphModule) -> int:
    """Fold each BatchNorm into the convolution or linear layer that it alone reads (Jacob et al. 2018, "Quantization
    and training of neural networks for efficient integer-arithmetic-only inference", section 3.2).

    Args:
        graph: of ATen operations, in eval mode, as torch.export's `module()` has it; it is changed.

    Returns:
        How many.
    """
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

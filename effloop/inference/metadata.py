"""What an exported file says about itself: all that another program needs to use it, and EffLoop to score it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import effloop
from effloop import config as configs
from effloop.batch import ImageSize
from effloop.config import Config
from effloop.data.augment.base import Evaluation, RecipeConfig
from effloop.data.augment.native.augment import Resize
from effloop.data.augment.native.crops import PADDING
from effloop.inference.formats import INPUT, OUTPUT
from effloop.inference.formats.metadata import VERSION
from effloop.inference.parity import Parity
from effloop.inference.trained import Trained


def describe(
    trained: Trained, *, to: str, batch: int | None = None, int8: Mapping[str, Any] | None = None, half: bool = False
) -> dict[str, Any]:
    """The metadata of a file, but for its scores.

    Args:
        trained: the model.
        to: the format.
        batch: how many images the file takes at once; None is any number.
        int8: how it was calibrated; None is not at all.
        half: whether weights are in float16.
    """
    shape = [batch or "batch", trained.config.data.channels, *trained.config.size]
    return {
        "version": VERSION,
        "format": to,
        "int8": int8,
        "half": half,
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
    if config.augment.eval is Evaluation.letterbox:
        return [resize | _FIT, {"step": "pad", **size, **_BARS}]
    return [_crop(config.size, config.augment.eval_ratio), resize]


_FIT = {
    "height": "max(1, round(scale * image_height)), a half to the even number",
    "width": "max(1, round(scale * image_width)), a half to the even number",
    "scale": "min(height / image_height, width / image_width)",
}
"""Of a letterboxed image; height and width are those of the step `pad`."""

_BARS = {"value": PADDING, "top": "(height - resized_height) // 2", "left": "(width - resized_width) // 2"}


def _crop(size: ImageSize, share: float) -> dict[str, Any]:
    """The step `crop`, for images of a size."""
    crop = {"step": "crop", "shape": "square, centred", "share": share}
    if size.height == size.width:
        return crop | {
            "side": "max(1, round(share * min(height, width))), a half to the even number",
            "top": "(height - side) // 2",
            "left": "(width - side) // 2",
        }
    rows, columns = (side // math.gcd(*size) for side in size)
    return crop | {
        "shape": f"{rows} x {columns}, centred",
        "unit": f"share * min(height / {rows}, width / {columns})",
        "rows": f"max(1, round({rows} * unit)), a half to the even number",
        "columns": f"max(1, round({columns} * unit)), a half to the even number",
        "top": "(height - rows) // 2",
        "left": "(width - columns) // 2",
    }


def with_scores(metadata: Mapping[str, Any], parity: Parity) -> dict[str, Any]:
    """The metadata with what was measured on the validation split."""
    return {**metadata, "measured": {"split": metadata["config"]["data"]["val_split"], **asdict(parity)}}


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

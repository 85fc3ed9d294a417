"""What an exported file says about itself: all that another program needs to use it, and EffLoop to score it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import effloop
from effloop import config as configs
from effloop.config import Config
from effloop.data.augment.base import RecipeConfig
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
    size, count = trained.config.image_size, batch or "batch"
    return {
        "version": VERSION,
        "format": to,
        "int8": int8,
        "half": half,
        "preprocessing": preprocessing(trained.config),
        "input": {"name": INPUT, "shape": [count, 3, size, size], "dtype": "float32"},
        "output": {
            "name": OUTPUT,
            "shape": [count, trained.num_outputs],
            "dtype": "float32",
            "meaning": trained.task.outputs,
        },
        "task": trained.config.task.name,
        "classes": list(trained.classes),
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
    decode: dict[str, Any] = {"step": "decode", "channels": "RGB"}
    decode["exif_orientation"] = "applied" if config.decode.exif else "not applied"
    return [
        decode,
        *_to_size(config),
        {"step": "scale", "divide_by": 255, "dtype": "float32"},
        {"step": "normalize", "mean": config.data.mean, "std": config.data.std},
        {"step": "layout", "order": "NCHW"},
    ]


def _to_size(config: Config) -> list[dict[str, Any]]:
    """How an image becomes (S, S, 3) uint8."""
    size: dict[str, Any] = {"height": config.image_size, "width": config.image_size}
    if not isinstance(config.augment, RecipeConfig):  # of a plugin
        return [{"step": f"augment={config.augment.name}, for evaluation", **size}]
    crop = {
        "step": "crop",
        "shape": "square, centred",
        "share": config.augment.eval_ratio,
        "side": "max(1, round(share * min(height, width))), a half to the even number",
        "top": "(height - side) // 2",
        "left": "(width - side) // 2",
    }
    antialias = getattr(config.augment, "resize", "exact") == "exact"  # a key of augment=native
    return [crop, {"step": "resize", **size, "filter": "bilinear", "antialias": antialias, "dtype": "uint8"}]


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
    if "index_dir" in plain["data"]:
        plain["data"]["index_dir"] = None
    fixed = {"precision": {"name": "fp32"}, "amp": None, "probe": 0, "profile": {"name": "none"}}
    return {**plain, **fixed, "resume": None, "out": "outputs", "run": "exported"}

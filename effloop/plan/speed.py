"""How long a training step takes on a card that isn't here: a roofline for each operation, of a few fitted factors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import torch

from effloop.plan.cards import Card
from effloop.plan.trace import Trace

_KINDS = {
    "conv": "convolutions",
    "conv1x1": "1x1 convolutions",
    "conv_grouped": "grouped convolutions",
    "conv_depthwise": "depthwise convolutions",
    **dict.fromkeys(("mm", "addmm"), "products"),
    **dict.fromkeys(("bmm", "baddbmm", "_scaled_dot_product_efficient_attention"), "attention"),
    **dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax"), "softmax"),
    **dict.fromkeys(("cudnn_batch_norm", "native_batch_norm", "native_layer_norm", "native_group_norm"), "norms"),
    **dict.fromkeys(("_to_copy", "clone", "copy_", "cat", "stack", "constant_pad_nd", "roll", "index"), "copies"),
    **dict.fromkeys(("add", "add_"), "additions"),
}
_OTHERS = "elementwise"

factors: dict[str, Any] = json.loads((files("effloop.plan") / "factors.json").read_text("utf-8"))
"""Fitted by docs/plan_fit.py, which says what of; `kinds` has, for each kind of operation, the shares of the card's
FLOP/s and of its bandwidth that it reaches, and how long its backward pass takes, in forward passes."""


@dataclass(frozen=True)
class Time:
    """How long a training step takes."""

    seconds: float
    low: float  # seconds; nine of ten such predictions lie between these
    high: float
    parts: Mapping[str, float]  # kind of operation -> its seconds of all; `launching` is waiting for the CPU


def step_time(
    trace: Trace,
    batch: float,
    card: Card,
    dtype: torch.dtype | None,
    *,
    tf32: bool = False,
    optimizer_bytes: float | None = None,
    optimizer_launches: float = 0,
    gpus: int = 1,
) -> Time:
    """Predict a training step: forward and backward pass, update.

    An operation takes as long as its arithmetic or its memory traffic, whichever is longer (the roofline model of
    Williams et al., 2009, doi:10.1145/1498765.1498785), and the step no less than the CPU needs to launch them all.
    On several GPUs, gradients are summed in a ring while the backward pass runs; what takes longer is waited for.

    Args:
        trace: of the model, in half precision if `dtype` is one.
        batch: images of a GPU.
        card: what it runs on.
        dtype: that autocast computes in; None is none.
        tf32: whether float32 is rounded to TensorFloat-32 in products and convolutions.
        optimizer_bytes: that an update reads and writes; None is SGD with momentum.
        optimizer_launches: operations of an update, as torch launches them.
        gpus: among which gradients are summed.
    """
    names, dtypes, *numbers = zip(*trace.ops, strict=True)
    kinds = np.array([_KINDS.get(name, _OTHERS) for name in names])
    flops, each, fixed, width, needed, often = np.array(numbers, float)
    whole = card.tf32 or card.fp32 if tf32 else card.fp32
    half = {torch.float16: card.fp16, torch.bfloat16: card.bf16}.get(dtype, whole) or whole  # type: ignore[arg-type]
    peak = np.where(np.isin(dtypes, ("float16", "bfloat16")), half, whole)
    share, speed, backward = np.array([factors["kinds"][kind] for kind in kinds]).T
    filled = np.where(width, width / (width + factors["width"]), 1)  # attention has no width
    arithmetic = np.divide(flops * batch, peak * share * filled, out=np.zeros_like(flops), where=flops > 0)
    memory = (each * batch + fixed) / (card.bandwidth * speed)
    forward = np.maximum(arithmetic, memory) + factors["kernel"]
    backward *= needed * forward
    seconds = often * forward + backward
    parts = {str(kind): float(seconds[kinds == kind].sum()) for kind in dict.fromkeys(kinds)}
    moved = 5 * trace.trained if optimizer_bytes is None else optimizer_bytes
    parts["optimizer"] = moved / (card.bandwidth * factors["optimizer"])
    launching = factors["launch"] * (3 * len(trace.ops) + optimizer_launches)
    parts["launching"] = max(0.0, launching - sum(parts.values()))
    summing = 2 * (gpus - 1) / gpus * trace.trained / card.link
    parts["summing gradients"] = max(0.0, summing - float(backward.sum()))
    parts = {kind: length for kind, length in parts.items() if length}
    total = sum(parts.values())
    spread = np.exp(
        sum(length * factors["errors"].get(kind, factors["error"]) for kind, length in parts.items()) / total
    )
    return Time(total, total / spread, total * spread, parts)

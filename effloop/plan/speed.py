"""How long a training step takes on a card that isn't here: arithmetic and memory traffic of each operation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from effloop.plan.cards import Card
from effloop.plan.trace import Trace

_ACTIVATIONS = ("relu", "leaky_relu", "silu", "gelu", "elu", "sigmoid", "hardtanh", "hardswish", "hardsigmoid")
_BATCH_NORMS = ("cudnn_batch_norm", "native_batch_norm")
_KINDS = {
    "conv": "convolutions",
    "conv1x1": "1x1 convolutions",
    "conv_grouped": "grouped convolutions",
    "conv_depthwise": "depthwise convolutions",
    **dict.fromkeys(("mm", "addmm"), "products"),
    **dict.fromkeys(("bmm", "baddbmm", "_scaled_dot_product_efficient_attention"), "attention"),
    **dict.fromkeys((*_BATCH_NORMS, "native_layer_norm", "native_group_norm"), "norms"),
    **dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax", *_ACTIVATIONS), "activations"),
    **dict.fromkeys(("_to_copy", "clone", "copy", "stack", "constant_pad_nd", "roll", "index"), "copies"),
    **dict.fromkeys(("avg_pool2d", "_adaptive_avg_pool2d"), "average pooling"),
    "cat": "joining",
    "add": "additions",
}
_OTHERS = "elementwise"
_FEW_LANES = {(7, 0), (7, 5), (8, 0)}  # compute capabilities whose multiprocessors have 64 float32 lanes, not 128

factors: dict[str, Any] = json.loads((files("effloop.plan") / "factors.json").read_text("utf-8"))
"""Fitted by docs/plan_fit.py; `kinds` has, for each kind of operation, the share of the card's FLOP/s that it reaches,
the instructions of a warp that it takes for a byte, and the length of its backward pass, in forward passes."""


@dataclass(frozen=True)
class Time:
    """How long a training step takes."""

    seconds: float
    low: float  # seconds; of such predictions, 85 % were between these
    high: float
    parts: Mapping[str, float]  # kind of operation -> its seconds; `launching` is waiting for the CPU

    def __truediv__(self, faster: float) -> Time:
        """Of a step that is so many times as fast."""
        parts = {kind: seconds / faster for kind, seconds in self.parts.items()}
        return Time(self.seconds / faster, self.low / faster, self.high / faster, parts)


def kinds_of(trace: Trace) -> NDArray[np.intp]:
    """The kind of each operation, by its place among those of `factors`."""
    places = {kind: place for place, kind in enumerate(factors["kinds"])}
    return np.array([places[_KINDS.get(each.name.removesuffix("_"), _OTHERS)] for each in trace.ops])


def forward_times(
    kinds: NDArray[np.intp],
    flops: NDArray[np.float64],
    moved: NDArray[np.float64],
    peak: NDArray[np.float64],
    card: Card,
    *,
    channels_last: bool = True,
) -> NDArray[np.float64]:
    """Seconds of operations without their backward pass.

    A roofline (Williams et al., 2009, doi:10.1145/1498765.1498785) whose edge is round, as arithmetic and traffic
    overlap in part; and what reads memory takes instructions, too, by which cards differ other than by bandwidth.

    Args:
        kinds: of N operations.
        flops: of each.
        moved: bytes that each reads and writes.
        peak: FLOP/s that the card has for each one's dtype.
        card: what they run on.
        channels_last: memory layout; otherwise convolutions copy their tensors into it and back.
    """
    share, instructions, _ = np.array([*factors["kinds"].values()]).T[:, kinds]
    grouped, depthwise = ([*factors["kinds"]].index(f"{kind} convolutions") for kind in ("grouped", "depthwise"))
    if not channels_last:
        first = factors["channels_first"]
        share = np.where(kinds == grouped, share * first["grouped"], share)
        moved = np.where(kinds <= depthwise, moved * first["traffic"], moved)  # which comes after other convolutions
    lanes = card.fp32 * (2 if card.capability in _FEW_LANES else 1)
    arithmetic = flops / (share * np.where(kinds == depthwise, lanes, peak))  # a depthwise one has no tensor cores
    traffic = moved * (1 / (card.bandwidth * factors["bandwidth"]) + instructions / (lanes / 64))
    times: NDArray[np.float64] = np.hypot(arithmetic, traffic) + factors["kernel"]
    return times


def with_launching(busy: Any, launches: Any) -> Any:
    """Seconds of what the card computes in `busy` seconds, while the CPU launches so many operations of a trace."""
    return (busy**4 + (factors["launch"] * launches) ** 4) ** 0.25


def step_time(
    trace: Trace,
    batch: float,
    card: Card,
    dtype: torch.dtype | None,
    *,
    tf32: bool = False,
    channels_last: bool = True,
    optimizer_bytes: float | None = None,
    accumulate: int = 1,
    gpus: int = 1,
) -> Time:
    """Predict a training step: forward and backward pass, update.

    The CPU launches operations while the card computes; the one that is slower sets the pace. On several GPUs,
    gradients are summed in a ring while the backward pass runs; what takes longer than that is waited for.

    Args:
        trace: of the model, in half precision if `dtype` is one.
        batch: images of a GPU.
        card: what it runs on.
        dtype: that autocast computes in; None is none.
        tf32: whether float32 is rounded to TensorFloat-32 in products and convolutions.
        channels_last: memory layout of the model.
        optimizer_bytes: that an update reads and writes; None is SGD with momentum.
        accumulate: batches of an update, which share it, and the summing of gradients.
        gpus: among which gradients are summed.
    """
    names, dtypes, *numbers = zip(*trace.ops, strict=True)
    flops, each, fixed, needed, often = np.array(numbers, float)
    kinds, half = kinds_of(trace), np.isin(dtypes, ("float16", "bfloat16"))
    whole = (tf32 and card.tf32) or card.fp32
    tensor_cores = {torch.float16: card.fp16, torch.bfloat16: card.bf16}.get(dtype) if dtype else None
    peak = np.where(half, tensor_cores or whole, whole)
    forward = forward_times(kinds, flops * batch, each * batch + fixed, peak, card, channels_last=channels_last)
    if dtype == torch.bfloat16:
        forward[np.isin(names, _BATCH_NORMS)] *= factors["bfloat16_batch_norms"]
    backward = forward * needed * np.array([*factors["kinds"].values()])[kinds, 2]
    seconds = np.bincount(kinds, forward * often + backward, len(factors["kinds"]))
    parts = dict(zip(factors["kinds"], seconds.tolist(), strict=True))
    moved = 5 * trace.trained if optimizer_bytes is None else optimizer_bytes
    parts["optimizer"] = moved / (card.bandwidth * factors["bandwidth"]) / accumulate
    busy = sum(parts.values())
    parts["launching"] = with_launching(busy, float(often.sum())) - busy
    summing = 2 * (gpus - 1) / gpus * trace.trained / card.link
    parts["summing gradients"] = max(0.0, summing - float(backward.sum())) / accumulate
    total = sum(parts.values())
    spread = factors["spread"]
    off = np.exp(sum(length * spread.get(kind, spread["others"]) for kind, length in parts.items()) / total)
    return Time(total, total / off, total * off, {kind: length for kind, length in parts.items() if length})

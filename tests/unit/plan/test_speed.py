"""Predicted time of a training step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from effloop.plan.cards import cards
from effloop.plan.speed import step_time
from effloop.plan.trace import Op, Trace

OPS = [
    Op("conv", "float16", 2e9, 1e6, 1e5),
    Op("conv_depthwise", "float16", 2e7, 1e6, 1e4),
    Op("cudnn_batch_norm", "float16", 0, 1e6, 1e3),
    Op("relu_", "float16", 0, 1e6, 0),
    Op("addmm", "float16", 1e6, 1e3, 1e6),
    Op("_scaled_dot_product_efficient_attention", "float16", 1e6, 1e3, 0),
]
TRACE = Trace(ops=OPS, saved=4e6, fixed=0, buffers=1e6, block=0, weights=10**7, trained=10**7, parameters=10)
H100 = cards["h100"]


def test_parts_make_up_the_step_and_lie_in_its_range() -> None:
    time = step_time(TRACE, 64, H100, torch.bfloat16, gpus=8)
    assert time.low < time.seconds < time.high
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert {"convolutions", "depthwise convolutions", "norms", "activations", "products", "optimizer"} <= {*time.parts}


@pytest.mark.parametrize("batch", [1, 64, 4096])
def test_a_better_card_is_never_slower_and_a_larger_batch_never_faster(batch: int) -> None:
    def seconds(batch: int = batch, dtype: torch.dtype | None = torch.float16, **fields: float) -> float:
        return step_time(TRACE, batch, replace(H100, **fields), dtype).seconds

    here = seconds()
    assert seconds(batch + 1) >= here
    assert seconds(batch + 1) / (batch + 1) <= here / batch
    assert seconds(bandwidth=2 * H100.bandwidth) <= here
    assert seconds(fp16=2 * H100.fp16) <= here <= seconds(dtype=None)
    assert seconds(dtype=torch.bfloat16, bf16=0) >= seconds(dtype=None)  # without tensor cores for it


def test_batch_norms_take_longer_in_bfloat16() -> None:
    half, brain = (step_time(TRACE, 64, H100, dtype).parts for dtype in (torch.float16, torch.bfloat16))
    assert brain["norms"] > 1.5 * half["norms"]
    assert brain["convolutions"] == half["convolutions"]


def test_few_images_wait_for_the_cpu_and_slow_links_for_gradients() -> None:
    many = replace(TRACE, ops=OPS[3:4] * 1000)
    assert step_time(many, 1, H100, None).parts["launching"] > 0
    assert step_time(many, 1, H100, None).parts.get("summing gradients", 0) == 0
    slow = replace(H100, link=1e6)
    assert step_time(many, 1, slow, None, gpus=2).parts["summing gradients"] == pytest.approx(10, rel=0.01)

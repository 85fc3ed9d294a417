"""What a training step takes of a GPU's memory, and the largest batch that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

import effloop
from effloop.assemble.environment import Resolved, resolved
from effloop.plan.memory import CONTEXT, gpu_memory, largest_batch
from effloop.plan.trace import Trace

MB, GB = 10**6, 10**9
STEP = Trace([], 40 * MB, fixed=50 * MB, buffers=2 * MB, weights=101 * MB, trained=100 * MB, parameters=9)


def config(*words: str) -> Resolved:
    return resolved(effloop.compose(["image_size=200", "optim.ema=0", *words]))


def test_parts_of_a_step() -> None:
    parts = gpu_memory(STEP, config(), 10, 2.0)
    assert parts == {
        **{"weights": 101 * MB, "gradients": 100 * MB, "optimizer": 200 * MB, "casts": 50 * MB},
        **{"activations": 400 * MB, "buffers": 20 * MB, "inputs": 6 * MB, "context": CONTEXT},
        "fragmentation": parts["fragmentation"],
    }
    assert parts["fragmentation"] == pytest.approx(0.03 * (sum(parts.values()) - CONTEXT), rel=0.01)


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("optim.ema=0.9", {"average": 101}),
        ("data.channels=1", {"inputs": 2}),
        ("image_size=[100,400]", {}),
        ("progressive=[100,400]", {"activations": 1600, "buffers": 80, "inputs": 24}),
        ("parallel=fsdp", {"weights": 25.25, "gradients": 25, "optimizer": 50}),
        ("parallel=ddp", {}),
        ("accumulate=4", {}),
        ("parallel.virtual=16", {"gradients": 300}),  # sums of one part, of two, and of four
        ("probe=5", {"gradients": 0, "optimizer": 0, "casts": 0, "activations": 0}),
    ],
)
def test_what_a_config_changes(words: str, changed: dict[str, float]) -> None:
    usual, found = (gpu_memory(STEP, each, 10, 2.0, gpus=4) for each in (config(), config(words)))
    wanted = usual | {name: round(size * MB) for name, size in changed.items()}
    wanted["fragmentation"] = found["fragmentation"]
    assert found == {name: size for name, size in wanted.items() if size}


def test_an_update_of_few_images_takes_more_than_their_backward_pass() -> None:
    parts = gpu_memory(STEP, config(), 1, 2.0)
    assert parts["update"] == 100 * MB - parts["casts"] - parts["activations"] - parts["buffers"]


def test_the_largest_batch_is_the_last_that_fits() -> None:
    plain = config()
    at_64, at_5 = (sum(gpu_memory(STEP, plain, batch, 2.0).values()) for batch in (64, 5))
    assert largest_batch(STEP, plain, at_64, 2.0) == 64
    assert largest_batch(STEP, plain, at_64 - 1, 2.0) == 56  # a multiple of 8
    assert largest_batch(STEP, plain, at_5, 2.0) == 5
    assert largest_batch(STEP, plain, sum(gpu_memory(STEP, plain, 800_000, 2.0).values()), 2.0) == 800_000
    assert largest_batch(replace(STEP, weights=9 * GB), plain, 8 * GB, 2.0) == 0

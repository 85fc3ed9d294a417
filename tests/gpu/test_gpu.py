"""What only a CUDA device shows."""

from __future__ import annotations

from pathlib import Path

import emulator
import pytest
import torch
from runs import TINY, rows, train

import effloop
from effloop.precision import PrecisionConfig, precisions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_batches_arrive_normalised_and_as_on_the_cpu(here: Path, photos: Path) -> None:
    batches = {}
    for device in ("cpu", "cuda"):
        config = effloop.compose([f"data.root={photos}", *TINY, f"device={device}"])
        batches[device] = next(iter(effloop.build_loader(config).epoch(0)))
    ours, theirs = batches["cuda"], batches["cpu"]
    assert ours.images.is_cuda
    assert ours.images.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours.images.cpu(), theirs.images)
    assert torch.equal(ours.targets.cpu(), theirs.targets)
    assert torch.equal(ours.ids, theirs.ids)


def test_a_preview_is_that_of_the_cpu(here: Path, photos: Path) -> None:
    found = []
    for device in ("cpu", "cuda"):
        config = effloop.compose([f"data.root={photos}", *TINY, f"device={device}"])
        found.append(effloop.build_loader(config).preview(8, 3).images)
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("engine", ["threads", "processes", "inline"])
def test_host_batches_are_pinned(here: Path, photos: Path, engine: str) -> None:
    config = effloop.compose([f"data.root={photos}", *TINY, "device=cuda", f"engine={engine}", "num_workers=1"])
    loader = effloop.build_loader(config)
    assert next(iter(loader.engine.stream(0))).images.is_pinned()
    loader.close()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "amp"])
def test_trains(here: Path, photos: Path, precision: str) -> None:
    args = ["device=cuda", f"precision={precision}", "epochs=12", "lr=0.01", "task.label_smoothing=0"]
    assert train(photos, "run=x", *args) == 0
    assert rows(here / "outputs/x")[-1]["top1"] > 0.9


def test_a_deterministic_run_repeats_to_the_bit(here: Path, photos: Path) -> None:
    for name in ("first", "second"):
        assert train(photos, f"run={name}", "device=cuda", "deterministic=true", "precision=amp") == 0
    assert rows(here / "outputs/first") == rows(here / "outputs/second")


@pytest.mark.skipif(emulator.active(), reason="DALI has kernels of its own")
def test_dali_decodes_on_the_gpu(here: Path, photos: Path) -> None:
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    found = {}
    for engine, device in (("threads", "cpu"), ("dali", "cuda")):
        words = [f"data.root={photos}", *TINY, f"device={device}", f"engine={engine}", "num_workers=1"]
        loader = effloop.build_loader(effloop.compose(words))
        found[device] = [batch for epoch in (0, 1) for batch in loader.epoch(epoch)]
        loader.close()
    for ours, theirs in zip(found["cuda"], found["cpu"], strict=True):
        assert ours.images.is_cuda
        assert ours.ids.equal(theirs.ids)
        assert ours.targets.cpu().equal(theirs.targets)
        assert (ours.images.cpu() - theirs.images).abs().mean() < 0.05  # normalised: 3 levels


def test_fp16_scales_the_loss() -> None:
    device = torch.device("cuda")
    precision = precisions.build(PrecisionConfig(name="fp16"), device)
    weight = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    precision.backward(weight.sum())
    assert float(weight.grad[0]) == precision.state_dict()["scale"]
    precision.step(optimizer)
    assert torch.allclose(weight, torch.full_like(weight, 0.9))
    weight.grad = torch.full_like(weight, float("inf"))
    precision.step(optimizer)
    assert torch.allclose(weight, torch.full_like(weight, 0.9))  # an overflow updates nothing

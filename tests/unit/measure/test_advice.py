"""Each line of advice where it applies, and none where it doesn't."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TINY
from torch import Tensor, nn

import effloop
from effloop.config import Config
from effloop.measure.advice import RunFacts, advice
from effloop.model import freeze, models, probe
from effloop.parallel import Parallel, ParallelConfig
from effloop.precision import precisions

CPU = torch.device("cpu")
GPU = {"device": "cuda", "mixed": True}
RANKS = {"world_size": 2, "local_world_size": 2, "sharing": 2}
QUIET = ("model.width=8", "data.tail=wrap", "epochs=40")  # in TINY's batches of 8: nothing to say


def composed(photos: Path, *overrides: str) -> Config:
    return effloop.compose([f"data.root={photos}", *TINY, *QUIET, *overrides])


def known(config: Config, model: nn.Module | None = None) -> RunFacts:
    """The facts of a run that isn't begun, on two cores."""
    parallel = Parallel(ParallelConfig(name="none"), CPU)
    loaders = [effloop.build_loader(config, split, parallel=parallel) for split in ("train", "val")]
    if model is None:
        size = config.image_size
        model = models.build(config.model, num_classes=len(loaders[0].classes), image_size=size)
        freeze(model, config.model.freeze)
    seen = probe(model, config.size, channels_last=True)
    assert config.precision is not None
    facts = RunFacts.of(config, model, seen, loaders, parallel, precisions.build(config.precision, CPU))
    for loader in loaders:
        loader.close()
    return replace(facts, cores=2, torch_threads=1)


@cache
def run(photos: Path, overrides: tuple[str, ...]) -> tuple[Config, RunFacts]:
    config = composed(photos, *overrides)
    return config, known(config)


def said(photos: Path, *overrides: str, model: nn.Module | None = None, **facts: Any) -> list[str]:
    config, found = run(photos, overrides)
    lines = advice(config, replace(found if model is None else known(config, model), **facts))
    assert all("\n" not in line and ": " in line and len(line) < 320 for line in lines), lines
    return lines


def test_nothing_of_the_default_run_on_two_cores() -> None:
    config = effloop.compose([])
    facts = known(config)
    assert advice(config, replace(facts, torch_threads=2)) == []
    assert facts.samples % config.batch_size == 11  # a tail, of 0.7 %


def test_nothing_where_all_is_well(photos: Path) -> None:
    assert said(photos) == []
    assert said(photos, **GPU) == []
    assert said(photos, "batch_size=16", "num_workers=1", torch_threads=1, **RANKS) == []


def test_few_updates(photos: Path) -> None:
    (line,) = said(photos, "epochs=7")  # of 40 images in batches of 8
    assert line == "epochs: 7 of 5 updates are 35 in all, too few to learn much; set epochs=8 or more"
    assert said(photos, "epochs=8") == []
    assert said(photos, "epochs=2", "probe=4") == []
    (line,) = said(photos, "epochs=10", "batch_size=20")
    assert line.endswith("10 of 2 updates are 20 in all, too few to learn much; set epochs=20 or more")
    (line,) = said(photos, "epochs=30", "batch_size=40")
    assert line.endswith("; set epochs=40 or more, or batch_size=30")


def test_a_batch_that_is_no_multiple_of_eight(photos: Path) -> None:
    args = ("precision=bf16", "batch_size=13")
    (line,) = said(photos, *args, **GPU)
    assert line.startswith("batch_size: 13 is not a multiple of 8")
    assert "precision=bf16" in line
    assert line.endswith("set batch_size=16")
    assert said(photos, *args) == []  # no tensor cores
    assert said(photos, "batch_size=13", device="cuda") == []  # nothing in 16 bits
    assert said(photos, "batch_size=3", **GPU)[0].endswith("set batch_size=8")
    assert said(photos, "image_size=18", **GPU) == []  # a product's rows are images times pixels


def test_widths_that_are_no_multiple_of_eight(photos: Path) -> None:
    args = ("precision=bf16", "model.width=12")
    (line,) = said(photos, *args, **GPU)
    assert line.startswith("model: 2 layers have (features.0.0, features.1.down.0.0) a width that is not a multiple")
    assert line.endswith("under precision=bf16; set model.width=16")
    assert said(photos, *args) == []
    layers = [nn.Conv2d(size, 5, 3, padding=1) for size in (3, 5, 5, 5)]
    odd = nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(5 * 8 * 8, 3))
    (line,) = said(photos, model=odd, **GPU)
    assert line.startswith("model: 4 layers have (0, 1, 2, ...)")
    assert line.endswith("choose a model of such widths")


class Wasteful(nn.Module):
    """Six biases that BatchNorm takes away, and a layer that nothing comes from."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(nn.Conv2d(8 if number else 3, 8, 1), nn.BatchNorm2d(8)) for number in range(6)]
        self.layers = nn.Sequential(*[layer for pair in pairs for layer in pair], nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(8, 3)
        self.spare = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(images))
        return logits


def test_parameters_that_do_nothing(photos: Path) -> None:
    bias, unused = said(photos, model=Wasteful())
    assert bias.startswith("model: 6 layers have (layers.0, layers.2, layers.4, layers.6, layers.8, ...) a bias")
    assert "bias=False" in bias
    assert unused.startswith("model: 2 parameters are (spare.weight, spare.bias) not used")
    assert unused.endswith("set model.freeze to [spare.weight,spare.bias]")
    assert "parallel=ddp" in said(photos, "batch_size=16", model=Wasteful(), world_size=2)[1]


def test_frozen_parameters(photos: Path) -> None:
    (line,) = said(photos, "model.freeze=[features]")
    head = 64 * 3 + 3
    total = sum(
        each.numel() for each in models.build(composed(photos).model, num_classes=3, image_size=16).parameters()
    )
    share = f"{100 * (total - head) / total:.1f} %"
    assert line.startswith(f"model: {total - head:,} of {total:,} parameters ({share}) are frozen and stay as they are")
    assert line.endswith("set model.freeze=[] to train them")
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.Linear(8, 3))
    model[1].requires_grad_(False)
    assert said(photos, model=model)[0].endswith("as the model was built")


@pytest.mark.parametrize(
    ("batch_size", "tail", "fix"),
    [
        (12, "4 of 40 images (10.0 %)", "which takes 8 images twice, or batch_size=10"),
        (24, "16 of 40 images (40.0 %)", "which takes 8 images twice"),
    ],
)
def test_a_tail_that_is_dropped(photos: Path, batch_size: int, tail: str, fix: str) -> None:
    (line,) = said(photos, f"batch_size={batch_size}", "data.tail=drop")
    assert line == (
        f"data.tail: drop skips {tail} each epoch (a different subset each time); set data.tail=wrap, {fix}"
    )
    assert said(photos, f"batch_size={batch_size}", "data.tail=wrap") == []


def test_no_tail(photos: Path) -> None:
    for batch_size in (8, 10):
        assert said(photos, f"batch_size={batch_size}", "data.tail=drop") == []


def test_a_small_tail_is_not_worth_a_line(photos: Path) -> None:
    args = ("batch_size=16", "data.tail=drop")
    assert said(photos, *args, samples=16 * 18 + 15) == []  # 4.95 %
    assert len(said(photos, *args, samples=16 * 17 + 15)) == 1  # 5.2 %


def test_a_group_that_gets_no_update(photos: Path) -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3))
    (line,) = said(photos, "accumulate=4", "batch_size=7", model=plain)  # 6 batches, the last filled up
    assert line.startswith("accumulate: 4 leaves the last 2 of 6 batches")
    assert "set accumulate=3," in line
    assert said(photos, "accumulate=3", "batch_size=7", model=plain) == []


def test_more_loading_threads_than_cores(photos: Path) -> None:
    (line,) = said(photos, "num_workers=3")
    assert line == "num_workers: 3 are more than the 2 cores that this run may use; set num_workers=2, or auto"
    assert said(photos, "num_workers=2") == []
    assert said(photos, "num_workers=auto") == []
    (line,) = said(photos, "num_workers=2", "batch_size=16", **RANKS)
    assert line.startswith("num_workers: 2 in each of 2 ranks are more than the 2 cores")
    assert line.endswith("set num_workers=1, or auto")


def test_more_computing_threads_than_cores(photos: Path) -> None:
    (line,) = said(photos, torch_threads=2, cores=1)
    assert line.startswith("threads: torch computes on 2 threads, more than the 1 core that")
    assert line.endswith("set threads=1")
    assert said(photos, torch_threads=2, cores=1, device="cuda") == []  # the CPU has little to compute
    assert len(said(photos, "batch_size=16", torch_threads=2, **RANKS)) == 1


def test_more_ranks_than_cores(photos: Path) -> None:
    (line,) = said(photos, "batch_size=16", world_size=3, local_world_size=3, sharing=3)
    assert line == "parallel: 3 ranks on 2 cores take turns; start 2 at most (parallel.processes=2)"


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_ring_has_no_more_slots(photos: Path, engine: str, prefetch: int) -> None:
    config = composed(photos, "num_workers=1", "batch_size=2", f"engine={engine}", f"engine.prefetch={prefetch}")
    loader = effloop.build_loader(config)
    for _ in loader.epoch(0):
        pass
    ring: Any = loader.engine.pool.ring if engine == "processes" else loader.engine.ring  # type: ignore[attr-defined]
    assert prefetch < len(ring) <= prefetch + 2
    loader.close()


def test_batch_norm_of_few_images_on_a_rank(photos: Path) -> None:
    (line,) = said(photos, world_size=2)
    assert line.startswith("batch_size: BatchNorm's statistics are of 8 images only; set parallel.sync_batchnorm=true")
    assert line.endswith("or batch_size=16")
    assert said(photos, "batch_size=16", world_size=2) == []
    assert said(photos) == []  # one rank: its batch is what was asked for
    assert len(said(photos, "model.freeze=[features]", world_size=2)) == 1  # frozen statistics are nobody's


def test_batch_norm_and_accumulation(photos: Path) -> None:
    (line,) = said(photos, "accumulate=5")
    assert line.startswith("accumulate: BatchNorm's statistics are of 8 images, fewer than an update has")
    assert "batch_size=40" in line
    assert said(photos, "accumulate=5", model=nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3))) == []


def test_determinism_has_a_price_on_a_gpu(photos: Path) -> None:
    (line,) = said(photos, "deterministic=true", **GPU)
    assert line.startswith("deterministic: true keeps cuDNN")
    assert said(photos, "deterministic=true") == []
    assert said(photos, **GPU) == []


def test_facts_are_those_of_the_parts(photos: Path) -> None:
    facts = known(composed(photos, "precision=bf16"))
    assert (facts.device, facts.mixed, facts.world_size, facts.samples) == ("cpu", True, 1, 40)
    assert facts.batch_norms == 7
    assert facts.memory.free["host"] > 0
    assert not known(composed(photos)).mixed

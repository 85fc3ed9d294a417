"""Each line of advice where it applies, and none where it doesn't."""

import re
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
from effloop.measure.advice import RunFacts, advice, facts_of
from effloop.model import freeze, models, probe
from effloop.parallel import Parallel, ParallelConfig
from effloop.precision import precisions

CPU = torch.device("cpu")
GPU = {"device": "cuda", "mixed": True}
RANKS = {"world_size": 2, "sharing": 2}
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
    facts = facts_of(config, model, seen, loaders, parallel, precisions.build(config.precision, CPU))
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


def test_nothing_of_the_default_run_on_two_cores():
    config = effloop.compose([])
    facts = known(config)
    assert advice(config, replace(facts, torch_threads=2)) == []
    assert facts.samples % config.batch_size == 11  # a tail, of 0.7 %


def test_nothing_where_all_is_well(photos):
    assert said(photos) == []
    assert said(photos, **GPU) == []
    assert said(photos, "batch_size=16", "num_workers=1", torch_threads=1, **RANKS) == []


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


PLAIN = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3))
FROZEN = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8).requires_grad_(False), nn.Linear(8, 3))
ODD = nn.Sequential(
    *(nn.Conv2d(size, 5, 3, padding=1) for size in (3, 5, 5, 5)), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(5 * 8 * 8, 3)
)


@pytest.mark.parametrize(
    ("words", "facts", "line"),
    [  # overrides, facts, and the line's beginning and end; none where there is nothing to advise
        ("epochs=4", {}, "epochs: 20 updates of the weights in all, 5 an epoch, …; set epochs=20 or more"),
        ("epochs=5", {}, ""),
        ("epochs=2 probe=4", {}, ""),
        ("epochs=1 batch_size=40", {}, "epochs: 1 update of the…; set epochs=100 or more"),
        ("epochs=2 batch_size=32", {"samples": 600}, ""),  # 36 of them
        ("precision=bf16 batch_size=13", GPU, "batch_size: 13 is not a multiple of 8…set batch_size=16"),
        ("precision=bf16 batch_size=13", {}, ""),  # no tensor cores
        ("batch_size=13", {"device": "cuda"}, ""),  # nothing in 16 bits
        ("batch_size=3", GPU, "batch_size: 3 is not…set batch_size=8"),
        ("image_size=18", GPU, ""),  # a product's rows are images times pixels
        ("precision=bf16 model.width=12", GPU, "model: 2 layers have (features.0.0, features…; set model.width=16"),
        ("precision=bf16 model.width=12", {}, ""),
        ("", GPU | {"model": ODD}, "model: 4 layers have (0, 1, 2, ...)…choose a model of such widths"),
        ("model.freeze=[features]", {}, "model: …are frozen and stay as they are; set model.freeze=[] to train them"),
        ("", {"model": FROZEN}, "model: 6,152 of 6,179 parameters (99.6 %) are frozen…, as the model was built"),
        ("batch_size=12 data.tail=drop", {}, "data.tail: drop skips 4 of 40 images (10.0 %)…, or batch_size=10"),
        ("batch_size=24 data.tail=drop", {}, "data.tail: drop skips 16 of 40 images (40.0 %)…takes 8 images twice"),
        ("batch_size=24 data.tail=wrap", {}, ""),
        ("batch_size=8 data.tail=drop", {}, ""),
        ("batch_size=10 data.tail=drop", {}, ""),
        ("batch_size=16 data.tail=drop", {"samples": 16 * 18 + 15}, ""),  # 4.95 %
        ("batch_size=16 data.tail=drop", {"samples": 16 * 17 + 15}, "data.tail: …"),  # 5.2 %
        ("accumulate=4 batch_size=7", {"model": PLAIN}, "accumulate: 4 leaves the last 2 of 6 batches…"),
        ("accumulate=3 batch_size=7", {"model": PLAIN}, ""),
        (
            "num_workers=3",
            {},
            "num_workers: 3 are more than the 2 cores…where loading waits…; else set num_workers=2, or auto",
        ),
        ("num_workers=2", {}, ""),
        ("num_workers=auto", {}, ""),
        ("num_workers=2 batch_size=16", RANKS, "num_workers: 2 in each of 2 ranks…; else set num_workers=1, or auto"),
        ("", {"torch_threads": 2, "cores": 1}, "threads: torch computes on 2 threads, more than…; set threads=1"),
        ("", {"torch_threads": 2, "cores": 1, "device": "cuda"}, ""),  # the CPU has little to compute
        ("batch_size=16", {"torch_threads": 2, **RANKS}, "threads: …"),
        ("batch_size=16", {"world_size": 3, "sharing": 3}, "parallel: 3 ranks on 2 cores…(parallel.processes=2)"),
        ("", {"world_size": 2}, "batch_size: BatchNorm's…set parallel.sync_batchnorm=true…or batch_size=16"),
        ("batch_size=16", {"world_size": 2}, ""),
        ("model.freeze=[features]", {"world_size": 2}, "model: …"),  # frozen statistics are nobody's
        ("accumulate=5", {}, "accumulate: BatchNorm's statistics are of 8 images, fewer than…batch_size=40…"),
        ("accumulate=5", {"model": PLAIN}, ""),
        ("deterministic=true", GPU, "deterministic: true keeps cuDNN…"),
        ("deterministic=true", {}, ""),
    ],
)
def test_lines(photos, words, facts, line):
    lines = said(photos, *words.split(), **facts)
    assert len(lines) == bool(line)
    if line:
        assert re.fullmatch(".*".join(map(re.escape, line.split("…"))), lines[0])


def test_parameters_that_do_nothing(photos):
    bias, unused = said(photos, model=Wasteful())
    assert bias.startswith("model: 6 layers have (layers.0, layers.2, layers.4, layers.6, layers.8, ...) a bias")
    assert "bias=False" in bias
    assert unused.startswith("model: 2 parameters are (spare.weight, spare.bias) not used")
    assert unused.endswith("set model.freeze to [spare.weight,spare.bias]")
    assert "parallel=ddp" in said(photos, "batch_size=16", model=Wasteful(), world_size=2)[1]


@pytest.mark.parametrize(("engine", "prefetch"), [("threads", 3), ("processes", 1)])
def test_a_ring_has_no_more_slots(photos, engine, prefetch):
    config = composed(photos, "num_workers=1", "batch_size=2", f"engine={engine}", f"engine.prefetch={prefetch}")
    loader = effloop.build_loader(config)
    for _ in loader.epoch(0):
        pass
    ring: Any = loader.engine.pool.ring if engine == "processes" else loader.engine.ring  # type: ignore[attr-defined]
    assert prefetch < len(ring) <= prefetch + 2
    loader.close()


def test_facts_are_those_of_the_parts(photos):
    facts = known(composed(photos, "precision=bf16"))
    assert (facts.device, facts.mixed, facts.world_size, facts.samples) == ("cpu", True, 1, 40)
    assert facts.batch_norms == 7
    assert facts.memory.free["host"] > 0
    assert not known(composed(photos)).mixed

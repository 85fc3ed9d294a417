"""What a run takes of the machine's memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from runs import TINY
from torch import nn

import effloop
from effloop.assemble.environment import resolved
from effloop.config import Config
from effloop.data.loader import Loader
from effloop.measure.memory import Memory, Part, device_batch, expected_memory, host_batch, memory_table
from effloop.model import models, probe
from effloop.parallel import Parallel, ParallelConfig
from effloop.plan.memory import CONTEXT, largest_batch
from effloop.plan.trace import trace
from effloop.system import gpu
from effloop.task import tasks

CPU = Parallel(ParallelConfig(name="none"), torch.device("cpu"))
MB = 1_000_000


def built(photos: Path, *overrides: str) -> tuple[Config, nn.Module, list[Loader]]:
    config = effloop.compose([f"data.root={photos}", *TINY, "num_workers=1", *overrides])
    loaders = [effloop.build_loader(config, split) for split in ("train", "val")]
    model = models.build(config.model, num_classes=len(loaders[0].classes), image_size=config.image_size)
    return config, model, loaders


def expected(photos: Path, *overrides: str) -> Memory:
    config, model, loaders = built(photos, *overrides)
    return expected_memory(config, model, probe(model, config.size, channels_last=True), loaders, CPU)


def part(memory: Memory, name: str) -> int:
    return sum(each.bytes for each in memory.parts if each.name == name)


def test_parts_of_a_run(photos: Path) -> None:
    memory = expected(photos, "optim.ema=0.9", "optim=adamw", "engine.prefetch=3")
    slot = 8 * (3 * 16 * 16 * 4 + 1 + 8 + 1)  # normalised already
    assert part(memory, "train batches") == part(memory, "val batches") == 5 * slot
    weights, gradients = part(memory, "weights"), part(memory, "gradients")
    assert weights == part(memory, "average") > gradients
    assert part(memory, "optimizer") == 2 * gradients
    assert part(memory, "inputs") == 2 * 8 * 8
    assert part(memory, "activations") > 0
    assert memory.total("host") == sum(each.bytes for each in memory.parts)
    assert memory.page_cache == sum(path.stat().st_size for path in photos.rglob("*.jpg"))


@pytest.mark.parametrize(("words", "level"), [("augment.device=gpu", 1), ("augment.mixup=0.2", 4)])
def test_images_that_are_made_in_the_loops_thread(photos: Path, words: str, level: int) -> None:
    memory = expected(photos, words, "augment=native_resize_crop")
    assert part(memory, "train batches") >= 4 * 8 * 3 * 16 * 16 * level
    assert part(memory, "inputs") >= 2 * 8 * 3 * 16 * 16 * 4


def test_what_is_not_there_takes_nothing(photos: Path) -> None:
    memory = expected(photos, "optim=sgd", "optim.momentum=0", "optim.nesterov=false", "num_workers=0")
    assert part(memory, "optimizer") == part(memory, "average") == 0
    assert part(memory, "train batches") == 2 * 8 * (3 * 16 * 16 * 4 + 10)  # the loop's, and the next one
    larger = expected(photos, "optim=sgd", "num_workers=0", "progressive=[16,32]", "batch_size=16")
    assert part(larger, "optimizer") == part(memory, "gradients")
    assert part(larger, "activations") == pytest.approx(8 * part(memory, "activations"))


def test_workers_that_are_processes_and_the_cache(photos: Path) -> None:
    memory = expected(photos, "engine=processes", "num_workers=2", "data.cache=pixels")
    assert part(memory, "train workers") == part(memory, "val workers") > 0
    cache = next(each for each in memory.parts if each.name == "train cache")
    assert cache.in_shm
    assert cache.there
    assert cache.bytes == pytest.approx(cache.wanted, rel=0.1)
    assert list(memory.warnings(effloop.compose())) == []


def known(*parts: Part, ranks: int = 1, **free: int) -> Memory:
    return Memory(parts, {}, {"host": 1000 * MB, "shm": 500 * MB, **free}, 0, ranks)


def test_warnings() -> None:
    config = effloop.compose(["batch_size=32", "accumulate=2"])
    process = Part("process", "host", 500 * MB, there=True)
    batches = Part("train batches", "host", 800 * MB, by_batch=True)
    assert list(known(process, batches).warnings(config)) == []
    (line,) = known(process, replace(batches, bytes=1000 * MB)).warnings(config)
    assert line.startswith("batch_size: 32 needs about 1.5 GB of memory, where 1.5 GB are free, and the machine may")
    assert line.endswith("; at most 24 fit; set batch_size=16, and accumulate=4 for updates of as many images")
    (line,) = known(process, batches, ranks=2).warnings(config)
    assert "2.6 GB of memory for 2 ranks, where 2.0 GB are free" in line
    (line,) = known(process, Part("weights", "gpu", 98, by_batch=False), gpu=100).warnings(config)
    assert line.startswith("batch_size: 32 needs about 98 bytes of the GPU's memory, where 100 bytes are free")
    assert line.endswith("most of it is its weights, whatever the batch; choose a smaller model")
    cache = Part("train cache", "host", 100 * MB, in_shm=True, there=True, wanted=600 * MB)
    (line,) = known(process, cache).warnings(config)
    assert line.startswith("data.cache: 100.0 MB are left for the train cache")
    assert "data.cache_gb=0.66" in line
    config.data.cache_gb = 0.1
    assert list(known(process, cache).warnings(config)) == []


def test_a_warning_about_a_gpu_names_the_batch_that_plan_does(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, model, loaders = built(photos, "image_size=64", "batch_size=200", "optim=adamw", "data.tail=wrap")
    monkeypatch.setattr(gpu, "free_memory", lambda device: 52 * MB)
    on_gpu = Parallel(ParallelConfig(name="none"), torch.device("cpu"))
    on_gpu.device = torch.device("cuda")  # which there needn't be
    found = probe(model, config.size, channels_last=True)
    (line,) = expected_memory(config, model, found, loaders, on_gpu).warnings(config)
    plan, task = resolved(config), tasks.build(config.task).for_outputs(3)
    weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    largest = largest_batch(trace(plan, task, 3, None), plan, 52 * MB + weights + CONTEXT, 2.0)
    assert line.startswith("batch_size: 200 needs about ")
    words = re.search(
        r"the run may fail; at most (\d+) fit; set batch_size=100, and accumulate=2 for updates of as many", line
    )
    assert words is not None
    assert int(words[1]) == pytest.approx(largest, rel=0.05)


def test_table_is_drawn_from_json(photos: Path) -> None:
    plain = json.loads(json.dumps(expected(photos, "data.cache=bytes").to_plain()))
    with Console(width=120, record=True) as console:
        console.print(memory_table(plain))
    text = console.export_text()
    for word in ("process", "train batches", "gradients", "float32, 8 x 3 x 16 x 16", "page cache", "/dev/shm"):
        assert word in text


def test_batches_are_those_of_the_loader(photos: Path) -> None:
    config = effloop.compose([f"data.root={photos}", *TINY, "num_workers=1", "augment=native_resize_crop"])
    train = effloop.build_loader(config, "train")
    batch = next(iter(train.engine.stream(0)))
    for name, told in host_batch(train).items():
        tensor = getattr(batch, name)
        assert (told.shape, told.dtype) == (tensor.shape, tensor.dtype), name
    moved = next(iter(train.epoch(0)))
    for name, told in device_batch(config, train).items():
        tensor = getattr(moved, name)
        assert (told.shape, told.dtype) == (tensor.shape, tensor.dtype), name
    train.close()

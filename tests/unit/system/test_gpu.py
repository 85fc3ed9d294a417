"""The second of two GPUs, while the first is the current one: all that is done is done there."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import emulator
import pytest
import torch

import effloop
from effloop.errors import ConfigError, DivergedError
from effloop.parallel import Parallel, ParallelConfig
from effloop.system import gpu
from effloop.train.nan import StopOrSkip

SMALL = ("image_size=16", "batch_size=8", "model.width=4", "num_workers=1", "record=none", "checkpoint=none")


def contexts() -> list[int]:
    """Of both GPUs, so far: one takes half a gigabyte of a GPU's memory."""
    from emulator import kernels

    return [kernels.counts(number)["contexts"] for number in range(2)]


def on_the_second(photos: str, run: str, run_dir: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    os.environ.update(rank)  # as torchrun does
    for engine in ("threads", "processes"):
        config = effloop.compose([f"data.root={photos}", *SMALL, "device=cuda", f"engine={engine}"])
        loader = effloop.build_loader(config)
        found[engine] = {str(batch.images.device) for batch in loader.epoch(0)}, contexts()
        loader.close()
    for name in rank:
        del os.environ[name]
    trainer = effloop.build_trainer(effloop.compose([f"data.root={photos}", *SMALL, "device=cuda:1"]))
    trainer.train_epoch(trainer.train.epoch(0))
    found["trained"] = contexts()
    found["peak"] = gpu.peak_memory() == torch.cuda.max_memory_allocated(1) > 0
    trainer.train.close()
    trainer.val.close()
    list(effloop.load(run, ["device=cuda:1"]).predict(sorted(Path(photos).rglob("*.jpg"))[:3]))
    found["predicted"] = contexts()
    with ThreadPoolExecutor(1) as thread:  # where the first GPU is the current one
        found["flags"] = thread.submit(not_finite, run_dir).result()
    return found


def not_finite(run_dir: str) -> str:
    model = torch.nn.Linear(2, 1).to("cuda:1")
    single = Parallel(ParallelConfig(name="none"), torch.device("cpu"))
    parts: dict[str, Any] = {"parallel": single, "sums": torch.zeros(1), "run_dir": Path(run_dir), "name": str}
    parts["scaler"] = torch.amp.GradScaler("cuda", enabled=False)
    policy = StopOrSkip(skip=False, model=model, averaged=model, accumulate=1, **parts)
    model.weight.grad = torch.full_like(model.weight, torch.inf)
    try:
        for step in range(3):
            policy.update(lambda: True, 0, step, 1.0)
    except DivergedError as error:
        return str(error)
    return f"the current GPU is {torch.cuda.current_device()}"


def test_nothing_is_done_on_the_first(finished: Path, photos: Path, tmp_path: Path) -> None:
    found = emulator.call(on_the_second, str(photos), str(finished), str(tmp_path))
    for engine in ("threads", "processes"):
        assert found[engine] == ({"cuda:1"}, [0, 1]), engine
    assert found["trained"] == found["predicted"] == [0, 1]
    assert found["peak"]
    assert "step 0, lr 1: a gradient is not finite" in found["flags"]


def resolved() -> list[str]:
    found = [str(gpu.use(torch.device(each))) for each in ("cuda", "cuda:1", "cuda", "cpu")]
    for name in ("cuda:2", "xpu"):
        with pytest.raises(ConfigError, match=name):
            gpu.find_device(name)
    return found


def test_the_current_one() -> None:
    assert emulator.call(resolved) == ["cuda:0", "cuda:1", "cuda:1", "cpu"]

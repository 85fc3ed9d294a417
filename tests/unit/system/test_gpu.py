"""The second of two GPUs, while the first is the current one: all that is done is done there."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import emulator
import pytest
import torch

import effloop
from effloop.errors import ConfigError
from effloop.system import gpu

SMALL = ("image_size=16", "batch_size=8", "model.width=4", "num_workers=1", "record=none", "checkpoint=none")


def contexts() -> list[int]:
    """Of both GPUs, so far: one takes half a gigabyte of a GPU's memory."""
    from emulator import kernels

    return [kernels.counts(number)["contexts"] for number in range(2)]


def on_the_second(photos: str, run: str) -> dict[str, Any]:
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
    found["resolved"] = ThreadPoolExecutor(1).submit(resolved).result()  # where the first GPU is the current one
    return found


def resolved() -> list[str]:
    found = [str(gpu.use(torch.device(each))) for each in ("cuda", "cuda:1", "cuda", "cpu")]
    for name in ("cuda:2", "xpu"):
        with pytest.raises(ConfigError, match=name):
            gpu.find_device(name)
    return found


def test_nothing_is_done_on_the_first(finished, photos):
    found = emulator.call(on_the_second, str(photos), str(finished))
    for engine in ("threads", "processes"):
        assert found[engine] == ({"cuda:1"}, [0, 1]), engine
    assert found["trained"] == found["predicted"] == [0, 1]
    assert found["peak"]
    assert found["resolved"] == ["cuda:0", "cuda:1", "cuda:1", "cpu"]


def test_the_cpu_has_no_number():
    assert gpu.find_device("cpu:0").index is None

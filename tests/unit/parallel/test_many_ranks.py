"""Any rank of 512 in one process, by torch's fake process group: its collectives return at once, with what this rank
has given to them, so that all the rest is as it is among 512.
"""

import os
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import composed
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore

import effloop
from effloop.assemble.trainer import build_trainer
from effloop.checkpoint import files
from effloop.checkpoint.checkpointer import dump
from effloop.data.loader import Loader
from effloop.errors import ConfigError, warn
from effloop.parallel import OwnSlice
from effloop.parallel.base import RankEnv
from effloop.parallel.ddp import Ddp
from effloop.parallel.rendezvous import Peer, RankGroup
from effloop.record import Position
from effloop.system.hardware import check_open_files
from effloop.train.trainer import Trainer

CPU = torch.device("cpu")
OPTIONS = getattr(FakeProcessGroup, "Options", None)  # None in older torch
WORDS = ["image_size=16", "epochs=1", "batch_size=2", "num_workers=0", "model.width=4", "parallel=ddp", "run=r"]
COUNT = {"train": 2100, "val": 13}  # images: two batches of 512 ranks and 52 left; and fewer than there are ranks


@dataclass
class Process:
    """What this process does as a rank."""

    averaged: list[int] = field(default_factory=list)  # buckets of gradients
    options: Any = None

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.averaged.append(bucket.index())  # DDP's own asks the group for a result, and the fake one has none
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A collective raises in here."""
        if OPTIONS is None:
            pytest.skip("torch's fake process group has no error_on_collective")
        self.options.error_on_collective = True
        try:
            yield
        finally:
            self.options.error_on_collective = False


@contextmanager
def rank_of(rank: int, world_size: int, answers: list[Any] | None = None) -> Iterator[Process]:
    """This process as a rank, of 8 on each machine; rank 0 fills the `answers` of `on_rank0`, the others take them."""
    env = RankEnv(rank, world_size, rank % 8, min(8, world_size), "localhost", 1, "torchrun")
    process, given, wrap_step = Process(options=OPTIONS and OPTIONS()), iter(answers or ()), Ddp.wrap_step

    def on_rank0(parallel: Ddp, call: Callable[[], Any]) -> Any:
        if answers is None or rank:
            return next(given) if rank else call()
        answers.append(call())
        return answers[-1]

    def wrapped(parallel: Ddp, step: torch.nn.Module, *, find_unused: bool) -> Any:
        step = wrap_step(parallel, step, find_unused=find_unused)
        step.register_comm_hook(None, lambda _, bucket: process.hook(bucket))  # type: ignore[operator]
        return step

    group = RankGroup(env, HashStore(), HashStore(), [Peer(f"m{each // 8}", each, {}) for each in range(world_size)])
    with (
        mock.patch.object(RankGroup, "current", group),
        mock.patch.multiple(Ddp, on_rank0=on_rank0, wrap_step=wrapped),
        mock.patch.dict(os.environ),
    ):
        env.publish()
        options = {"pg_options": process.options} if OPTIONS else {}
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore(), **options)
        try:
            yield process
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two files: reading is not what is tested."""
    root = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(0)
    for split, count in COUNT.items():
        pixels, labels = rng.integers(0, 256, (count, 20, 20, 3), np.uint8), np.arange(count) % 3
        np.savez(root / f"{split}.npz", images=pixels, labels=labels)
    return root


def trainer(images: Path, out: Path, *overrides: str) -> Trainer:
    return build_trainer(composed(*WORDS, f"data.root={images}", f"out={out}", "record.tensorboard=false", *overrides))


def written(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_run_as_some_of_512(images, tmp_path, capfd):
    """Equal steps, rates and weights; random numbers of its own; rank 0 alone writes and speaks."""
    answers: list[Any] = []
    numbers, steps, weights, before = [], set(), [], {}
    for rank in (0, 317, 511):
        warn.cache_clear()  # of another process
        with rank_of(rank, 512, answers) as process:
            made = trainer(images, tmp_path, "augment.device=gpu", "optim.scale_lr=256", "schedule.warmup_ratio=0.5")
            weights.append(torch.cat([each.flatten() for each in made.model.parameters()]).detach().clone())
            rates = [made.optimizer.param_groups[0][key] for key in ("initial_lr", "lr")]
            assert rates == pytest.approx([0.003 * 1024 / 256, 0.012 / 2])  # in the only step of the warm-up
            made.fit()
            numbers.append((torch.rand(1).item(), np.random.rand(), random.random()))  # noqa: NPY002
            steps.add((made.progress.step, len(made.train), len(made.val), len(process.averaged)))
            with process.alone():
                predicted = effloop.load(tmp_path / "r").predict([np.zeros((20, 20, 3), np.uint8)])
            assert made.parallel.agree(0b101) == 0  # of the call before
            assert made.parallel.agree(0) == 0b101
            made.parallel.close()
        said, now = capfd.readouterr(), written(tmp_path)
        assert not rank or (said.out, said.err, now) == ("", "", before)
        before = now
    assert steps == {(2, 2, 1, 2)}
    assert len({*numbers}) == 3
    assert predicted[0]["class"] in "012"
    assert all(torch.equal(each, weights[0]) for each in weights)


def test_what_asks_no_other_rank(images, tmp_path):
    """An epoch's batches, all but the last batch of an update, and updates without a line in the log."""
    with rank_of(255, 512, [None, "", None, str(tmp_path)]) as process:
        made = trainer(images, tmp_path, "accumulate=2")
        with process.alone():
            first, second = made.train.epoch(0)
            made.forward_backward(first, sync=False)
            made.recorder.step(Position(0, 2, 1, 3, 1), made.metrics, 0.1)
            assert not process.averaged
            with pytest.raises(RuntimeError, match="collective"):
                made.parallel.sum(torch.zeros(1))
        made.forward_backward(second, sync=True)
        assert process.averaged == [0]
        made.parallel.close()


def loaded(images: Path, rank: int, world_size: int, *overrides: str, **split: str) -> Loader:
    words = ["image_size=16", "batch_size=2", "num_workers=0", f"data.root={images}", "data.check=0", *overrides]
    return effloop.build_loader(composed(*words), parallel=OwnSlice(rank, world_size, 8, CPU), **split)


REAL = pytest.param(512, 512, marks=pytest.mark.slow)


@pytest.mark.parametrize(("world_size", "loaders"), [(3, 3), (7, 7), (64, 64), (512, 2), (513, 2), REAL])
def test_slices(images, world_size, loaders):
    """All ranks together: each sample once, in the order of one process; equal steps; padding only at the end."""
    for split, count in COUNT.items():
        whole = 2 * world_size
        orders = [loaded(images, rank, world_size, split=split).plan.order for rank in range(loaders)]
        orders += [replace(orders[0], rank=rank) for rank in range(loaders, world_size)]
        (steps,) = {len(order) for order in orders}
        alone = replace(orders[0], rank=0, world_size=1, batch_per_rank=whole)
        drawn = []
        for number in range(steps):
            parts = [order.batch(3, number) for order in orders]
            ids, valid = (np.concatenate(column) for column in zip(*parts, strict=True))
            wanted = alone.batch(3, number)
            assert np.array_equal(ids, wanted[0])
            assert np.array_equal(valid, wanted[1])
            assert all(valid[: valid.sum()])
            drawn += ids[valid].tolist()
        full = count // whole * whole if split == "train" else count
        assert len(drawn) == len({*drawn}) == full
        assert split == "train" or drawn == [*range(count)]


def test_wrapped_and_divided(images):
    """With wrap all are trained on, evenly where there are fewer than ranks; and of k folds each validates once."""
    for world_size in (512, 5000):
        order = loaded(images, 0, world_size, "data.tail=wrap").plan.order
        assert len(order) == -(-COUNT["train"] // order.global_batch)
        whole = replace(order, world_size=1, batch_per_rank=order.global_batch)  # of all ranks
        seen = np.bincount(np.concatenate([whole.batch(0, number)[0] for number in range(len(order))]))
        assert len(seen) == COUNT["train"]
        assert 1 <= seen.min() <= seen.max() <= seen.min() + 1
    held = []
    for fold in range(5):
        words = ["data.train_split=train", "data.folds=5", f"data.fold={fold}", "data.val_split=null"]
        parts = [loaded(images, rank, 512, *words, split="val").plan for rank in (0, 317)]
        keys = [[plan.source.key(each) for each in range(len(plan.source))] for plan in parts]
        assert keys[0] == keys[1]
        held += keys[0]
    assert len(held) == len({*held}) == COUNT["train"]


def test_more_ranks_than_samples(images):
    with pytest.raises(ConfigError, match=r"batch_size: 10000 .* start at most 2100 ranks, or set data.tail=wrap"):
        loaded(images, 4999, 5000)
    with pytest.raises(ConfigError, match=r"set batch_size=4 or less, or data.tail=wrap"):
        loaded(images, 317, 512, "batch_size=5")


def test_resumed_on_other_ranks(images):
    """The second batch of 512 ranks is the same on fewer ones, with as many images of an update."""
    batches = []
    for world_size in (512, 64, 1):
        order = loaded(images, 0, world_size, f"batch_size={1024 // world_size}").plan.order
        batches.append(np.concatenate([replace(order, rank=rank).batch(1, 1)[0] for rank in range(world_size)]))
    assert np.array_equal(batches[0], batches[1])
    assert np.array_equal(batches[0], batches[2])


def test_a_checkpoint_of_512_ranks(images, tmp_path):
    """The state of each rank is a value or two; a rank that resumes has its own."""
    with rank_of(317, 512, [None, "", None, str(tmp_path)]):
        made = trainer(images, tmp_path)
        made.forward_backward(next(iter(made.train.epoch(0))), sync=True)
        made.progress.samples_seen = 1024
        state, drawn = made.state_dict(), torch.rand(3)
        means = [each.clone() for each in made.model.buffers()]
        made.parallel.close()
    facts = {"config": {}, "classes": [], "world_size": 512}
    with (tmp_path / "x.ckpt").open("xb", buffering=0) as file:
        dump({**state, **facts}, file)
    state = files.read(tmp_path / "x.ckpt")
    values = 0
    level: list[Any] = [state]
    while level:
        values += len(level)
        parts = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [value for part in parts for value in part]
    assert values < 2500
    assert len(state["rng"]) == len(state["buffers"]) == len(state["metrics"]) == 512
    with rank_of(317, 512, [None, "", None, str(tmp_path)]):
        made = trainer(images, tmp_path)
        made.load_state_dict(state)
        assert torch.equal(torch.rand(3), drawn)
        assert all(map(torch.equal, made.model.buffers(), means))
        for key in ("rng", "buffers"):  # as in format 4
            state[key][317] = files.unpacked(state[key][317])
        made.load_state_dict(state)
        assert torch.equal(torch.rand(3), drawn)
        state["rng"][317] = files.packed(Path("/"))  # a class
        with pytest.raises(ValueError, match="the state of a rank can't be read: Weights only load failed"):
            made.load_state_dict(state)
        made.parallel.close()


def test_open_files_of_many_ranks(monkeypatch):
    """Each rank has a socket to each other one, beside the files of its data."""
    limits = [(512, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    monkeypatch.setenv("WORLD_SIZE", "2000")
    check_open_files(0)
    assert limits[-1][0] > 2000

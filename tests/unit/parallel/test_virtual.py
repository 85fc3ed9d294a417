"""Parts of an update on several ranks: threads of this process, by torch's own process group for them."""

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import TINY
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed import multi_threaded_pg as threaded

import effloop
from effloop.data.order import Order
from effloop.data.source import Tail
from effloop.optim import EMA
from effloop.parallel import Parallel
from effloop.parallel.virtual import Virtual
from effloop.record import Metrics


class Ranks(Parallel):
    """A rank that is a thread."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def sum(self, values: Tensor) -> Tensor:
        values = values.clone()
        if self.world_size > 1:
            dist.all_reduce(values)
        return values


@pytest.fixture
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Calls a function with each of so many ranks, at the same time; what they return."""
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)

    def run(world_size: int, call: Callable[[Parallel], Any]) -> list[Any]:
        store, results, errors = HashStore(), [None] * world_size, []

        def of(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
                results[rank] = call(Ranks(rank, world_size))
                dist.destroy_process_group()
            except BaseException as error:
                errors.append(error)
                threaded.ProcessLocalGroup.exception_handle(error)

        threads = [threading.Thread(target=of, args=[rank]) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        return results

    yield run
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    threaded._uninstall_threaded_pg()


class Model(nn.Module):
    """With statistics, channels_last weights, a layer that nothing uses, and one that a single part uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Linear(5, 3)
        self.unused, self.rare = nn.Linear(2, 2), nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor, part: int) -> Tensor:
        out: Tensor = self.head(self.norm(self.conv(images)).amax((2, 3)))
        return out + self.rare if part == 4 else out


def digits(values: Any) -> Any:
    """The bits of tensors, and their strides."""
    return [None if each is None else (each.stride(), each.flatten().tolist()) for each in values]


@pytest.mark.parametrize(("parts", "counts"), [(6, (1, 2, 3, 6)), (8, (1, 4)), (5, (1, 5))])
def test_all_is_the_same_on_any_number_of_ranks(parts, counts, on_ranks, monkeypatch):
    monkeypatch.setattr("effloop.parallel.virtual._BUCKET", 80)  # several, which end within a layer
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, parts, 4, 3, 6, 6, generator=generator) * 10
    torch.manual_seed(1)
    weights = Model().state_dict()

    def train(ranks: Parallel) -> Any:
        model = Model().to(memory_format=torch.channels_last)
        model.load_state_dict(weights)
        drawn: list[tuple[int, int]] = []
        virtual = Virtual.over(ranks, parts, lambda *each: drawn.append(each), averages=True)
        step = virtual.wrap_step(virtual.wrap(model), find_unused=True)
        average, metrics = EMA(model, 0.5), Metrics(2, torch.device("cpu"), virtual.rows, len(virtual.parts))
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
        for batches in images:
            for part in virtual.parts:
                with virtual.gradients(step, sync=part == virtual.parts[-1]):
                    loss = step(batches[part], part).square().mean() / (len(virtual.parts) * virtual.summed)
                    loss.backward()
                metrics.add(torch.stack([loss.detach().double(), torch.ones(())]) / 3)
            found += digits(each.grad for each in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            average.update()
        own = virtual.part_buffers(model)
        found += [*digits(average.model.state_dict().values()), metrics.read()]
        virtual.average_buffers(model)
        assert all(torch.equal(each[name], buffer) for each in own for name, buffer in model.named_buffers())
        return found + digits(model.state_dict().values()), drawn

    first, *others = (on_ranks(count, train) for count in counts)
    assert all(same == first[0][0] for results in others for same, _ in results)
    drawn = [sorted(each for _, ours in results for each in ours) for results in (first, *others)]
    assert all(each == [(update, part) for update in range(2) for part in range(parts)] for each in drawn)
    assert first[0][0][1][0] == (27, 1, 9, 3)  # the parameter's own strides
    assert [each is None for each in first[0][0][:9]] == [parts < 5, *[False] * 6, True, True]


def test_one_part_is_what_there_is_without(on_ranks):
    images = torch.randn(2, 4, 3, 6, 6, generator=torch.Generator().manual_seed(0))

    def train(virtual: bool) -> list[Any]:
        torch.manual_seed(1)
        model, parallel = Model(), Parallel.__new__(Parallel)
        if virtual:
            parallel = Virtual.over(parallel, 1, lambda *part: None, averages=False)
        step = parallel.wrap_step(parallel.wrap(model), find_unused=True)
        for batch in images:
            model.zero_grad()
            with parallel.gradients(step, sync=True):
                step(batch, 4).square().mean().backward()
        parallel.average_buffers(model)
        return digits([*(each.grad for each in model.parameters()), *model.buffers()])

    assert train(True) == train(False)


def test_a_skipped_update_leaves_no_statistics(photos, here):
    words = (f"data.root={photos}", *TINY, "batch_size=4", "parallel.virtual=2", "nan=skip", "optim.ema=0.9")
    trainer = effloop.build_trainer(effloop.compose([*words, "record=none", "run=x"]))
    batches = [*itertools.islice(trainer.train.epoch(0), 2)]
    batches[1].images.fill_(math.nan)  # of the last part, whose statistics the model has then
    trainer.train_epoch(batches)
    trainer.nan.check()
    assert all(each.isfinite().all() for each in trainer.model.state_dict().values())


@pytest.mark.parametrize("tail", list(Tail))
@pytest.mark.parametrize("repeats", [1, 3])
def test_a_part_has_the_batches_of_a_rank(tail, repeats):
    rows = {"num_samples": 103, "batch_per_rank": 4, "seed": 5, "tail": tail, "repeats": repeats}
    real = [Order(**rows, rank=rank, world_size=6) for rank in range(6)]
    for count in (1, 2, 3, 6):
        each = 6 // count
        for rank in range(count):
            order = Order(**rows, rank=rank, world_size=count, parts=each)
            assert len(order) == each * len(real[0])
            for number in range(len(order)):
                place, turn = divmod(number, each)
                ours, theirs = order.batch(2, number), real[rank * each + turn].batch(2, place)
                assert all((one == other).all() for one, other in zip(ours, theirs, strict=True))

"""Virtual ranks: an update has the same parts, with the same sums, whatever number of ranks computes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _take_tensors

from effloop.parallel.base import Parallel

Node: TypeAlias = tuple[int, int, list[Tensor]]
"""Of a binary tree over the parts of an update: its level, its place there, and the sums of the parts below it."""

_BUCKET = 25 << 20  # bytes of the gradients that are sent at once, as by DistributedDataParallel


def add(nodes: list[Node], level: int, place: int, sums: list[Tensor]) -> None:
    """Add the next node of the tree, from left to right; two neighbours become their sum, one level up."""
    while place % 2 and nodes and nodes[-1][:2] == (level, place - 1):
        _, _, left = nodes.pop()
        if left:
            torch._foreach_add_(left, sums)
        level, place, sums = level + 1, place // 2, left
    nodes.append((level, place, sums))


def total(nodes: Sequence[Node]) -> list[Tensor]:
    """The sums of all parts, in the first node's memory; of a number that is no power of 2 several nodes are left."""
    first, *others = (sums for _, _, sums in nodes)
    for sums in others:
        torch._foreach_add_(first, sums)
    return first


class Virtual(Parallel):
    """A strategy whose ranks compute several parts of an update each, one after the other (EasyScale, Li et al. 2023).

    A part is what a rank would be: it has a batch, BatchNorm's statistics, random numbers and sums of its own. Sums
    over parts are in an order that only their number decides, so that all bits are the same on any number of ranks.
    """

    _num_parts: int
    _seed: Callable[[int, int], None]
    _averages: bool
    _update: int  # updates done
    _turn: int  # this rank's parts of the next update that are done
    _nodes: list[Node]  # the sums of their gradients

    @classmethod
    def over(cls, ranks: Parallel, num_parts: int, seed: Callable[[int, int], None], *, averages: bool) -> Virtual:
        """The same ranks, which share `num_parts` parts.

        Args:
            ranks: a strategy, whose class changes.
            num_parts: a multiple of its number of ranks.
            seed: seeds all random generators of this process, by update and part.
            averages: whether weights and buffers are averaged after each update: the latter are means over parts then.
        """
        ranks.__class__ = type("Virtual", (cls, type(ranks)), {})
        virtual = cast("Virtual", ranks)
        virtual._num_parts, virtual.summed = num_parts, ranks.world_size
        virtual._seed, virtual._averages = seed, averages
        virtual._update, virtual._turn, virtual._nodes = 0, 0, []
        return virtual

    @property
    def num_parts(self) -> int:
        return self._num_parts

    def wrap(self, model: nn.Module) -> nn.Module:
        self._model = super().wrap(model)
        for tensor in itertools.chain(model.parameters(), model.buffers()) if self.world_size > 1 else ():
            dist.broadcast(tensor.detach(), 0)  # a module that was given may have other weights on each rank
        self._buffers = dict(self._model.named_buffers())
        self._own = [{name: each.clone() for name, each in self._buffers.items()} for _ in self.parts]
        return self._model

    def wrap_step(self, step: nn.Module, *, find_unused: bool) -> nn.Module:
        self._trained = [each for each in step.parameters() if each.requires_grad]
        self._unused = [find_unused] * len(self._trained)  # of these parts
        self._find_unused = find_unused
        return step

    @contextmanager
    def gradients(self, step: nn.Module, *, sync: bool) -> Iterator[None]:
        part, own = self.parts[self._turn], self._own[self._turn]
        self._turn += 1
        self._seed(self._update, part)
        _copy(self._buffers, own)
        yield
        _copy(own, self._buffers)
        with torch.no_grad():
            found = [each.grad for each in self._trained]
            self._unused = [unused and grad is None for unused, grad in zip(self._unused, found, strict=True)]
            for each in self._trained:
                each.grad = None
            pairs = zip(self._trained, found, strict=True)
            add(self._nodes, 0, part, [torch.zeros_like(each) if grad is None else grad for each, grad in pairs])
            if sync:
                self._end_update()

    def _end_update(self) -> None:
        """Set the parameters' gradients to the sums of all parts of all ranks."""
        used = [not unused for unused in self._unused]
        if self._find_unused:
            used = self.sum(torch.tensor(used, dtype=torch.int32)).tolist()
        if self.world_size > 1:
            for bucket in zip(*(_take_tensors(sums, _BUCKET) for *_, sums in self._nodes), strict=True):  # type: ignore[no-untyped-call]
                self._add_ranks(bucket)
            del self._nodes[1:]
        for each, grad, is_used in zip(self._trained, total(self._nodes), used, strict=True):
            each.grad = grad if is_used else None
        self._update, self._turn, self._nodes = self._update + 1, 0, []
        self._unused = [self._find_unused] * len(self._trained)
        if self._averages:
            self._load_mean()

    def _add_ranks(self, nodes: Sequence[list[Tensor]]) -> None:
        """Replace the first node's tensors by the sums over all ranks: each of them adds up a share of the elements."""
        first, ranks, each = nodes[0], self.world_size, len(self.parts)
        places = [_places(range(start, start + each)) for start in range(0, self.num_parts, each)]
        share = -(-sum(each.numel() for each in first) // ranks)
        flat = first[0].new_zeros(len(nodes), ranks * share)
        for row, tensors in zip(flat, nodes, strict=True):
            torch._foreach_copy_(_views(row, first), tensors)
        sent = flat.view(len(nodes), ranks, share).transpose(0, 1).reshape(-1, share)
        rows = sent.new_empty(sum(map(len, places)), share)
        dist.all_to_all_single(rows, sent, [len(each) for each in places], [len(nodes)] * ranks)
        tree: list[Node] = []
        for (level, place), row in zip(itertools.chain(*places), rows, strict=True):
            add(tree, level, place, [row])
        dist.all_gather([*flat[0].view(ranks, share)], total(tree)[0])
        torch._foreach_copy_(first, _views(flat[0], first))

    def part_buffers(self, model: nn.Module) -> list[dict[str, Tensor]]:
        return self._own if model is self._model else [dict(model.named_buffers())] * len(self.parts)

    @torch.no_grad()
    def average_buffers(self, model: nn.Module) -> None:
        if model is self._model:  # those of an average are of means, and equal
            means = self._load_mean()
            for own in self._own:
                _copy({name: own[name] for name in means}, means)

    def _load_mean(self) -> dict[str, Tensor]:
        """Set the model's floating-point buffers to the mean of all parts', and return them."""
        buffers = {name: each for name, each in self._buffers.items() if each.is_floating_point()}
        if buffers:
            own = [torch.cat([part[name].flatten().double() for name in buffers]) for part in self._own]
            means = self.rows(torch.stack(own)).sum(0).div_(self.num_parts)
            for buffer, mean in zip(buffers.values(), _views(means, [*buffers.values()]), strict=True):
                buffer.copy_(mean)
        return buffers

    def rows(self, values: Tensor) -> Tensor:
        rows = values.new_zeros(self.num_parts, *values.shape[1:])
        rows[self.parts.start : self.parts.stop] += values
        if self.world_size > 1:
            dist.all_reduce(rows)  # adds zeros, which changes nothing
        return rows

    def resumed(self, update: int) -> None:
        self._update = update
        for own in self._own:
            _copy(own, self._buffers)


def _places(parts: range) -> list[tuple[int, int]]:
    """Level and place of the nodes that a rank of these parts has."""
    nodes: list[Node] = []
    for part in parts:
        add(nodes, 0, part, [])
    return [(level, place) for level, place, _ in nodes]


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """(N,) -> tensors of these shapes and strides, one after the other in its memory."""
    ends = itertools.accumulate((each.numel() for each in like), initial=0)
    return [flat[at:].as_strided(each.shape, each.stride()) for at, each in zip(ends, like, strict=False)]


def _copy(to: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    if to:
        torch._foreach_copy_([*to.values()], [*values.values()])

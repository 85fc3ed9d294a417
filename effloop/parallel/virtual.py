"""Virtual ranks: an update has the same parts, with the same sums, whatever number of ranks computes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    """The sums of all parts, in the first node's memory; several nodes are left of a number that is no power of 2."""
    for _, _, sums in nodes[1:]:
        torch._foreach_add_(nodes[0][2], sums)
    return nodes[0][2]


class Virtual(Parallel):
    """A strategy whose ranks compute several parts of an update each, one after the other (EasyScale, Li et al. 2022).

    A part is what a rank would be: it has a batch, BatchNorm's statistics, random numbers and sums of its own. Sums
    over parts are in an order that only their number decides, so that all bits are the same on any number of ranks.
    """

    _num_parts: int
    _seed: int
    _seed_all: Callable[[int], None]
    _averages: bool
    _update: int  # updates done
    _turn: int  # this rank's parts of the next update that are done
    _nodes: list[Node]  # the sums of their gradients

    @classmethod
    def over(
        cls, ranks: Parallel, num_parts: int, seed: int, seed_all: Callable[[int], None], *, averages: bool
    ) -> Virtual:
        """The same ranks, which share `num_parts` parts.

        Args:
            ranks: a strategy, whose class changes.
            num_parts: a multiple of its number of ranks.
            seed: of the parts' random numbers.
            seed_all: seeds all random generators of this process.
            averages: whether weights are averaged after each update, and so are buffers, which must be equal then.
        """
        ranks.__class__ = type("Virtual", (cls, type(ranks)), {})
        virtual = cast("Virtual", ranks)
        virtual._num_parts, virtual.summed = num_parts, ranks.world_size
        virtual._seed, virtual._seed_all, virtual._averages = seed, seed_all, averages
        virtual._update, virtual._turn, virtual._nodes = 0, 0, []
        return virtual

    @property
    def num_parts(self) -> int:
        return self._num_parts

    def wrap(self, model: nn.Module) -> nn.Module:
        self._model = super().wrap(model)
        tensors = [*self._model.parameters(), *self._model.buffers()]
        for tensor in tensors if self.world_size > 1 else ():
            dist.broadcast(tensor.detach(), 0)  # a module that was given may have other weights on each rank
        self._buffers = [*self._model.buffers()]
        self._own = [[each.clone() for each in self._buffers] for _ in self.parts]
        return self._model

    def wrap_step(self, step: nn.Module, *, find_unused: bool) -> nn.Module:
        self._trained = [each for each in step.parameters() if each.requires_grad]
        self._used, self._find_unused = [not find_unused] * len(self._trained), find_unused
        self._buckets: list[slice] = []
        start, size = 0, 0
        for number, each in enumerate(self._trained):
            other = each.dtype != self._trained[start].dtype
            if number > start and (other or size + each.nbytes > _BUCKET):
                self._buckets.append(slice(start, number))
                start, size = number, 0
            size += each.nbytes
        self._buckets.append(slice(start, len(self._trained)))
        return step

    @contextmanager
    def gradients(self, step: nn.Module, *, sync: bool) -> Iterator[None]:
        part, own = self.parts[self._turn], self._own[self._turn]
        self._turn += 1
        key = np.random.SeedSequence([self._seed, self._update, part]).generate_state(1, np.uint64)
        self._seed_all(int(key[0]))
        _copy(self._buffers, own)
        yield
        _copy(own, self._buffers)
        with torch.no_grad():
            add(self._nodes, 0, part, self._take())
            if sync:
                self._end_update()

    def _take(self) -> list[Tensor]:
        """The gradients of a part."""
        found = [each.grad for each in self._trained]
        if self._find_unused:
            self._used = [used or grad is not None for used, grad in zip(self._used, found, strict=True)]
        for each in self._trained:
            each.grad = None
        pairs = zip(self._trained, found, strict=True)
        return [torch.zeros_like(each) if grad is None else grad for each, grad in pairs]

    def _end_update(self) -> None:
        """Set the parameters' gradients to the sums of all parts of all ranks."""
        nodes, used = self._nodes, self._used
        if self._find_unused:
            used = self.sum(torch.tensor(used, dtype=torch.int32)).tolist()
        if self.world_size > 1:
            for bucket in self._buckets:
                self._add_ranks([sums[bucket] for _, _, sums in nodes])
            nodes = nodes[:1]
        for each, grad, is_used in zip(self._trained, total(nodes), used, strict=True):
            each.grad = grad if is_used else None
        self._nodes, self._turn, self._update = [], 0, self._update + 1
        self._used = [not self._find_unused] * len(self._trained)
        if self._averages:
            self._load_mean()

    def _add_ranks(self, nodes: list[list[Tensor]]) -> None:
        """Replace the first node's tensors by the sums over all ranks: each of them adds up a share of the elements."""
        first, ranks = nodes[0], self.world_size
        places = [_places(range(start, start + len(self.parts))) for start in range(0, self.num_parts, len(self.parts))]
        share = -(-sum(each.numel() for each in first) // ranks)
        flat = first[0].new_zeros(len(nodes), ranks * share)
        for row, tensors in zip(flat, nodes, strict=True):
            torch._foreach_copy_(_views(row, first), tensors)
        sent = flat.view(len(nodes), ranks, share).transpose(0, 1).reshape(-1, share)
        counts = [len(each) for each in places]
        rows = sent.new_empty(sum(counts), share)
        dist.all_to_all_single(rows, sent, counts, [len(nodes)] * ranks)
        tree: list[Node] = []
        for (level, place), row in zip(itertools.chain(*places), rows, strict=True):
            add(tree, level, place, [row])
        whole = flat[0]
        dist.all_gather([*whole.view(ranks, share)], total(tree)[0])
        torch._foreach_copy_(first, _views(whole, first))

    def part_buffers(self, model: nn.Module) -> list[list[Tensor]]:
        return self._own if model is self._model else [[*model.buffers()]] * len(self.parts)

    @torch.no_grad()
    def average_buffers(self, model: nn.Module) -> None:
        if model is self._model:  # those of an average are of means, and equal
            means = self._load_mean()
            for own in self._own:
                _copy([each for each in own if each.is_floating_point()], means)

    def _load_mean(self) -> list[Tensor]:
        """Set the model's floating-point buffers to the mean of all parts', and return them."""
        buffers = [each for each in self._buffers if each.is_floating_point()]
        if buffers:
            own = [
                torch.cat([each.flatten().double() for each in one if each.is_floating_point()]) for one in self._own
            ]
            mean = self.rows(torch.stack(own)).sum(0) / self.num_parts
            for buffer, values in zip(buffers, torch.split(mean, [each.numel() for each in buffers]), strict=True):
                buffer.copy_(values.view_as(buffer))
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
    pieces = torch.split(flat[: sum(each.numel() for each in like)], [each.numel() for each in like])
    return [piece.as_strided(each.shape, each.stride()) for piece, each in zip(pieces, like, strict=True)]


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, values)

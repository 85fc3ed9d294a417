"""Images that are there twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool2d, grid_sample

from effloop.audit.findings import Finding, Place
from effloop.audit.records import SIDE
from effloop.data.decode import DecodeConfig, decoders
from effloop.data.image.mask import decode_mask, mask_digest
from effloop.data.image.pixels import resize_into
from effloop.data.source.base import Kind, Source
from effloop.errors import DataError
from effloop.system.progress import in_threads

_BAND = 8  # frequencies of an axis that a code has
_CELL = 2000  # images that are compared with each other, of millions
_BLOCK = 4096  # images whose likes are looked for at a time
_NEAREST = 4  # of an image that are looked at
_LIKE = 0.7  # least cosine of codes of which the images are looked at
_LOOK = 64  # height and width at which images are compared
_ROUND = 2048  # candidates that are compared before those are left out whose images belong together by now
_AGREE = 0.9  # least `_agreement` of copies: of 8,000 pairs of different clothes with like codes the best has 0.85

# Orientations: 4 swaps the axes, then 2 turns the rows upside down, then 1 flips from left to right.
_TURNS = (
    *("", "mirrored", "mirrored and turned by 180°", "turned by 180°"),
    *("mirrored and turned by 270°", "turned by 90°", "turned by 270°", "mirrored and turned by 90°"),
)
_BACK = (0, 1, 2, 3, 4, 6, 5, 7)


def _cosines(places: Tensor) -> Tensor:
    """(..., n) places from 0 to 1 -> (..., n, _BAND) values of the DCT-II's functions there."""
    found = torch.cos(torch.pi * places[..., None] * torch.arange(_BAND)) * 2**0.5
    found[..., 0] = 1
    return found


def _grid(side: int) -> Tensor:
    return (torch.arange(side) + 0.5) / side


_BASIS = _cosines(_grid(SIDE))
_SQUARES = torch.arange(_BAND) ** 2
_WEIGHT = (_SQUARES[:, None] + _SQUARES) ** 0.25  # natural images have less of the higher frequencies
_LUMA = torch.tensor([0.299, 0.587, 0.114])
_WINDOWS = torch.tensor([[0, 0, 1, 1], *([y, x, 0.9, 0.9] for y in (0.025, 0.075) for x in (0.025, 0.075))])


def describe(thumbnails: NDArray[np.uint8]) -> NDArray[np.int8]:
    """What near-copies are found by: the low frequencies of a grey thumbnail, as of pHash (Zauner 2010), with signs.

    Args:
        thumbnails: (n, SIDE, SIDE, 3) uint8.

    Returns:
        (n, CODE) int8, of length 254 but for clipping; 0 for an image of one colour.
    """
    grey = torch.from_numpy(thumbnails).float() @ _LUMA
    codes = (_BASIS.T @ grey @ _BASIS / SIDE**2 * _WEIGHT).flatten(1)
    length = codes.norm(dim=1, keepdim=True)
    found: NDArray[np.int8] = torch.where(length > 1, codes / length * 254, 0).round().clamp(-127, 127).char().numpy()
    return found


def _turned(images: Tensor, turn: int) -> Tensor:
    """(..., h, w) in one of the `_TURNS`."""
    images = images.mT if turn & 4 else images
    return images.flip([dim for dim, bit in ((-2, 2), (-1, 1)) if turn & bit])


def _unit(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1, eps=1e-6)


class _Codes:
    """Codes in all orientations, and of what windows of the images show."""

    def __init__(self) -> None:
        number = torch.arange(_BAND**2).view(_BAND, _BAND)
        odd = 1 - 2 * (torch.arange(_BAND) % 2)
        sign = torch.stack([odd[:, None] ** (turn >> 1 & 1) * odd ** (turn & 1) for turn in range(8)])
        self.sign = sign.flatten(1).float()
        self.place = torch.stack([(number.T if turn & 4 else number).flatten() for turn in range(8)])
        corner = torch.arange(4).view(2, 2)
        shown = [_turned(corner, turn).tolist() for turn in range(8)]
        # between[a][b]: turned by b, then by the opposite of a
        self.between = torch.tensor(
            [[shown.index(_turned(_turned(corner, b), _BACK[a]).tolist()) for b in range(8)] for a in range(8)]
        )
        scale = _WEIGHT.flatten()
        crops = [
            torch.kron(*(_BASIS.T @ _cosines(at + size * _grid(SIDE)) / SIDE for at, size in ((y, h), (x, w))))
            for y, x, h, w in _WINDOWS.tolist()
        ]
        self.crops = torch.stack([crop * scale[:, None] / scale.clamp(min=1e-6) for crop in crops])
        self.crops[:, :, 0] = 0

    def turn(self, codes: Tensor, turns: Tensor) -> Tensor:
        """(n, CODE) codes and (n,) turns."""
        return codes.gather(1, self.place[turns]) * self.sign[turns]

    def windows(self, codes: Tensor) -> Tensor:
        """(n, CODE) -> (n, windows, CODE), of unit length."""
        return _unit(torch.einsum("wij,nj->nwi", self.crops, codes))


def _candidates(codes: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Pairs of images whose codes are alike, from int8 codes (n, CODE).

    Each is put into the cell of the nearest centre, in the orientation in which it is nearest, and looked for in the
    nearest cells, in these orientations: an inverted file (Sivic and Zisserman 2003).

    Yields:
        first, second, which of `_TURNS` the second is turned by to show which of `_WINDOWS` of the first, cosine.
    """
    how, total = _Codes(), len(codes)
    number = max(1, total // _CELL)
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(0))[: 64 * number]
    sample = _unit(codes[chosen].float())
    centres = sample[:number]

    def bank() -> Tensor:
        turns = torch.tensor(_BACK).repeat(number)
        return how.turn(centres.repeat_interleave(8, 0), turns)

    for _ in range(5 if number > 1 else 0):
        best = (sample @ bank().T).argmax(1)
        centres = _unit(torch.zeros_like(centres).index_add_(0, best // 8, how.turn(sample, best % 8)))
    columns = bank()
    best = torch.cat([(part.float() @ columns.T).argmax(1) for part in codes.chunk(-(-total // _BLOCK))])
    cells, turns = best // 8, best % 8
    order = cells.argsort(stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(total))
    ends = cells.bincount(minlength=number).cumsum(0)
    for start in range(0, total, _BLOCK):
        asked = how.windows(codes[start : start + _BLOCK].float())
        probes = (asked @ columns.T).topk(8, dim=2).indices.flatten()
        cell = probes // 8
        rows = torch.arange(len(probes)) // 8  # image in the block and window
        queue = cell.argsort(stable=True)
        pieces = []
        for rows_of_cell in queue.tensor_split(cell.bincount(minlength=number).cumsum(0)[:-1]):
            if not len(rows_of_cell):
                continue
            here = int(cell[rows_of_cell[0]])
            begin, end = int(ends[here - 1]) if here else 0, int(ends[here])
            members = order[begin:end]
            those = how.turn(codes[members].float(), turns[members])
            for part in rows_of_cell.chunk(1 + len(rows_of_cell) * (end - begin) // 4_000_000):
                first = start + rows[part] // len(_WINDOWS)
                turn = probes[part] % 8
                likeness = how.turn(asked.flatten(0, 1)[rows[part]], turn) @ _unit(those).T
                own = (cells[first] == here).nonzero()[:, 0]
                likeness[own, rank[first[own]] - begin] = -1
                top = likeness.topk(min(_NEAREST, len(members)), dim=1)
                row, place = (top.values > _LIKE).nonzero(as_tuple=True)
                second = members[top.indices[row, place]]
                between = how.between[turn[row], turns[second]]
                window = rows[part][row] % len(_WINDOWS)
                pieces.append((first[row], second, between, window, top.values[row, place]))
        yield _best(*map(torch.cat, zip(*pieces, strict=True)))


def _best(first: Tensor, second: Tensor, turn: Tensor, window: Tensor, likeness: Tensor) -> tuple[Tensor, ...]:
    """Of each pair the best, and of each first image the best pairs."""
    order = likeness.argsort(descending=True)
    found = [each[order].numpy() for each in (first, second, turn, window, likeness)]
    _, kept = np.unique(np.stack(found[:2]), axis=1, return_index=True)  # the first of each pair
    kept.sort()
    owner = found[0][kept]
    by_owner = np.argsort(owner, kind="stable")
    starts = np.flatnonzero(np.diff(owner[by_owner], prepend=-1))
    place = np.arange(len(owner)) - np.repeat(starts, np.diff(starts, append=len(owner)))
    kept = kept[by_owner[place < _NEAREST]]
    return tuple(torch.from_numpy(each[kept]) for each in found)


def _align(first: Tensor, second: Tensor, windows: Tensor, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the window of each first image that the second one shows, by Gauss-Newton (Lucas and Kanade 1981).

    Args:
        first: (n, s, s) grey.
        second: as `first`.
        windows: (n, 4) top, left, height and width where to begin, as shares of the first image.
        rounds: how many steps.

    Returns:
        windows, (n, s, s) what the first image has there, and (n, s, s) 0 where that is outside of it, else 1.
    """
    side = first.shape[1]
    at = _grid(side)
    layers = torch.stack([first, *torch.gradient(first, spacing=1 / side, dim=(1, 2))], 1)
    for step in range(rounds + 1):
        y, x = (windows[:, axis, None] + windows[:, axis + 2, None] * at for axis in (0, 1))
        grid = torch.stack([x[:, None].expand(-1, side, -1), y[..., None].expand(-1, -1, side)], 3) * 2 - 1
        seen, inside = grid_sample(layers, grid, "bilinear", "border", False), (grid.abs() <= 1).all(3).float()
        value, down, right = seen.unbind(1)
        if step == rounds:
            break
        slopes = torch.stack([down, right, down * at[:, None], right * at, value, torch.ones_like(value)], 1)
        slopes = (slopes * inside[:, None]).flatten(2)
        normal = slopes @ slopes.mT
        normal += torch.diag_embed(normal.diagonal(dim1=1, dim2=2) * 1e-3 + 1e-6)
        found = torch.linalg.solve(normal, slopes @ second.flatten(1)[..., None])[..., 0]
        moved = windows + (found[:, :4] / found[:, 4:5].clamp(min=0.1)).clamp(-0.05, 0.05)
        windows = torch.cat([moved[:, :2].clamp(-0.4, 0.4), moved[:, 2:].clamp(0.7, 1.4)], 1)
    return windows, value, inside


def _agreement(first: Tensor, second: Tensor, inside: Tensor) -> Tensor:
    """(n,) how well two images agree, at most 1: the lower quartile, over their squares with contours, of the
    correlation of slopes. What hides a part, such as a logo, doesn't count.
    """

    def slopes(image: Tensor) -> Tensor:
        image = avg_pool2d(image, 3, 1)  # as smooth as the other one, which is interpolated
        down, right = image[:, 1:, :-1] - image[:, :-1, :-1], image[:, :-1, 1:] - image[:, :-1, :-1]
        return torch.stack([down, right], 1) * inside[:, None, 1:-2, 1:-2]

    a, b = slopes(first), slopes(second)
    both, one, other = (avg_pool2d(each.sum(1), 7).flatten(1) for each in (a * b, a * a, b * b))
    contrast = torch.maximum(one, other)
    seen = contrast > 0.02 * contrast.mean(1, keepdim=True) + 0.25
    found = (both / (one * other).sqrt().clamp(min=1e-6)).masked_fill(~seen, float("nan"))
    return torch.where(seen.sum(1) >= 3, found.nanquantile(0.25, dim=1), 0)


class _Images:
    """All images of some splits, numbered through."""

    def __init__(self, splits: Mapping[str, Source], records: Mapping[str, NDArray[Any]]) -> None:
        self.names, self.sources = [*splits], [*splits.values()]
        self.records = [records[name] for name in self.names]
        self.ends = np.cumsum([len(each) for each in self.records])
        self.decoder = decoders.build(DecodeConfig("auto", dct_scaling=True), channels=1)
        self.has_masks = self.sources[0].kind is Kind.masks
        self.exact = decoders.build(DecodeConfig("auto"))

    def column(self, name: str) -> NDArray[Any]:
        return np.concatenate([each[name] for each in self.records])

    def place(self, image: int) -> Place:
        split = int(np.searchsorted(self.ends, image, "right"))
        return Place(self.names[split], image - int(self.ends[split]) + len(self.records[split]))

    def at(self, image: int) -> tuple[Source, int]:
        name, sample = self.place(image)
        return self.sources[self.names.index(name)], sample

    def read(self, image: int) -> bytes:
        source, sample = self.at(image)
        return bytes(source.read(sample))

    def grey(self, image: int) -> Tensor:
        """(_LOOK, _LOOK) float32 of the whole image; 0 if its file is gone."""
        out = np.zeros((_LOOK, _LOOK, 1), np.uint8)
        with suppress(DataError):
            resize_into(self.decoder.decode(self.read(image), None, (_LOOK, _LOOK)), out)
        return torch.from_numpy(out[..., 0]).float()

    def same_pixels(self, one: int, two: int) -> bool:
        """Whether two images are equal in all pixels."""
        with suppress(DataError):
            first, second = (self.exact.decode(self.read(image)) for image in (one, two))
            return np.array_equal(first, second)
        return False

    def target(self, image: int) -> Any:
        """What a model learns of an image; of a mask only copies with the same pixels have the same."""
        source, sample = self.at(image)
        if source.kind is Kind.masks:
            return mask_digest(decode_mask(source.read_mask(sample), source.mask_format))
        return source.target_name(sample)


def _compare(images: _Images, pairs: tuple[Tensor, ...]) -> list[tuple[float, str, str]]:
    """How much the images of some candidates agree; what the first is of the second, and the other way round."""
    first, second, turns, windows, _ = pairs
    grey = {image: images.grey(image) for image in {*first.tolist(), *second.tolist()}}
    one = torch.stack([grey[image] for image in first.tolist()])
    two = torch.stack([_turned(grey[image], turn) for image, turn in zip(second.tolist(), turns.tolist(), strict=True)])
    coarse, _, _ = _align(avg_pool2d(one, 2), avg_pool2d(two, 2), _WINDOWS[windows], 5)
    tries = [_align(one, two, *how) for how in ((_WINDOWS[windows], 0), (coarse, 3))]
    scores, which = torch.stack([_agreement(seen, two, inside) for _, seen, inside in tries]).max(0)
    shown = torch.where(which[:, None] == 0, tries[0][0], tries[1][0])
    cropped, found = ((shown - _WINDOWS[0]).abs().amax(1) > 0.03).tolist(), []
    for row, (score, turn) in enumerate(zip(scores.tolist(), turns.tolist(), strict=True)):
        texts = [" and ".join(filter(None, ["cropped" * cropped[row], _TURNS[each]])) for each in (turn, _BACK[turn])]
        if score >= _AGREE and texts == ["", ""]:
            same = images.same_pixels(int(first[row]), int(second[row]))
            score, texts = (1.0, ["the same pixels"] * 2) if same else (score, [f"near: {min(score, 0.99):.2f}"] * 2)
        found.append((score, texts[0], texts[1]))
    return found


class _Groups:
    """Images that belong together, as a forest (union-find)."""

    def __init__(self, total: int) -> None:
        self.parent = np.arange(total)
        self.joins: list[tuple[int, int, float, str, str]] = []

    def root(self, image: int) -> int:
        while (parent := int(self.parent[image])) != image:
            image = self.parent[image] = int(self.parent[parent])
        return image

    def apart(self, first: Tensor, second: Tensor) -> Tensor:
        """(n,) which pairs aren't known to belong together."""
        pairs = zip(first.tolist(), second.tolist(), strict=True)
        return torch.tensor([self.root(one) != self.root(two) for one, two in pairs], dtype=torch.bool)

    def join(self, one: int, two: int, score: float, first: str, second: str) -> None:
        if self.root(one) != self.root(two):
            self.parent[self.root(two)] = self.root(one)
            self.joins.append((one, two, score, first, second))

    def found(self) -> list[list[tuple[int, int, float, str, str]]]:
        """The joins of each group."""
        of: dict[int, list[tuple[int, int, float, str, str]]] = {}
        for join in self.joins:
            of.setdefault(self.root(join[0]), []).append(join)
        return [*of.values()]


def _equal_bytes(images: _Images, groups: _Groups, num_threads: int) -> None:
    """Join the images that are equal to the byte."""
    there = np.flatnonzero(images.column("state") == 1)
    digests = images.column("digest")[there]
    order = np.argsort(digests, kind="stable")
    alike = np.split(there[order], np.flatnonzero(np.diff(digests[order])) + 1)

    def look(members: NDArray[np.int64]) -> list[int]:
        first = images.read(int(members[0]))
        return [int(members[0]), *(each for each in members[1:].tolist() if images.read(each) == first)]

    for first, *others in in_threads(look, (each for each in alike if len(each) > 1), num_threads):
        for each in others:
            groups.join(first, each, 1.0, *["the same bytes"] * 2)


def _findings(images: _Images, joins: list[tuple[int, int, float, str, str]], area: NDArray[np.int64]) -> list[Finding]:
    """What is wrong with a group of copies."""
    members = sorted({image for join in joins for image in join[:2]}, key=lambda image: (-area[image], image))
    rank = {image: place for place, image in enumerate(members)}
    texts = dict.fromkeys(second if rank[one] < rank[two] else first for one, two, _, first, second in joins)
    what = ", ".join(texts), min(score for _, _, score, _, _ in joins)
    splits = sorted({images.place(image).split for image in members}, key=images.names.index, reverse=True)
    places = {split: tuple(p for p in map(images.place, members) if p.split == split) for split in splits}
    everything = tuple(place for split in splits for place in places[split])
    equal = {"the same bytes", "the same pixels"}.issuperset(texts)
    if (equal or not images.has_masks) and len({images.target(image) for image in members}) > 1:
        found, excluded = [Finding("contradiction", everything, *what, everything)], {*everything}
    else:
        found, excluded = [], set(everything[len(places[splits[0]]) :])
    if len(splits) > 1:
        others = tuple(place for split in splits[1:] for place in places[split])
        found.append(Finding("leak", everything, *what, others))
    for split in splits:
        left = tuple(place for place in places[split] if place not in excluded)
        if len(left) > 1:
            found.append(Finding("copy", left, *what, left[1:]))
    return found


def find(splits: Mapping[str, Source], records: Mapping[str, NDArray[Any]], num_threads: int) -> list[Finding]:
    """Find images that are copies of each other: equal to the byte, in pixels, or nearly.

    Args:
        splits: name -> opened split.
        records: name -> (N,) `RECORD` of its samples.
        num_threads: how many images are read at the same time.

    Returns:
        Findings of the kinds leak, contradiction and copy, one of a kind for each group of copies.
    """
    images = _Images(splits, records)
    area = images.column("height").astype(np.int64) * images.column("width")
    groups = _Groups(len(area))
    _equal_bytes(images, groups, num_threads)
    singles = np.flatnonzero((images.column("state") == 1) & (groups.parent == np.arange(len(area))))
    singles = singles[images.column("code")[singles].any(1)]
    if len(singles) > 1:
        found = [*_candidates(torch.from_numpy(images.column("code")[singles]))]
        order = torch.cat([each[-1] for each in found]).argsort(descending=True)
        pairs = [torch.cat(each)[order] for each in zip(*found, strict=True)]
        pairs[:2] = [torch.from_numpy(singles)[each] for each in pairs[:2]]
        for start in range(0, len(order), _ROUND):
            part = [each[start : start + _ROUND] for each in pairs]
            apart = groups.apart(part[0], part[1])
            part = [each[apart] for each in part]
            runs = [tuple(each[at : at + 64] for each in part) for at in range(0, len(part[0]), 64)]
            for run, looks in zip(runs, in_threads(partial(_compare, images), runs, num_threads), strict=True):
                for one, two, (score, *texts) in zip(run[0].tolist(), run[1].tolist(), looks, strict=True):
                    if score >= _AGREE:
                        groups.join(one, two, score, *texts)
    return [each for joins in groups.found() for each in _findings(images, joins, area)]

"""Images that are there twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool2d, grid_sample, normalize

from effloop.audit.findings import Finding, Place
from effloop.audit.records import CODE, SIDE
from effloop.data.decode import DecodeConfig, decoders
from effloop.data.image.mask import decode_mask, mask_digest
from effloop.data.image.pixels import resize_into
from effloop.data.source.base import Kind, Source
from effloop.errors import DataError
from effloop.system.hardware import in_threads
from effloop.system.progress import Meter

_BAND = 8  # frequencies of an axis that a code has
_CELL = 600  # images for each centre
_PROBES = 4  # cells that an image is looked for in
_BLOCK = 2048  # images whose likes are looked for at a time
_PART = 1 << 20  # cosines in memory at a time
_NEAREST = 8  # candidates for copies of the windows of an image; half as many for those of all of it
_LIKE = 0.6  # least cosine of the codes of candidates
_MOST = 1 << 20  # candidates in memory: of more those with the largest cosines
_LOOK = 64  # height and width at which candidates are compared
_ROUND = 2048  # candidates that are compared before those are left out whose images belong together by now
_PATIENCE = 1 << 15  # candidates in a row, by likeness, that are no copies; then the others aren't looked at
_AGREE = 0.9  # least `_agreement` of copies: of 8,000 pairs of different clothes with like codes the best has 0.85
_SURE = 0.98  # as `_AGREE` where a side has less than `_LOOK` pixels: of 3,000 digits the best pair has 0.97
_ROUGH = 0.6  # as `_AGREE` at half the size; of 2,000 copies 4 in 1,000 have less, of the others 3 of 4

# Orientations: 4 swaps the axes, then 2 turns the rows upside down, then 1 flips from left to right.
_TURNS = (
    *("", "mirrored", "mirrored and turned by 180°", "turned by 180°"),
    *("mirrored and turned by 270°", "turned by 90°", "turned by 270°", "mirrored and turned by 90°"),
)
_BACK = (0, 1, 2, 3, 4, 6, 5, 7)

Join = tuple[int, int, float, str, str]  # two copies, how near, what the first is of the second, and the other way


def _turned(images: Tensor, turn: int) -> Tensor:
    """(..., h, w) in one of the `_TURNS`."""
    images = images.mT if turn & 4 else images
    return images.flip([dim for dim, bit in ((-2, 2), (-1, 1)) if turn & bit])


def _grid(side: int) -> Tensor:
    return (torch.arange(side) + 0.5) / side


def _cosines(places: Tensor) -> Tensor:
    """(n,) places from 0 to 1 -> (n, _BAND) values of the DCT-II's functions there."""
    found = torch.cos(torch.pi * places[:, None] * torch.arange(_BAND)) * 2**0.5
    found[:, 0] = 1
    return found


_BASIS = _cosines(_grid(SIDE)) / SIDE**0.5
_SQUARES = torch.arange(_BAND) ** 2
_WEIGHT = ((_SQUARES[:, None] + _SQUARES) ** 0.25).flatten()  # natural images have less of the higher frequencies

# Windows of an image: top, left, height, width; and the matrices that make their codes of its code.
_WINDOWS = torch.tensor([[0, 0, 1, 1], *([y, x, 0.9, 0.9] for y in (0.015, 0.05, 0.085) for x in (0.015, 0.05, 0.085))])
_CROPS = torch.stack(
    [
        torch.kron(*(_BASIS.T @ _cosines(at + size * _grid(SIDE)) / SIDE**0.5 for at, size in ((y, h), (x, w))))
        for y, x, h, w in _WINDOWS.tolist()
    ]
) * (_WEIGHT[:, None] / _WEIGHT.clamp(min=1e-6)).index_fill(1, torch.tensor([0]), 0)

# What is looked for: an image in all orientations, its windows as they are and mirrored; and the matrices that make it.
_ASKED = torch.tensor([[0, turn] for turn in range(8)] + [[at, turn] for at in range(1, 10) for turn in (0, 1)])


def _turning(turn: int) -> Tensor:
    """(CODE, CODE) that makes the code of the turned image of an image's."""
    each, odd = torch.eye(_BAND**2).view(-1, _BAND, _BAND), (-1.0) ** torch.arange(_BAND)
    each = (each.mT if turn & 4 else each) * odd[:, None] ** (turn >> 1 & 1) * odd ** (turn & 1)
    return each.flatten(1).T


_ASK = torch.stack([_turning(turn) @ _CROPS[window] for window, turn in _ASKED.tolist()])


def describe(thumbnails: NDArray[np.uint8]) -> NDArray[np.int8]:
    """What near-copies are found by: the low frequencies of a grey thumbnail, as in pHash (Zauner 2010), with signs.

    Args:
        thumbnails: (n, SIDE, SIDE, 3) uint8.

    Returns:
        (n, CODE) int8, of length 254 but for clipping; 0 for an image of one colour.
    """
    grey = torch.from_numpy(thumbnails).float() @ torch.tensor([0.299, 0.587, 0.114])
    codes = (_BASIS.T @ grey @ _BASIS).flatten(1) / SIDE * _WEIGHT
    length = codes.norm(dim=1, keepdim=True)
    found: NDArray[np.int8] = torch.where(length > 1, codes / length * 254, 0).round().clamp(-127, 127).char().numpy()
    return found


def _nearest(codes: Tensor, centres: Tensor, count: int) -> Tensor:
    """(n, count) which centres are nearest to (n, CODE) codes of length 1."""
    parts = torch.split(codes, 1 + _PART // len(centres))
    return torch.cat([(part @ centres.T).topk(count, sorted=False).indices.int() for part in parts])


def _centres(codes: Callable[[Tensor], Tensor], total: int) -> Tensor:
    """(total / _CELL, CODE) by k-means of a sample."""
    number = max(1, total // _CELL)
    sample = codes(torch.randperm(total, generator=torch.Generator().manual_seed(0))[: 32 * number])
    centres = sample[:number]
    for _ in range(6):
        nearest = _nearest(sample, centres, 1)[:, 0]
        centres = normalize(torch.zeros_like(centres).index_add_(0, nearest, sample))
    return centres


def _candidates(codes: Callable[[Tensor], Tensor], total: int) -> Iterator[tuple[Tensor, ...]]:
    """Pairs of images whose codes are alike.

    Each image is in the cell of the nearest centre, and is looked for in the nearest cells: an inverted file (Sivic and
    Zisserman 2003).

    Args:
        codes: gives those of (n,) images, (n, CODE) of length 1.
        total: how many images there are.

    Yields:
        first, second, which of `_ASKED` of the first the second is like, cosine.
    """
    centres = _centres(codes, total)
    count = min(_PROBES, len(centres))
    images = torch.arange(total, dtype=torch.int32)
    cells = torch.cat([_nearest(codes(part), centres, 1)[:, 0] for part in torch.split(images, _BLOCK)])
    members = torch.split(cells.argsort().int(), cells.bincount(minlength=len(centres)).tolist())
    for block in torch.split(images, _BLOCK):
        asked = normalize(torch.einsum("aij,nj->nai", _ASK, codes(block)), dim=2).flatten(0, 1)
        near = _nearest(asked, centres, count).flatten()
        likeness = torch.zeros(len(near), _NEAREST + 1)  # one may be the image itself
        second = torch.zeros(len(near), _NEAREST + 1, dtype=torch.int32)
        queues = torch.split(near.argsort(), near.bincount(minlength=len(centres)).tolist())
        for its, queue in zip(members, queues, strict=True):
            those = codes(its).T
            for rows in torch.split(queue, 1 + _PART // (1 + len(its))):
                top = (asked[rows // count] @ those).topk(min(_NEAREST + 1, len(its)))
                likeness[rows, : len(its)], second[rows, : len(its)] = top.values, its[top.indices]
        shape = len(block), len(_ASKED), -1
        likeness, second = likeness.view(shape), second.view(shape)
        likeness[second == block[:, None, None]] = 0
        for start, end, most in ((0, 8, _NEAREST // 2), (8, len(_ASKED), _NEAREST)):
            yield _best(block, second[:, start:end], likeness[:, start:end], start, most)


def _best(block: Tensor, second: Tensor, likeness: Tensor, start: int, most: int) -> tuple[Tensor, ...]:
    """Of (n, asked, found) the best of each image, each in a turn once: trousers are like their mirror images."""
    values, at = likeness.flatten(1).topk(min(64, likeness[0].numel()))
    found = second.flatten(1).gather(1, at)
    same = found.long() * 8 + _ASKED[start + at // likeness.shape[2], 1]
    values[(same[:, None] == same[..., None]).tril(-1).any(2) | (values < _LIKE)] = 0
    values, place = values.topk(most)
    row, column = values.nonzero(as_tuple=True)
    place = place[row, column]
    asked = start + at[row, place] // likeness.shape[2]
    return block[row], found[row, place], asked.to(torch.uint8), values[row, column]


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
    side, at = first.shape[1], _grid(first.shape[1])
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
    seen = contrast > 0.02 * contrast.mean(1, keepdim=True) + 0.1
    found = (both / (one * other).sqrt().clamp(min=1e-6)).masked_fill(~seen, float("nan"))
    return torch.where(seen.sum(1) >= 2, found.nanquantile(0.25, dim=1), 0)


class _Images:
    """All images of some splits, numbered through."""

    def __init__(self, splits: Mapping[str, Source], records: Mapping[str, NDArray[Any]]) -> None:
        self.names, self.sources, self.records = [*splits], [*splits.values()], [records[name] for name in splits]
        self.starts = np.cumsum([0, *map(len, self.records)])
        self.scaled = decoders.build(DecodeConfig("auto", dct_scaling=True), channels=1)
        self.exact = decoders.build(DecodeConfig("auto"))
        self.small = np.minimum(self.column("height"), self.column("width")) < _LOOK
        self.grey = lru_cache(1 << 12)(self._grey)

    def column(self, name: str) -> NDArray[Any]:
        return np.concatenate([each[name] for each in self.records])

    def codes(self, images: NDArray[Any]) -> Tensor:
        """(n, CODE) of length 1; a copy of them all would take as much memory as all else."""
        found = np.empty((len(images), CODE), np.int8)
        for start, records in zip(self.starts.tolist(), self.records, strict=False):
            here = (images >= start) & (images < start + len(records))
            found[here] = records["code"][images[here] - start]
        return normalize(torch.from_numpy(found).float())

    def at(self, image: int) -> tuple[int, int]:
        """The number of the split, and of the sample in it."""
        split = int(np.searchsorted(self.starts, image, "right")) - 1
        return split, image - int(self.starts[split])

    def area(self, image: int) -> int:
        split, sample = self.at(image)
        return int(self.records[split]["height"][sample]) * int(self.records[split]["width"][sample])

    def read(self, image: int) -> bytes:
        split, sample = self.at(image)
        try:
            return bytes(self.sources[split].read(sample))
        except DataError as error:
            raise DataError(f"{self.sources[split].name(sample)} {error}") from error

    def _grey(self, image: int) -> Tensor:
        """(_LOOK, _LOOK) uint8; 0 if it can't be decoded in this way."""
        data, out = self.read(image), np.zeros((_LOOK, _LOOK, 1), np.uint8)
        with suppress(DataError):
            resize_into(self.scaled.decode(data, None, (_LOOK, _LOOK)), out)
        return torch.from_numpy(out[..., 0])

    def same_pixels(self, *pair: int) -> bool:
        first, second = (self.exact.decode(self.read(image)) for image in pair)
        return np.array_equal(first, second)

    def target(self, image: int, *, equal: bool) -> Any:
        """What a model learns of an image; the same for all whose masks can't be compared."""
        split, sample = self.at(image)
        source = self.sources[split]
        if source.kind is not Kind.masks:
            return source.target_name(sample)
        return mask_digest(decode_mask(source.read_mask(sample), source.mask_format)) if equal else None


def _compare(images: _Images, pairs: Sequence[Tensor]) -> list[Join]:
    """Those of some candidates that are copies."""
    window, turn = _ASKED[pairs[2].int()].T
    pairs = [*pairs[:2], torch.tensor(_BACK)[turn]]
    keep, shown = torch.arange(len(turn)), _WINDOWS[window]
    for side, rounds in ((_LOOK // 2, 5), (_LOOK, 3)):
        first, second, turns, begun = (each[keep] for each in (*pairs, _WINDOWS[window]))
        one = torch.stack([images.grey(image) for image in first.tolist()]).float()
        both = [images.grey(image) for image in second.tolist()]
        two = torch.stack([_turned(*each) for each in zip(both, turns.tolist(), strict=True)]).float()
        one, two = (avg_pool2d(each, _LOOK // side) for each in (one, two))
        tries = [_align(one, two, begun, 0), _align(one, two, shown, rounds)]
        scores, which = torch.stack([_agreement(seen, two, inside) for _, seen, inside in tries]).max(0)
        shown = torch.where(which[:, None] == 0, tries[0][0], tries[1][0])
        good = scores >= (_AGREE if side == _LOOK else _ROUGH)
        keep, shown, scores = keep[good], shown[good], scores[good]
        if not len(keep):
            return []
    joins = []
    cropped = ((shown - _WINDOWS[0]).abs().amax(1) > 0.03).tolist()
    rows = zip(cropped, scores.tolist(), *(each[keep].tolist() for each in pairs), strict=True)
    for crop, score, *pair, turn in rows:
        if images.small[pair].any() and (crop or score < _SURE):
            continue
        texts = [" and ".join(filter(None, ["cropped" * crop, _TURNS[each]])) for each in (turn, _BACK[turn])]
        if texts == ["", ""]:
            same = images.same_pixels(*pair)
            score, texts = (1.0, ["the same pixels"] * 2) if same else (score, [f"near: {min(score, 0.99):.2f}"] * 2)
        joins.append((pair[0], pair[1], score, texts[0], texts[1]))
    return joins


class _Groups:
    """Images that belong together, as a forest (union-find)."""

    def __init__(self, total: int) -> None:
        self.parent, self.joins = np.arange(total, dtype=np.int32), list[Join]()

    def root(self, image: int) -> int:
        while (parent := int(self.parent[image])) != image:
            image = self.parent[image] = int(self.parent[parent])
        return image

    def join(self, join: Join) -> None:
        one, two = map(self.root, join[:2])
        if one != two:
            self.parent[two] = one
            self.joins.append(join)

    def found(self) -> list[list[Join]]:
        """The joins of each group."""
        of: dict[int, list[Join]] = {}
        for join in self.joins:
            of.setdefault(self.root(join[0]), []).append(join)
        return [*of.values()]


def find(splits: Mapping[str, Source], records: Mapping[str, NDArray[Any]], num_threads: int) -> list[Finding]:
    """Find images that are copies of each other: equal to the byte, in pixels, or nearly.

    Args:
        splits: name -> opened split.
        records: name -> (N,) `RECORD` of its samples.
        num_threads: how many images are read at the same time.

    Returns:
        Findings of the kinds leak, contradiction and copy; of a group of copies one of a kind, of copy one a split.
    """
    images = _Images(splits, records)
    groups = _Groups(int(images.starts[-1]))
    there = np.flatnonzero(images.column("state") == 1).astype(np.int32)
    _join_equal(images, there, groups, num_threads)
    coded = np.concatenate([each["code"].any(1) for each in images.records])
    there = there[(groups.parent[there] == there) & coded[there]]
    if len(there) > 1:
        _join_near(images, there, groups, num_threads)
    return [each for joins in groups.found() for each in _findings(images, joins)]


def _join_equal(images: _Images, there: NDArray[np.int32], groups: _Groups, num_threads: int) -> None:
    """Join those that are equal to the byte."""
    digests = images.column("digest")[there]
    order = np.argsort(digests, kind="stable")
    digests = digests[order]
    values = np.unique(digests[1:][digests[1:] == digests[:-1]])
    begin, end = np.searchsorted(digests, values, "left"), np.searchsorted(digests, values, "right")
    alike = (there[order[one:other]] for one, other in zip(begin.tolist(), end.tolist(), strict=True))

    def look(members: NDArray[np.int32]) -> list[int]:
        data = [images.read(each) for each in members.tolist()]
        return [each for each, its in zip(members.tolist(), data, strict=True) if its == data[0]]

    for first, *others in in_threads(look, alike, num_threads):
        for each in others:
            groups.join((first, each, 1.0, "the same bytes", "the same bytes"))


def _join_near(images: _Images, there: NDArray[np.int32], groups: _Groups, num_threads: int) -> None:
    """Join those that are nearly equal, the likeliest candidates first."""
    found: list[Tensor] = []
    for some in _candidates(lambda rows: images.codes(there[rows.numpy()]), len(there)):
        found = [torch.cat(each) for each in zip(found, some, strict=True)] if found else [*some]
        if len(found[0]) > _MOST:
            best = found[3].topk(_MOST, sorted=False).indices
            found = [each[best] for each in found]
    order = found[3].argsort(descending=True)
    pairs = [torch.from_numpy(there)[found[0]], torch.from_numpy(there)[found[1]], found[2]]
    since = 0
    with Meter() as meter:
        meter.begin("possible copies", total=2 * len(order))
        for start in range(0, len(order), _ROUND):
            part = [each[order[start : start + _ROUND]] for each in pairs]
            both = zip(part[0].tolist(), part[1].tolist(), strict=True)
            apart = torch.tensor([groups.root(one) != groups.root(two) for one, two in both])
            runs = [[each[apart][at : at + 64] for each in part] for at in range(0, int(apart.sum()), 64)]
            joins = [*in_threads(partial(_compare, images), runs, num_threads)]
            for join in (each for some in joins for each in some):
                groups.join(join)
            since = 0 if any(joins) else since + _ROUND
            meter.advance(2 * len(part[0]))
            if since >= _PATIENCE:
                break


def _findings(images: _Images, joins: list[Join]) -> list[Finding]:
    """What is wrong with a group of copies. The last split's stay as they are: scores are of it."""
    members = sorted({image for join in joins for image in join[:2]}, key=lambda image: (-images.area(image), image))
    rank = {image: place for place, image in enumerate(members)}
    texts = dict.fromkeys(second if rank[one] < rank[two] else first for one, two, _, first, second in joins)
    what = ", ".join(texts), min(score for _, _, score, _, _ in joins)
    of: dict[str, list[Place]] = {name: [] for name in reversed(images.names)}
    for split, sample in map(images.at, members):
        of[images.names[split]].append(Place(images.names[split], sample))
    kept, *others = sides = [tuple(places) for places in of.values() if places]
    left_out, everything = sum(others, ()), sum(sides, ())
    equal = {"the same bytes", "the same pixels"}.issuperset(texts)
    found = [Finding("leak", everything, *what, left_out)] if others else []
    if len({images.target(image, equal=equal) for image in members}) > 1:
        return [*found, Finding("contradiction", everything, *what, everything)]
    return [*found, Finding("copy", kept, *what, kept[1:])] if len(kept) > 1 else found

"""A check of samples before the first step, so that bad ones are found now and not in hours."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from effloop.data.bad import quota
from effloop.data.decode import Decoder
from effloop.data.image.header import NEEDS_PLUGIN, Encoded, Header
from effloop.data.image.mask import check_size, check_values, decode_mask, largest_value, mask_digest, mask_size
from effloop.data.image.orientation import read_orientation
from effloop.data.plan import Plan
from effloop.data.source import Kind, Source
from effloop.data.source.base import target_bytes
from effloop.errors import PROGRAM, DataError, EffLoopError, few
from effloop.system.hardware import in_threads

_NAMED = 20


class Looked(NamedTuple):
    """What was found in a split."""

    looked_at: int
    bad: list[str]  # a line for each that can't be used
    expected: int  # bad ones in all; where not all were looked at twice as many, to be sure
    turned: int  # by their EXIF orientation, or would be with `decode.exif`


def check_samples(
    plans: Mapping[str, Plan],
    limit: int,
    num_threads: int,
    max_errors: float | None = None,
    verify: str = "verify data.root=PATH",
) -> tuple[str, str]:
    """Check the checksum, header and end of up to `limit` samples of each split, evenly spread, and of those that the
    index says are bad; and that their masks, where targets are masks, are as large as they are.

    Args:
        plans: split -> plan, whose source and decoder are used.
        limit: 0 checks none.
        num_threads: how many are checked at the same time.
        max_errors: how many of each split may be bad, as of the config; None allows none.
        verify: the command that checks every sample of this data.

    Returns:
        A line about those that are bad, and one about those that EXIF turns; empty if there are none.

    Raises:
        DataError: more can't be used; the message names the first 20, says how many there are in all splits, and how
            to do without them.
        ConfigError: an image is too small for the augmentation recipe.
    """
    found = {split: look(plan, limit, num_threads) for split, plan in plans.items()}
    bad = {split: each for split, each in found.items() if each.bad}
    looked_at = sum(each.looked_at for each in found.values())
    turned = sum(each.turned for each in found.values())
    note = turned_line(turned, f"{looked_at:,} images looked at", next(iter(plans.values())).decoder)
    if not bad:
        return "", note
    lines = [line for each in bad.values() for line in each.bad]
    of = f"{len(lines):,} of the {looked_at:,} samples looked at can't be used"
    of += f" ({', '.join(f'{len(each.bad):,} of {split}' for split, each in bad.items())})"
    if max_errors and all(len(each.bad) <= quota(max_errors, len(plans[split].source)) for split, each in bad.items()):
        return f"on_error=skip: {of}: {few(lines)}", note
    most, them = max(each.expected for each in bad.values()), "it" if len(lines) == 1 else "them"
    skip = f"set on_error=skip max_errors={most} to do without {them}; "
    if any(len(each.bad) == each.looked_at for each in bad.values()):
        skip = ""  # nothing would be left
    raise DataError(listed(of, lines, f"{skip}{PROGRAM} {verify} checks every sample"))


def look(plan: Plan, limit: int, num_threads: int) -> Looked:
    """Check samples of a split; arguments as of `check_samples`, a ConfigError as it raises."""
    count = len(plan.source)
    ids = np.unique(np.linspace(0, count - 1, min(limit, count)).astype(np.int64))
    bad_ones = plan.source.bad_samples()
    if limit:
        ids = np.union1d(ids, bad_ones)
    known_bad = frozenset(bad_ones.tolist())
    turned: list[int] = []

    def check(sample: int) -> tuple[int, int] | str:
        try:
            with plan.error_context(sample):
                data = plan.source.read(sample)
                plan.source.verify(sample)
                info = check_image(data, plan.decoder)
                check_mask(plan.source, sample, info.height, info.width, whole=sample in known_bad)
                turned.extend([sample] * is_turned(data, info, plan.decoder))
                return info.height, info.width
        except DataError as error:
            return str(error)

    found = [*in_threads(check, ids.tolist(), num_threads)]
    if sizes := [each for each in found if not isinstance(each, str)]:
        plan.augment.check(np.unique(np.array(sizes, np.int64), axis=0))
    bad = [each for each in found if isinstance(each, str)]
    expected = len(bad) and (1 + (len(ids) < count)) * len(bad) * count // len(ids)
    return Looked(len(ids), bad, expected, len(turned))


def is_turned(data: Encoded, info: Header, decoder: Decoder) -> bool:
    """Whether an image has an EXIF orientation by which it is turned, or would be with `decode.exif`."""
    known = decoder.exif or not info.format  # a plugin's decoder may read what Pillow doesn't
    return (info.orientation if known else read_orientation(data, info)) != 1


def turned_line(count: int, of: str, decoder: Decoder) -> str:
    """A line about images that `is_turned` has found; empty if there are none."""
    done = "upright by their EXIF tag; torchvision's ImageFolder leaves them as stored, as decode.exif=false does"
    todo = "by their EXIF tag; decode.exif=true turns them upright"
    return f"{count:,} of {of} are turned {done if decoder.exif else todo}" if count else ""


def check_image(data: Encoded, decoder: Decoder) -> Header:
    """The header of an image, if that and its end are in order.

    A file without its format's end marker is decoded, because it may still be complete.

    Raises:
        DataError: they aren't, or it can't be decoded; the message doesn't name the sample.
    """
    info = decoder.read_info(data)
    if not info.complete:
        decoder.decode(data)
    return info


def check_mask(source: Source, sample: int, height: int, width: int, *, whole: bool = False) -> None:
    """Check the mask of a sample, where targets are masks: that it can be read, and is as large as its image; `whole`:
    its values, too.

    Raises:
        DataError: it is wrong; the message begins with "has a mask ...".
    """
    if source.kind is not Kind.masks:
        return
    data = source.read_mask(sample)
    check_size(mask_size(data), height, width)
    if whole:
        mask = decode_mask(data, source.mask_format)
        check_values(largest_value(mask), len(source.classes))
        if mask_digest(mask) != target_bytes(source.target_rows[sample]):
            raise DataError("has a mask of other values than when it was looked at or written")


_READ = 1 << 26  # bytes that are read, about: 0.1 s


def copied(train: Source, val: Source, limit: int, num_threads: int) -> str:
    """Look for validation images that are training images as well, to the byte.

    Those that may be equal, by sizes and by the checksums that a format stores, are read: `limit` images at most, first
    those that the fewest others may be equal to.

    Returns:
        How many there are, and an example; empty if none was found, or if nothing is known before images are read.
    """
    keys, val_keys = train.digests(), val.digests()
    if not limit or keys is None or val_keys is None:
        return ""
    most = min(limit, _READ // max(1, int(val_keys.mean()) >> 32))
    exact = train.has_checksums and val.has_checksums
    rows, val_rows, left = _alike(keys, val_keys, np.inf if exact else most)
    if exact:
        both = np.intersect1d(keys[rows], val_keys[val_rows])
        rows, val_rows = rows[np.isin(keys[rows], both)], val_rows[np.isin(val_keys[val_rows], both)]
        near, val_near, left = _alike(keys[rows], val_keys[val_rows], most)
        rows, val_rows = rows[near], val_rows[val_near]
    there = dict(zip(in_threads(partial(_digest, train), rows.tolist(), num_threads), rows.tolist(), strict=True))
    digests = in_threads(partial(_digest, val), val_rows.tolist(), num_threads)
    found = [(row, there[each]) for row, each in zip(val_rows.tolist(), digests, strict=True) if each and each in there]
    if not found:
        return ""
    of = f"{len(val) - left:,} validation images{' that were compared' * (left > 0)}"
    pair = f"{val.name(found[0][0])} = {train.name(found[0][1])}"
    return f"the training split has {len(found):,} of {of}, to the byte ({pair})"


def _alike(
    keys: NDArray[np.int64], val_keys: NDArray[np.int64], limit: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Rows of both that may be equal, by a hash: `limit` at most, and how many of `val_keys` that leaves out."""
    mask = (1 << max(16, len(keys).bit_length() - 1)) - 1
    groups, val_groups = ((((each ^ each >> 32) & mask) + 1) * (each != 0) for each in (keys, val_keys))
    counts, val_counts = (np.bincount(each, minlength=mask + 2) for each in (groups, val_groups))
    both = (counts > 0) & (val_counts > 0)
    both[0] = False  # no bytes
    there = np.flatnonzero(both)
    costs = (counts + val_counts)[there]
    order = np.argsort(costs, kind="stable")
    over = there[order[np.cumsum(costs[order]) > limit]]
    both[over] = False
    return np.flatnonzero(both[groups]), np.flatnonzero(both[val_groups]), int(val_counts[over].sum())


def _digest(source: Source, sample: int) -> bytes:
    """Of an image's bytes; empty if they can't be read."""
    with suppress(EffLoopError):  # loading says what is wrong
        return hashlib.sha256(source.read(sample)).digest()
    return b""


def listed(what: str, lines: Sequence[str], fix: str) -> str:
    """A message about bad samples: a single one in one line, several in a line each, up to 20 of them; those that need
    the same plugin count as one.
    """
    alike: dict[str, list[str]] = {}
    for line in lines:
        alike.setdefault(line.partition(NEEDS_PLUGIN)[2] or line, []).append(line)
    lines = [same[0] + f" ({len(same):,} such images)" * (len(same) > 1) for same in alike.values()]
    if len(lines) == 1:
        return f"{lines[0]}; {fix}"
    more = [f"and {len(lines) - _NAMED:,} more"] if len(lines) > _NAMED else []
    return "\n  ".join([f"{what}; {fix}:", *lines[:_NAMED], *more])

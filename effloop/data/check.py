"""A check of samples before the first step, so that bad ones are found now and not in hours."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from effloop.data.decode import Decoder
from effloop.data.image.header import Encoded
from effloop.data.image.mask import check_size, check_values, decode_mask, largest_value, mask_digest, mask_size
from effloop.data.plan import Plan
from effloop.data.source import Kind, Source
from effloop.data.source.base import target_bytes
from effloop.errors import PROGRAM, DataError

_NAMED = 20


def check_samples(
    plan: Plan, limit: int, num_threads: int, allowed: int = 0, verify: str = "verify data.root=PATH"
) -> str:
    """Check the checksum, header and end of up to `limit` samples, evenly spread over the split, and of those that the
    index says are bad; and that their masks, where targets are masks, are as large as they are.

    Args:
        plan: its source and decoder are used.
        limit: 0 checks none.
        num_threads: how many are checked at the same time.
        allowed: how many may be bad.
        verify: the command that checks every sample of this data.

    Returns:
        A line about those that are bad; empty if none is.

    Raises:
        DataError: more samples can't be used; the message names the first 20, and says how many there are.
        ConfigError: an image is too small for the augmentation recipe.
    """
    count = len(plan.source)
    ids = np.unique(np.linspace(0, count - 1, min(limit, count)).astype(np.int64))
    bad_ones = plan.source.bad_samples()
    if limit:
        ids = np.union1d(ids, bad_ones)
    known_bad = frozenset(bad_ones.tolist())

    def check(sample: int) -> tuple[int, int] | str:
        try:
            with plan.error_context(sample):
                data = plan.source.read(sample)
                plan.source.verify(sample)
                size = check_image(data, plan.decoder)
                check_mask(plan.source, sample, *size, whole=sample in known_bad)
                return size
        except DataError as error:
            return str(error)

    with ThreadPoolExecutor(max(1, num_threads), thread_name_prefix="effloop-check") as pool:
        try:
            found = list(pool.map(check, ids.tolist()))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if bad := [each for each in found if isinstance(each, str)]:
        of = f"{len(bad):,} of the {len(ids):,} samples looked at in {plan.source.where} can't be used"
        if len(bad) > allowed:
            more = f"max_errors allows {allowed:,}, and " if allowed else ""
            raise DataError(listed(of, bad, f"{more}{PROGRAM} {verify} checks every sample"))
    if sizes := [each for each in found if not isinstance(each, str)]:
        plan.augment.check(np.unique(np.array(sizes, np.int64), axis=0))
    return f"on_error=skip: {of}: {bad[0]}{', and others' * (len(bad) > 1)}" if bad else ""


def check_image(data: Encoded, decoder: Decoder) -> tuple[int, int]:
    """(height, width) of an image whose header and end are in order.

    A file without its format's end marker is decoded, because it may still be complete.

    Raises:
        DataError: they aren't, or it can't be decoded; the message doesn't name the sample.
    """
    info = decoder.read_info(data)
    if not info.complete:
        decoder.decode(data)
    return info.height, info.width


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


def listed(what: str, lines: Sequence[str], fix: str) -> str:
    """A message about bad samples: a single one in one line, several in a line each, up to 20 of them."""
    if len(lines) == 1:
        return f"{lines[0]}; {fix}"
    more = [f"and {len(lines) - _NAMED:,} more"] if len(lines) > _NAMED else []
    return "\n  ".join([f"{what}; {fix}:", *lines[:_NAMED], *more])

"""A check of samples before the first step, so that bad ones are found now and not in hours."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from effloop.data.image.header import read_header
from effloop.data.plan import Plan


def check_samples(plan: Plan, limit: int, num_threads: int) -> None:
    """Check the checksum, header and end of up to `limit` samples, evenly spread over the split.

    A file without its format's end marker is decoded, because it may still be complete.

    Args:
        plan: its source and decoder are used.
        limit: how many samples at most; 0 is none.
        num_threads: how many are checked at the same time.

    Raises:
        DataError: a sample can't be used; the message names it. With several bad samples, the first.
        ConfigError: an image is too small for the augmentation recipe.
    """
    count = len(plan.source)
    ids = np.unique(np.linspace(0, count - 1, min(limit, count)).astype(np.int64))

    def check(sample: int) -> tuple[int, int]:
        with plan.error_context(sample):
            data = plan.source.read(sample)
            plan.source.verify(sample)
            size = plan.decoder.size(data)
            if not read_header(data).complete:
                plan.decoder.decode(data)
            return size

    with ThreadPoolExecutor(max(1, num_threads), thread_name_prefix="effloop-check") as pool:
        try:
            sizes = list(pool.map(check, ids.tolist()))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if sizes:
        plan.augment.check(np.unique(np.array(sizes, np.int64), axis=0))

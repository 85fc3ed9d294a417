"""Config -> the order of a training split of which only some shards are here at a time, and what fetches them."""

from __future__ import annotations

from functools import partial
from statistics import fmean

import numpy as np

from effloop.assemble.resolve import Resolved
from effloop.data.bad import OnError
from effloop.data.engine.base import engine_class
from effloop.data.order import Order
from effloop.data.remote.download import CHUNK_BYTES
from effloop.data.remote.window_fetch import WindowFetching
from effloop.data.source import Kind, Source
from effloop.data.source.root import download_folder, remote_files
from effloop.data.source.storage.indexed import IndexedSource
from effloop.data.windows import WindowOrder, Windows
from effloop.errors import ConfigError, DataError, warn
from effloop.parallel import Slice
from effloop.parallel.rank_env import detect_launcher


def window_order(config: Resolved, source: Source, order: Order) -> WindowOrder:
    """The order of a training split with `data.window`.

    Raises:
        ConfigError: something else that is set, or the format, needs all samples; or a batch is too large.
        DataError: the samples of a shard don't follow each other.
    """
    window = config.data.window
    assert window is not None
    others = {  # key -> what it is, and what turns it off
        "progressive": (config.progressive, "[]"),
        "probe": (config.probe, "0"),
        "on_error": ("skip" if config.on_error is OnError.skip else "", "fail"),
        "engine": ("" if engine_class(config.engine).exact else config.engine.name, "processes"),
    }
    for key, (value, off) in others.items():
        if value:
            raise ConfigError(f"{key}: {value} can't be used with data.window={window}; set {key}={off}")
    if not isinstance(source, IndexedSource):
        raise ConfigError(
            f"data.window: {source.where} has no shards that can be fetched one by one; use data=tar, tfrecord, "
            "recordio or parquet, or drop data.window"
        )
    _, counts = source.shard_files()
    found = WindowOrder(**vars(order), shards=tuple(counts.tolist()), window=window)
    smallest = int(
        np.sort(counts)[:window].sum()
    )  # in any epoch a batch is in two windows at most: there is room for two
    if order.global_batch > smallest:
        raise ConfigError(
            f"data.window: {window} shards have {smallest:,} samples, fewer than a batch of all ranks, "
            f"{order.global_batch:,}; set data.window higher or batch_size lower"
        )
    if not source.in_order:
        raise DataError(f"{source.where} has an index whose samples are not in the order of its shards; convert again")
    if not order.rank and source.kind is Kind.classes:
        _warn_if_sorted(source, found)
    return found


_WINDOWS, _SAMPLES = 4, 10_000
"""Of an epoch, and of each of them, that are looked at for their classes."""


def _warn_if_sorted(source: Source, order: WindowOrder) -> None:
    """Say so where a window has less than half of the classes that as many samples of the whole split have.

    With 1,515 photographs of 10 classes in 11 sorted shards, 3 at a time, two epochs came to a top-1 of 10.9 %; with
    shuffled shards to 33.7 %, without a window to 30.8 %.
    """
    counts = np.asarray(order.shards)
    firsts, inside, among = np.cumsum(counts) - counts, [], []
    for shards in order.windows(0)[:_WINDOWS]:
        most = _SAMPLES // len(shards) + 1
        parts = [firsts[shard] + np.linspace(0, counts[shard], most, endpoint=False) for shard in shards.tolist()]
        rows = np.unique(np.concatenate(parts).astype(np.int64))
        inside.append(len(np.unique(source.targets[rows])))
        among.append(len(np.unique(source.targets[np.linspace(0, len(source) - 1, len(rows)).astype(np.int64)])))
    if fmean(inside) < fmean(among) / 2:
        warn(
            f"data.window: the samples are sorted by class, so that {order.window} shards have {fmean(inside):.0f} of "
            f"{fmean(among):.0f} classes, which trains worse; set data.window higher, or write shuffled shards: "
            "effloop convert shuffle=true"
        )


def windows_of(config: Resolved, order: Order, source: Source, parallel: Slice) -> Windows:
    """Who tells what a rank needs; the first rank of a machine starts the process that fetches it.

    Raises:
        ConfigError: another run does the same.
    """
    assert isinstance(order, WindowOrder)
    assert isinstance(source, IndexedSource)
    manifest = remote_files(config.data)["remote"]
    names = [str(file.relative_to(source.base())) for file in source.shard_files()[0]]
    env, start = detect_launcher(), None
    if env is None or not env.local_rank:
        folder, ranks = download_folder(config.data), env.local_world_size if env else parallel.world_size
        start = partial(WindowFetching, manifest, names, folder, config.data.download_gb, CHUNK_BYTES, ranks)
    return Windows(order, names, source.window_state, start, config.epochs, parallel.fetches)

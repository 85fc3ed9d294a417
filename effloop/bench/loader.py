"""`bench what=loader`: how fast batches come, beside what people would use instead."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from effloop.bench.baselines import LOADERS, Work, check_same_work, originals
from effloop.bench.harness import result_of, served, show
from effloop.bench.interleave import scratch, take_turns
from effloop.build.loader import build_loader
from effloop.config import Config
from effloop.errors import ConfigError
from effloop.registry import choices


def loader(config: Config, repeats: int, *, vs: str, folder: str, work: str) -> dict[str, Any]:
    """Images/s of the configured loader and of its peers, in turns; from the index to the batch in the loop's hands.

    The work is the same for all: random-resized-crop to `image_size`, antialiased, and flip; uint8 batches of
    `batch_size`, but for `pillow`, which normalises to float32 as in torchvision's own reference, `ffcv`, which
    resizes by areas, and `simplejpeg`, which only decodes. Each lives in a process of its own.

    Args:
        config: whose train split and engine are measured.
        repeats: epochs of each, after one to warm up.
        vs: peers by name, with commas between; `none` for none, `processes` is this package's other engine.
        folder: the original photographs for the peers, ROOT/SPLIT/CLASS/*; empty is `data.root`.
        work: where `ffcv` writes its file; empty is the system's place for temporary files.

    Raises:
        ConfigError: no such peer, or a package or folder that it needs isn't there; or a recipe that it doesn't do.
    """
    wanted = [] if vs == "none" else vs.split(",")
    peers = [name for name in LOADERS if name != "effloop"]
    for name in wanted:
        if name not in peers:
            raise ConfigError(f"vs: no peer '{name}'; {choices(name, ['none', *peers])}")
    others = ",".join(name for name in wanted if name != "processes")
    check_same_work(config, others, ", or set vs=none")
    config.data.mean = config.data.std = None
    config.device = "cpu"
    root = originals(config, folder, others)
    ours = build_loader(config)  # says what is wrong with it before any process starts
    about = ours.describe()
    ours.close()
    with scratch(work) as place, ExitStack() as stack:
        todo = Work(config, root, place)
        names = dict.fromkeys(["effloop", *wanted])
        turns = take_turns({name: stack.enter_context(served(name, LOADERS[name], todo)) for name in names}, repeats)
    result = result_of("loader", config, about, turns)
    show(result, repeats)
    return result

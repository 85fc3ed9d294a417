"""`bench what=loader`: how fast batches arrive, compared with other loaders."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from effloop.assemble.loader import build_loader
from effloop.bench import masked
from effloop.bench.baselines import Workload, check_comparable, original_photos
from effloop.bench.harness import comparison_result, epoch_process, print_comparison
from effloop.bench.interleave import interleave, scratch_folder
from effloop.bench.loaders import LOADERS, NOTES, OWN
from effloop.bench.masked import MASKED
from effloop.config import Config
from effloop.data.source import Kind
from effloop.errors import ConfigError
from effloop.registry import choices


def loader(config: Config, repeats: int, *, vs: str, folder: str, work: str, dtype: str) -> dict[str, Any]:
    """Images/s of the configured loader and of baselines, interleaved; from the index to the batch that the loop gets.

    The workload is the same for all: random-resized-crop to `image_size`, antialiased, and flip; batches of
    `batch_size`. `NOTES` has what is different. Each runs in a process of its own.

    Args:
        config: whose train split and engine are measured.
        repeats: epochs of each, after a warm-up epoch.
        vs: names of baselines, with commas between; `none` for none; `threads-1`, `processes-2` and the like are
            EffLoop's engines with so many workers, `processes` with as many as it has itself. Of images with masks, in
            SPLIT/{images,masks}, the others are `torchvision`, `pillow`, `albumentations` and `mmseg`.
        folder: the original photographs for the baselines, ROOT/SPLIT/CLASS/*; empty is `data.root`.
        work: where `ffcv` and `turboloader` write their files; empty is the system's place for temporary files.
        dtype: of the images: `uint8`, or `float32`, normalised with `data.mean` and `data.std`, on the CPU.

    Raises:
        ConfigError: no such baseline, or a package or folder that it needs is missing; or a recipe that it doesn't do.
    """
    wanted = [] if vs == "none" else vs.split(",")
    baselines = [name for name in {**LOADERS, **MASKED} if name != "effloop"]
    for name in wanted:
        if name not in baselines:
            raise ConfigError(f"vs: no baseline '{name}'; {choices(name, ['none', *baselines])}")
    others = ",".join(name for name in wanted if name not in OWN)
    check_comparable(config, others, ", or set vs=none", masks=config.task.name == "segmentation")
    _check_dtype(config, dtype)
    config.device = "cpu"
    root = original_photos(config, folder, others)
    ours = build_loader(config)  # says what is wrong with it before any process starts
    data = ours.describe()
    ours.close()
    loaders, notes = _offered(ours.plan.source.kind is Kind.masks)
    if missing := [name for name in wanted if name not in loaders]:
        raise ConfigError(f"vs: '{missing[0]}' is not for such data; {choices(missing[0], sorted(loaders))}")
    with scratch_folder(work) as scratch, ExitStack() as stack:
        workload = Workload(config, root, scratch)
        runs = {
            name: stack.enter_context(epoch_process(name, loaders[name], workload))
            for name in dict.fromkeys(["effloop", *wanted])
        }
        rounds = interleave(runs, repeats)
    result = comparison_result("loader", config, data, rounds) | {"dtype": dtype}
    print_comparison(result, repeats)
    for name in runs:
        if name in notes:
            print(f"{name}: {notes[name]}")
    return result


def _offered(masks: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Loaders by name, and what they do differently, for images with masks or without."""
    if masks:
        return {name: LOADERS[name] for name in ("effloop", *OWN)} | MASKED, masked.NOTES
    return LOADERS, NOTES


def _check_dtype(config: Config, dtype: str) -> None:
    """Make images what `dtype` says.

    Raises:
        ConfigError: no such type, or nothing to normalise with.
    """
    if dtype == "uint8":
        config.data.mean = config.data.std = None
    elif dtype != "float32":
        raise ConfigError(f"dtype: '{dtype}' is not allowed; {choices(dtype, ['uint8', 'float32'])}")
    elif config.data.mean is None or config.data.std is None:
        raise ConfigError("dtype: float32 is normalised with data.mean and data.std, and these are null; set both")

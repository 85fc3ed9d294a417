"""`show`: a picture of samples as the model will see them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from effloop.cli.command import command
from effloop.config.compose import compose_run
from effloop.config.overrides import is_sweep, only_shows, parse_flags
from effloop.data.source import Tail
from effloop.data.source.splits import open_part
from effloop.errors import ConfigError
from effloop.record import grid
from effloop.runs.folder import RunInfo, claim_run_dir, unlock, write_run_info

_MAX_PIXELS = 60_000_000  # with names below 89 million, of which Pillow and others warn


@dataclass(frozen=True)
class ShowOptions:
    """Options of `show`.

    Attributes:
        split: which split.
        samples: how many, spread evenly over the split; all that it has, if these are fewer.
        epochs: how many, from the first on; 8 of train, 1 of val, whose images are the same in every epoch.
    """

    split: Literal["train", "val"] = "train"
    samples: Annotated[int, range(1, 65)] = 8
    epochs: Annotated[int, range(1, 65)] | None = None


@command("show", ShowOptions, "data.root=/data/pets augment=native_rand samples=4")
def show(options: ShowOptions, overrides: list[str]) -> int:
    """A picture of samples as the model will see them.

    It has each sample in some epochs and is samples.png in a run folder of its own.
    """
    flags, overrides = parse_flags(overrides)
    if is_sweep(flags) or only_shows(flags):
        raise ConfigError(f"show: a picture is of a single run; leave out {' '.join(flags)}")
    run = compose_run(flags, overrides)
    config = run.config
    open_part(config.data, options.split)  # fails before torch is imported
    from effloop.assemble.loader import build_loader

    epochs = options.epochs or (8 if options.split == "train" else 1)
    few = replace(config, data=replace(config.data, tail=Tail.wrap))  # there may be fewer than a batch has
    with closing(build_loader(few, options.split)) as loader:
        source = loader.plan.source
        samples = min(options.samples, len(source))
        pixels = samples * epochs * config.size.pixels
        if pixels > _MAX_PIXELS:
            raise ConfigError(
                f"samples: {samples} x {epochs} epochs of image_size={config.size.word} are "
                f"{pixels / 1e6:.1f} million pixels; at most {_MAX_PIXELS // 10**6} are allowed: set fewer samples or "
                "epochs, or a smaller image_size"
            )
        if source.targets_note or source.left_out:
            print(loader.describe())
        for line in filter(None, (loader.note, loader.plan.order.describe())):
            print(line)
        picture = grid.draw(loader.preview(samples, epochs))
    run_dir = claim_run_dir(run.folder)
    path, encoded = run_dir / "samples.png", grid.png(picture)
    try:
        data = {"classes": list(source.classes), options.split: source.fingerprint()}
        write_run_info(run_dir, RunInfo(config, run.overrides, data))
        path.write_bytes(encoded)
    finally:
        unlock(run_dir)
    tiles = f"{samples} x {epochs} images of {config.size} pixels"
    print(f"{path}: {tiles}, with names {picture.shape[1]} x {picture.shape[0]}, {len(encoded) / 1000:,.0f} KB")
    return 0

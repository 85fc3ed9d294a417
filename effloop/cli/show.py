"""A picture of samples as the model will see them, in a run folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from effloop.build.loader import build_loader
from effloop.config import Config
from effloop.errors import ConfigError
from effloop.record import grid
from effloop.runs.folder import RunInfo, claim_run_dir, write_run_info

_MAX_PIXELS = 80_000_000
"""Of the whole picture: Pillow and others warn of, or refuse, pictures of more than 89 million pixels."""


def look(
    split: str, num_samples: int, num_epochs: int, config: Config, overrides: Sequence[str], run_dir: Path
) -> None:
    """Write `samples.png`, a row for each sample, a column for each epoch, and say where it is.

    Args:
        split: `train` or `val`.
        num_samples: spread evenly over the split; all that it has, if these are fewer.
        num_epochs: the first ones.
        config: from `compose`.
        overrides: what it was composed from, for the run folder.
        run_dir: the run folder, still to be made.

    Raises:
        ConfigError, DataError: as `build_loader` does; or the picture would be too large.
    """
    with closing(build_loader(config, split)) as loader:
        source = loader.plan.source
        num_samples = min(num_samples, len(source))
        pixels = grid.Layout(config.image_size, num_samples, num_epochs).pixels
        if pixels > _MAX_PIXELS:
            raise ConfigError(
                f"samples: {num_samples} x {num_epochs} epochs of image_size={config.image_size} are, with "
                f"their names, {pixels / 1e6:.1f} million pixels; at most {_MAX_PIXELS // 10**6} are allowed: "
                "set fewer samples or epochs, or a smaller image_size"
            )
        picture = grid.draw(loader.preview(num_samples, num_epochs))
    run_dir = claim_run_dir(run_dir)
    data = {"classes": list(source.classes), split: source.fingerprint()}
    write_run_info(run_dir, RunInfo(config, overrides, data))
    path = run_dir / "samples.png"
    encoded = grid.png(picture)
    path.write_bytes(encoded)
    tiles = f"{num_samples} x {num_epochs} images of {config.image_size} pixels"
    print(f"{path}: {tiles}, with names {picture.shape[1]} x {picture.shape[0]}, {len(encoded) / 1000:,.0f} KB")

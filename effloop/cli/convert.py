"""`convert`: the data in another storage format."""

from __future__ import annotations

import effloop
from effloop import config as configs
from effloop.build.resolve import num_workers
from effloop.cli.command import command
from effloop.cli.splits import open_splits
from effloop.convert.convert import convert
from effloop.convert.options import ConvertOptions
from effloop.data.decode import decoders


@command("convert", ConvertOptions, "data.root=/data/pets to=lmdb out=pets.lmdb")
def convert_data(options: ConvertOptions, overrides: list[str]) -> int:
    """Write the data in another storage format, re-encoded or as it is.

    The output is atomic, nothing is overwritten, and the same command resumes an interrupted conversion.
    num_workers=N sets the threads.
    """
    config = configs.compose(overrides)
    opened = open_splits(config, options.splits)
    convert(options, opened, decoders.build(config.decode), num_workers(config), effloop.__version__)
    return 0

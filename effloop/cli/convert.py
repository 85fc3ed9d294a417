"""`convert`: the data in another storage format."""

from __future__ import annotations

import effloop
from effloop import config as configs
from effloop.assemble.resolve import num_workers
from effloop.cli.command import command
from effloop.cli.splits import open_splits
from effloop.convert.convert import convert
from effloop.convert.options import ConvertOptions
from effloop.convert.work import WorkFolder
from effloop.data.decode import decoders
from effloop.data.source.root import download_folder
from effloop.data.source.view import shuffled


@command("convert", ConvertOptions, "data.root=/data/pets to=lmdb out=pets.lmdb")
def convert_data(options: ConvertOptions, overrides: list[str]) -> int:
    """Write the data in another storage format, re-encoded or as it is.

    The output is atomic, nothing is overwritten, and the same command resumes an interrupted conversion.
    num_workers=N sets the threads. What goes to a URL is written to data.download_dir first, and uploaded when it is
    complete.
    """
    config = configs.compose(overrides)
    work = WorkFolder([*options.outputs], download_folder(config.data))
    work.check_absent()
    opened = open_splits(config, options.splits)
    if options.shuffle:
        opened["train"] = shuffled(opened["train"], config.seed)
    convert(options, opened, decoders.build(config.decode), num_workers(config), effloop.__version__, work)
    return 0

"""`export`: a trained model as a file for other programs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from effloop.cli.command import RunOptions, command
from effloop.errors import PROGRAM, ConfigError
from effloop.inference.export import ExportOptions as Options
from effloop.inference.export import export
from effloop.inference.formats import format_of
from effloop.inference.trained import Trained
from effloop.measure.turns import print_table


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options, RunOptions):
    """Options of `export`.

    Attributes:
        run: the folder of a run, or a .ckpt file.
    """


@command("export", ExportOptions, "outputs/first to=onnx")
def export_model(options: ExportOptions, overrides: list[str]) -> int:
    """Write a run's best model to a file for other programs, and check it.

    The scored weights, BatchNorm fused, with preprocessing and classes in the file's metadata. A file that predicts
    otherwise for more than 0.1 % of the images, or as int8 loses more than a percentage point, isn't kept.
    """
    if format_of(options.run) is not None and options.run.is_file():
        raise ConfigError(f"export: {options.run} was exported already; name its run folder or a .ckpt file")
    trained = Trained.open(options.run, overrides)
    done = export(trained, options)
    for line in (trained.describe(), *done.notes):
        print(line)
    meter, parity = trained.task.meters[0], done.parity
    name = options.to + ", int8" * options.int8 + ", half" * options.half
    figures = (f"{done.size / 1e6:.2f}", f"{parity.images:,}", f"{parity.difference:.2g}", f"{parity.agreement:.2%}")
    scores = (meter.text(values[meter.name]) for values in (parity.before, parity.after))
    headings = ("format", "MB", "images", "largest difference", "agreement", f"{meter.name} before", "after")
    print_table(headings, [(name, *figures, *scores)], left=("format",), min_width=90)
    print(f"file: {done.path}   score: {PROGRAM} eval {shlex.quote(str(done.path))}")
    return 0

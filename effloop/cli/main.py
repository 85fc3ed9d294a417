"""The commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

import effloop
from effloop import config as configs
from effloop.bench import benchmarks as bench
from effloop.build.evaluation import evaluate_checkpoint
from effloop.checkpoint import files
from effloop.cli import choices as catalog
from effloop.cli import replay, resume, train
from effloop.cli.arguments import run_and_overrides
from effloop.cli.show import look
from effloop.config import Config
from effloop.config import hydra_app as launch
from effloop.convert import convert, verify
from effloop.convert.options import SPLITS, ConvertOptions, parse_splits
from effloop.data.decode import decoders
from effloop.data.source import Source, sources
from effloop.errors import ConfigError, DataError, EffLoopError
from effloop.parallel.found import found
from effloop.registry import choices
from effloop.report import files as report
from effloop.runs import compare
from effloop.runs.reader import find_runs
from effloop.system.hardware import available_cores
from effloop.system.processes import discard_output
from effloop.task import meters_of

HELP = """\
EffLoop trains image models on PyTorch as fast as the machine allows.

  python -m effloop [train] [OVERRIDE ...]     train; without data.root on
                                               photographs that come along
  python -m effloop -m KEY=A,B,C ...           once for each value (a sweep)
  python -m effloop eval RUN [OVERRIDE ...]    score a run, or a .ckpt file
  python -m effloop resume RUN [OVERRIDE ...]  go on with a run that was stopped
  python -m effloop replay RUN [OVERRIDE ...]  do it again, compare to the bit
  python -m effloop diff RUN RUN ...           what differs between runs
  python -m effloop convert to=lmdb out=PATH data.root=PATH [max_side=500]
      [quality=90|source|lossless] [payload=original|jpeg|raw] [restart=auto]
  python -m effloop verify [data=NAME] data.root=PATH   look at every sample
  python -m effloop show [split=val] [samples=8] [epochs=8]  what a model sees
  python -m effloop list [GROUP]               all that can be chosen
  python -m effloop report RUN ...             runs, sweeps: table, plot, page
  python -m effloop bench what=loop|step|loader|train|storage|scale|augment

Parts, each chosen by GROUP=NAME:
  data       images from: auto, folder, lmdb, tar, tfrecord, hdf5, recordio,
             pth, zarr, memmap, embedded, dali; kept in memory by data.cache
  decode     who decodes: auto, turbojpeg, opencv, pillow
  augment    native, torchvision, albumentations; native_rand: see list augment
  engine     whose hands: threads, processes, dali, inline
  model      cnn, small_resnet, timm, resnet50 or any of torchvision
  optim      sgd, adamw     schedule  cosine, linear, step, constant
  precision  fp32, tf32, amp, bf16, fp16
  parallel   none, ddp, dp  record  run, none        checkpoint  last_best, none
  experiment recipes: finetune, cifar10_fast, ... (list experiment), and yours

Short names:
  data.root=PATH  has train/CLASS/*.jpg and val/CLASS/*.jpg, or is any of these
  batch_size=32   images per rank and step    num_workers=auto  loading threads
  epochs=20       image_size=64               seed=0            lr=0.003
  amp=true        mixed precision             accumulate=1      batches/update
  compile=true    torch.compile               device=auto       or cpu, cuda:1
  resume=RUN      go on from it, a new run    run=NAME          run folder

Flags: --cfg job (print the config and stop)  --debug (tracebacks)  --version
Runs land in ./outputs/DATE/TIME, sweeps in ./outputs/multirun/DATE/TIME.
Configs of your own: ./configs/GROUP/NAME.yaml.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    0, 1 for data that `verify` finds fault with, or a replay's other numbers, 2 for what the user can mend, 130 for
    Ctrl-C.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    try:
        return _dispatch(args, debug=debug)
    except EffLoopError as error:
        if debug:
            raise
        print(f"effloop: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever read our output has gone
        discard_output()
        return 141
    except KeyboardInterrupt as interrupt:
        print(f"effloop: {interrupt.__cause__ or 'interrupted'}", file=sys.stderr)
        return 130


_OF_RANKS = ("train", "resume", "list")
"""Commands that several ranks may be given."""


def entry() -> None:
    """The console script."""
    raise SystemExit(main())


def _dispatch(args: list[str], *, debug: bool) -> int:
    if any(arg in ("-h", "--help") for arg in args):
        print(HELP, end="")
        return 0
    if "--version" in args:
        print(f"effloop {effloop.__version__}")
        return 0
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": partial(train.train, debug=debug),
        "eval": evaluate_run,
        "resume": resume.resume,
        "replay": replay.main,
        "diff": diff_runs,
        "convert": convert_data,
        "verify": verify_data,
        "show": show_samples,
        "list": list_choices,
        "bench": bench.main,
        "report": report.main,
    }
    if args and args[0] not in _OF_RANKS and args[0] in commands and (place := found()) and place.world_size > 1:
        if place.rank:
            return ConfigError.exit_code  # one line is enough
        raise ConfigError(
            f"{args[0]}: this is one of {place.world_size} ranks, "
            "but a single process does it; leave torchrun or srun out"
        )
    if args and args[0] in commands:
        return commands[args[0]](args[1:])
    if args and not args[0].startswith("-") and "=" not in args[0] and not args[0].startswith("~"):
        raise ConfigError(f"'{args[0]}' is not a command; {choices(args[0], commands)}")
    return train.train(args, debug=debug)


def evaluate_run(args: list[str]) -> int:
    """`eval RUN`: the validation scores of a checkpoint."""
    path, overrides = run_and_overrides("eval", args)
    checkpoint = files.find(path, "best")
    state = files.read(checkpoint)
    alone = {**state["config"], "parallel": {"name": "none"}}  # whatever the run was trained by
    config = configs.from_dict(alone, overrides, f"the config in {checkpoint}")
    scores, loader = evaluate_checkpoint(config, state)
    print(f"{checkpoint}, epoch {state['progress']['epoch'] - 1}, on {loader.describe()}")
    table = Table()
    meters = meters_of(config.task.name)
    for heading in ("samples", *(meter.name for meter in meters)):
        table.add_column(heading, justify="right")
    table.add_row(f"{len(loader.plan.source):,}", *(meter.text(scores[meter.name]) for meter in meters))
    Console().print(table)
    return 0


def diff_runs(args: list[str]) -> int:
    """`diff RUN RUN ...`: what differs between runs; of a sweep's folder all jobs take part."""
    found = find_runs(map(Path, args))
    if len(found) < 2:
        raise ConfigError("diff needs two runs or more: python -m effloop diff RUN RUN [RUN ...]")
    Console().print(*compare.difference_tables(found), sep="\n")
    return 0


def convert_data(args: list[str]) -> int:
    """`convert to=NAME out=PATH [OPTION ...] [OVERRIDE ...]`: the data in another storage format."""
    options, overrides = ConvertOptions.parse(args, [field.name for field in fields(Config)])
    config = configs.compose(overrides)
    opened = _opened(config, options.splits)
    num_threads = available_cores() if isinstance(config.num_workers, str) else config.num_workers
    convert.convert(options, opened, decoders.build(config.decode), num_threads, effloop.__version__)
    return 0


def verify_data(args: list[str]) -> int:
    """`verify [split=train|val|both] [out=FILE] [OVERRIDE ...]`: every sample of the data; 1 if anything is wrong."""
    options, overrides = _options("verify", args, {"split": "train", "out": "FILE"})
    splits = parse_splits("split", options["split"]) if "split" in options else SPLITS
    config = configs.compose(overrides)
    num_threads = available_cores() if isinstance(config.num_workers, str) else config.num_workers
    with verify.Problems(Path(options["out"]) if "out" in options else None) as problems:
        opened = _opened(config, splits)
        reports = verify.verify(opened, decoders.build(config.decode), num_threads, problems)
    verify.show(reports, problems)
    return 1 if problems.count else 0


def show_samples(args: list[str]) -> int:
    """`show [split=train] [samples=8] [epochs=8] [OVERRIDE ...]`: a picture of what the model will see."""
    options, overrides = _options("show", args, {"split": "train", "samples": "8", "epochs": "8"})
    split = options.get("split", "train")
    if split not in SPLITS:
        raise ConfigError(f"split: no split '{split}'; {choices(split, SPLITS)}")
    # Evaluation shows the same image in every epoch.
    wanted = {"samples": "8", "epochs": "8" if split == "train" else "1", **options}
    for key in ("samples", "epochs"):
        if wanted[key] not in map(str, range(1, 65)):
            raise ConfigError(f"{key}: '{wanted[key]}' is not allowed; set a whole number from 1 to 64")
    launch.launch(overrides, partial(look, split, int(wanted["samples"]), int(wanted["epochs"])))
    return 0


def _options(command: str, args: list[str], examples: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """A command's own `KEY=VALUE`, for the keys of `examples`; and the rest, which are overrides."""
    options: dict[str, str] = {}
    overrides = []
    for arg in args:
        key, _, value = arg.partition("=")
        if key not in examples:
            overrides.append(arg)
        elif value:
            options[key] = value
        else:
            raise ConfigError(f"{command}: '{arg}' has no value; set {key}={examples[key]} or drop it")
    return options, overrides


def _opened(config: Config, splits: Sequence[str]) -> dict[str, Source]:
    """Some of the splits `train` and `val`, opened.

    Raises:
        DataError: one can't be; where the other can, the line says how to take it alone.
    """
    names = {"train": config.data.train_split, "val": config.data.val_split}
    opened: dict[str, Source] = {}
    failed: list[DataError] = []
    for split in splits:
        try:
            opened[split] = sources.build(config.data, names[split])
        except DataError as error:
            failed.append(error)
    if failed and opened:
        raise DataError(f"{failed[0]}; or take '{names[next(iter(opened))]}' alone: set split={next(iter(opened))}")
    if failed:
        raise failed[0]
    return opened


def list_choices(args: list[str]) -> int:
    """`list [GROUP]`: what can be chosen, one line each."""
    catalog.show(args)
    return 0

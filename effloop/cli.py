"""The commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

import effloop
from effloop import catalog, explain
from effloop import config as configs
from effloop.build import build_trainer, evaluate_checkpoint
from effloop.checkpoint import files
from effloop.config import Config
from effloop.errors import CheckpointError, ConfigError, EffLoopError
from effloop.measure import bench
from effloop.registry import choices
from effloop.trainer import Trainer

HELP = """\
EffLoop trains image models on PyTorch as fast as the machine allows.

  python -m effloop [train] [OVERRIDE ...]      train; without data on photographs that come along
  python -m effloop -m KEY=A,B,C ...            train once for each value (a sweep)
  python -m effloop eval RUN [OVERRIDE ...]     score a run's best checkpoint, or a .ckpt file
  python -m effloop resume RUN [OVERRIDE ...]   go on with a run that was stopped, in its folder
  python -m effloop list [GROUP]                what can be chosen
  python -m effloop bench what=loop             what EffLoop's loop costs over a bare one

Parts, each chosen by GROUP=NAME (python -m effloop list shows all names):
  data     where images come from: auto, folder, memmap, embedded
  decode   who decodes: auto, turbojpeg, opencv, pillow         augment    native
  engine   whose hands: threads, processes, inline              optim      sgd, adamw
  model    cnn, small_resnet, resnet50 or any of torchvision    schedule   cosine, step, constant
  precision  fp32, tf32, amp, bf16, fp16                        experiment your ./configs/experiment/

Short names:
  data.root=PATH    a folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or an EffLoop file
  batch_size=32     images per rank and step          num_workers=auto  loading threads or processes
  epochs=15         image_size=64  lr=0.003  seed=0    accumulate=1      batches per update
  amp=true          mixed precision                   device=auto       cpu, cuda, cuda:1
  compile=true      torch.compile                     channels_last=true
  resume=RUN        go on from a run, in a new one    run=NAME          name of the run folder

Flags: --cfg job (print the config and stop)   --debug (tracebacks)   --version   --help
Runs land in ./outputs/DATE/TIME. Configs of your own go to ./configs/GROUP/NAME.yaml.
"""

MAX_JOBS = 1000
"""More jobs than this in one sweep are taken for a slip."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 2 for what the user can mend, 130 for Ctrl-C."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    try:
        return _dispatch(args)
    except EffLoopError as error:
        if debug:
            raise
        print(f"effloop: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("effloop: interrupted; python -m effloop resume RUN goes on from the last checkpoint", file=sys.stderr)
        return 130


def entry() -> None:
    """The console script."""
    raise SystemExit(main())


def _dispatch(args: list[str]) -> int:
    if any(arg in ("-h", "--help") for arg in args):
        print(HELP, end="")
        return 0
    if "--version" in args:
        print(f"effloop {effloop.__version__}")
        return 0
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": train,
        "eval": evaluate_run,
        "resume": resume,
        "list": list_choices,
        "bench": bench.main,
    }
    if args and args[0] in commands:
        return commands[args[0]](args[1:])
    if args and not args[0].startswith("-") and "=" not in args[0] and not args[0].startswith("~"):
        raise ConfigError(f"'{args[0]}' is not a command; {choices(args[0], commands)}")
    return train(args)


def train(args: list[str]) -> int:
    """`train`: one run, or with -m one for each combination of values."""
    overrides = [arg for arg in args if not arg.startswith("-")]
    _check_flags(args)
    failures: list[tuple[str, EffLoopError]] = []

    @hydra.main(version_base=configs.VERSION_BASE, config_path=str(configs.config_root()), config_name=configs.NAME)
    def job(tree: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        task = list(hydra_config.overrides.task)
        try:
            run_dir = Path(os.path.relpath(hydra_config.runtime.output_dir))
            run(configs.finish(tree, task), task, run_dir)
        except EffLoopError as error:  # caught here, because Hydra would add lines of its own
            if isinstance(error, InterruptedRunError):
                raise KeyboardInterrupt from error
            failures.append((" ".join(task), error))
            if hydra_config.mode is RunMode.MULTIRUN:
                print(f"effloop: job {hydra_config.job.num} ({' '.join(task)}): {error}", file=sys.stderr)

    with explain.in_one_line(Config, overrides):
        configs.prepare(overrides)
        if "-m" in args or "--multirun" in args:
            _count_jobs(overrides)
        _call_hydra(job, args)
    if failures and len(failures) == 1 and "-m" not in args and "--multirun" not in args:
        raise failures[0][1]
    if failures:
        raise ConfigError(f"{len(failures)} jobs of the sweep failed: {'; '.join(job for job, _ in failures)}")
    return 0


_FLAGS = ("-m", "--multirun", "--cfg", "-c", "--resolve", "--info", "-i", "--package", "-p", "--config-dir", "-cd")


def _check_flags(args: list[str]) -> None:
    for arg in args:
        if arg.startswith("-") and arg.partition("=")[0] not in _FLAGS:
            raise ConfigError(f"'{arg}' is not a flag; {choices(arg, [*_FLAGS, '--debug', '--help'])}")


def _count_jobs(overrides: list[str]) -> None:
    """Refuse a sweep of no jobs, or of so many that it must be a slip."""
    counts = {
        override.input_line: len(list(override.sweep_string_iterator()))
        for override in OverridesParser.create().parse_overrides(overrides)
        if override.is_sweep_override()
    }
    for override, count in counts.items():
        if not count:
            raise ConfigError(f"{override}: an empty sweep, 0 values; give at least one")
    if prod(counts.values()) > MAX_JOBS:
        raise ConfigError(f"the sweep has {prod(counts.values()):,} jobs, more than {MAX_JOBS:,}; sweep fewer values")


def _call_hydra(job: Callable[[], None], args: list[str]) -> None:
    """Call a Hydra main function with our arguments, and with its exceptions left to us."""
    saved_argv, saved_flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["effloop", *args], "1"
    try:
        job()
    finally:
        sys.argv = saved_argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if saved_flag is not None:
            os.environ["HYDRA_FULL_ERROR"] = saved_flag


def run(config: Config, overrides: Sequence[str], run_dir: Path) -> None:
    """Train one run in a new run folder and say where it is."""
    try:
        trainer = build_trainer(config, run_dir=run_dir, overrides=overrides)
    except EffLoopError:
        _remove_if_empty(run_dir)
        raise
    _fit(trainer, config)


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder that Hydra made for a run that never began, and its empty parent."""
    for path in (folder, folder.parent):
        try:
            path.rmdir()
        except OSError:
            return


def _fit(trainer: Trainer, config: Config) -> None:
    """Say what is about to happen, do it, and say where it is."""
    run_dir = trainer.checkpoints.folder.parent
    for line in _description(trainer, config, run_dir):
        trainer.recorder.note(line)
    try:
        trainer.fit()
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted; go on with: python -m effloop resume {run_dir}") from None
    print(f"run: {run_dir}   look: tensorboard --logdir {run_dir}   score: python -m effloop eval {run_dir}")


class InterruptedRunError(EffLoopError):
    """Ctrl-C during training."""

    exit_code = 130


def _description(trainer: Trainer, config: Config, run_dir: Path) -> list[str]:
    assert config.precision is not None
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    device = next(trainer.model.parameters()).device
    return [
        f"run    {run_dir}",
        f"train  {trainer.train.describe()}",
        f"val    {trainer.val.describe()}",
        f"model  {getattr(config.model, 'arch', config.model.name)}, {parameters:,} parameters, "
        f"{config.precision.name} on {device}",
        f"step   {trainer.train.global_batch * config.accumulate} images: {config.batch_size} per rank, "
        f"{trainer.parallel.world_size} rank(s), {config.accumulate} batch(es) per update; "
        f"engine {config.engine.name}, {config.num_workers} workers",
    ]


def resume(args: list[str]) -> int:
    """`resume RUN`: go on in the same folder, as if never stopped."""
    folder, overrides = _run_and_overrides("resume", args)
    if not folder.is_dir():
        raise CheckpointError(f"'{folder}' is not a run folder; name the folder that holds config.yaml")
    config = configs.load(folder / "config.yaml", overrides)
    trainer = build_trainer(config, run_dir=folder, resume=files.find(folder, "last"))
    if trainer.progress.epoch >= config.epochs:
        print(f"{folder} is done: {trainer.progress.epoch} of {config.epochs} epochs; epochs=N adds more")
        return 0
    _fit(trainer, config)
    return 0


def evaluate_run(args: list[str]) -> int:
    """`eval RUN`: the validation scores of a checkpoint."""
    path, overrides = _run_and_overrides("eval", args)
    checkpoint = files.find(path, "best")
    state = files.read(checkpoint)
    config = configs.from_dict(state["config"], overrides, f"the config in {checkpoint}")
    scores, loader = evaluate_checkpoint(config, state)
    print(f"{checkpoint}, epoch {state['progress']['epoch'] - 1}, on {loader.describe()}")
    table = Table()
    for heading in ("samples", "top1", "top5", "loss"):
        table.add_column(heading, justify="right")
    table.add_row(
        f"{len(loader.plan.source):,}", f"{scores['top1']:.2%}", f"{scores['top5']:.2%}", f"{scores['loss']:.4f}"
    )
    Console().print(table)
    return 0


def list_choices(args: list[str]) -> int:
    """`list [GROUP]`: what can be chosen, one line each."""
    catalog.show(args)
    return 0


def _run_and_overrides(command: str, args: list[str]) -> tuple[Path, list[str]]:
    if not args or "=" in args[0] or args[0].startswith("-"):
        raise ConfigError(f"{command} needs a run: python -m effloop {command} RUN [OVERRIDE ...]")
    return Path(args[0]), args[1:]

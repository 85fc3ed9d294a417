"""The command line: calls the command that is asked for, and turns errors into exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import effloop
from effloop import registry
from effloop.cli import (  # noqa: F401
    bench,
    choices,
    convert,
    diagnose,
    diff,
    evaluate,
    export,
    predict,
    replay,
    report,
    resume,
    show,
    train,
    tune,
    verify,
)
from effloop.cli.command import commands
from effloop.cli.help import of_command, overview
from effloop.cli.options import options_of
from effloop.cli.spelling import refuse_other_styles
from effloop.errors import ConfigError, EffLoopError, InterruptedRunError
from effloop.parallel.rank_env import detect_launcher
from effloop.system.command import command_timed
from effloop.system.processes import discard_output


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    0, 1 for data that `verify` finds fault with, a replay's other numbers or an export's other outputs, 2 for what the
    user can fix, 130 for Ctrl-C.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        with command_timed(whole_process=argv is None):
            return _dispatch(args)
    except EffLoopError as error:
        if "--debug" in args and not isinstance(error, InterruptedRunError):
            raise
        print(f"effloop: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever read our output has gone
        discard_output()
        return 141
    except KeyboardInterrupt:
        print("effloop: interrupted", file=sys.stderr)
        return 130


def entry() -> None:
    """The console script."""
    raise SystemExit(main())


def _dispatch(args: list[str]) -> int:
    debug = [word for word in args if word == "--debug"]
    args = _without_plugins([word for word in args if word != "--debug"])
    name = args[0] if args and args[0] in commands else None
    if {"-h", "--help"} & {*args}:
        print(of_command(commands[name]) if name else overview(), end="")
        return 0
    if "--version" in args:
        print(f"effloop {effloop.__version__}")
        return 0
    asked = commands[name or "train"]
    refuse_other_styles(args[1:] if name else args, options_of(asked.options), overrides=asked.overrides)
    if not name and args and args[0][:1] not in ("-", "~") and "=" not in args[0]:
        raise ConfigError(f"'{args[0]}' is not a command; {registry.choices(args[0], commands)}")
    if not asked.of_ranks and (env := detect_launcher()) and env.world_size > 1:
        if env.rank:
            return ConfigError.exit_code  # one line is enough
        raise ConfigError(
            f"{name}: this is one of {env.world_size} ranks, but a single process does it; leave torchrun or srun out"
        )
    return asked.run([*(args[1:] if name else args), *debug])


def _without_plugins(args: list[str]) -> list[str]:
    """The arguments but `plugins=[FILE,...]`, whose files are used: a config, which may be somebody else's, has no such
    key.

    Raises:
        ConfigError: a file can't be used.
    """
    typed = [word for word in args if word.startswith("plugins=")]
    names = [name.strip(" '\"") for word in typed for name in word.removeprefix("plugins=").strip("[]").split(",")]
    if typed:
        registry.use_plugin_files([name for name in names if name])
    return [word for word in args if word not in typed]

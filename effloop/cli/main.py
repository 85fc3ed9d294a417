"""The command line: calls the command that is asked for, and turns errors into exit codes."""

from __future__ import annotations

import faulthandler
import importlib
import signal
import sys
import traceback
from collections.abc import Sequence

import effloop
from effloop import registry
from effloop.cli.command import Command, commands, options_of
from effloop.errors import BUG, ConfigError, InterruptedRunError, PreemptedRunError, printable_lines
from effloop.system.processes import command_timed, discard_output, escaped_output, limit_spinning

MODULES = {  # command -> the module of this folder that has it, imported when it is asked for: most import torch
    **dict.fromkeys(("train", "resume"), "train"),
    **dict.fromkeys(("convert", "verify", "index"), "convert"),
    **dict.fromkeys(("diagnose", "lr", "tune"), "measure"),
    **dict.fromkeys(("diff", "replay", "report"), "report"),
    **dict.fromkeys(("eval", "export", "predict"), "trained"),
    **{"audit": "audit", "bench": "bench", "launch": "launch", "list": "help", "plan": "plan", "show": "show"},
}


def command_named(name: str) -> Command:
    """A command of `MODULES`."""
    importlib.import_module(f"effloop.cli.{MODULES[name]}")
    return commands[name]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    0, 1 for data that `verify` finds fault with, a replay's other numbers or an export's other outputs, 2 for what the
    user can fix, 70 for a bug, 75 for a run that was saved when a signal ended it, 130 for Ctrl-C. With --debug
    exceptions are raised.
    """
    args, whole_process = list(sys.argv[1:] if argv is None else argv), argv is None
    debug = "--debug" in args
    with escaped_output():
        if whole_process:
            faulthandler.enable(2)  # a stack where a mapped file is cut while it is read (SIGBUS)
            limit_spinning()
        try:
            with command_timed(whole_process=whole_process):
                return _dispatch(args)
        except BrokenPipeError:  # whoever read our output has gone
            discard_output()
            return 141
        except KeyboardInterrupt:
            print("effloop: interrupted", file=sys.stderr)
            return InterruptedRunError.exit_code
        except Exception as error:
            if debug and not isinstance(error, InterruptedRunError | PreemptedRunError):
                raise
            if found := registry.explained(error):
                print(f"effloop: {printable_lines(registry.line_of(found))}", file=sys.stderr)
                return found.exit_code
            traceback.print_exc()
            what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}".removesuffix(": ")
            print(f"effloop: bug: {printable_lines(what)}; please report it with the lines above", file=sys.stderr)
            return BUG


def entry() -> None:
    """The console script."""
    code = main()
    # Torch's end takes a while, in which a scheduler's signal would make a failure of a run that is over.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    raise SystemExit(code)


def _dispatch(args: list[str]) -> int:
    debug = [word for word in args if word == "--debug"]
    args = _without_plugins([word for word in args if word != "--debug"])
    name = args[0] if args and args[0] in MODULES else None
    if {"-h", "--help"} & {*args}:
        from effloop.cli.help import of_command, overview

        print(of_command(command_named(name)) if name else overview(MODULES), end="")
        return 0
    if "--version" in args:
        print(f"effloop {effloop.__version__}")
        return 0
    is_word = bool(args) and args[0][:1] not in ("-", "~") and "=" not in args[0]
    if is_word and not name:
        known = f"did you mean data.root={args[0]}?" if "/" in args[0] else registry.choices(args[0], MODULES)
        raise ConfigError(f"'{args[0]}' is not a command; {known}")
    from effloop.parallel.base import detect_launcher

    asked, words = command_named(name or "train"), args[1:] if name else args
    _refuse_flags(asked, words)
    env = detect_launcher()
    if not asked.of_ranks and env and env.world_size > 1:
        if env.rank:
            return ConfigError.exit_code  # one line is enough
        raise ConfigError(
            f"{asked.name}: this is one of {env.world_size} ranks, but one process does it; leave torchrun or srun out"
        )
    return asked.run([*words, *debug])


def _refuse_flags(asked: Command, words: list[str]) -> None:
    """Refuse a word with a dash before that is neither a flag nor one of the command's switches."""
    from effloop.config.overrides import FLAGS

    options = options_of(asked.options)
    usages, names = [option.usage for option in options], [option.name for option in options]
    for word in words:
        if word.startswith("-") and word.partition("=")[0] not in FLAGS and word not in usages:
            from effloop.config.messages import keys_of, unknown_flag  # not for a run that is in order

            raise ConfigError(unknown_flag(word, [*names, *registry.groups, *keys_of()] if asked.overrides else names))


def _without_plugins(args: list[str]) -> list[str]:
    """The arguments but `plugins=[FILE,...]`, whose files are used: a config, maybe of others, has no such key."""
    typed = [word for word in args if word.startswith("plugins=")]
    names = [name.strip(" '\"") for word in typed for name in word.removeprefix("plugins=").strip("[]").split(",")]
    if typed:
        registry.use_plugin_files([name for name in names if name])
    return [word for word in args if word not in typed]

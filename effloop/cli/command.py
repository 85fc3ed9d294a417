"""The table of commands, in which each registers itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from effloop.cli.options import parse
from effloop.config import Config, messages, typed
from effloop.config.hydra_setup import EXPERIMENT
from effloop.errors import PROGRAM, ConfigError

F = TypeVar("F", bound=Callable[[Any, list[str]], int])

_KEYS = {*(each.name for each in fields(Config)), EXPERIMENT}


@dataclass(frozen=True)
class RunOptions:
    """Options of commands for a run.

    Attributes:
        run: the folder of a run.
    """

    run: Path = field(metadata={"positional": "RUN"})


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        name: how it is called.
        call: carries it out, given its options and the overrides; returns the exit code.
        options: the dataclass of its options.
        overrides: whether it takes overrides of the config.
        of_ranks: whether it may be given to several ranks.
        example: words that it may be called with, for its help.
    """

    name: str
    call: Callable[[Any, list[str]], int]
    options: type
    overrides: bool
    of_ranks: bool
    example: str

    @property
    def about(self) -> str:
        """What it does: a line, and maybe more below it."""
        return (inspect.getdoc(self.call) or "").partition("\n\nRaises:")[0].partition("\n\nReturns:")[0]

    @property
    def summary(self) -> str:
        """What it does, in one line."""
        return self.about.partition("\n")[0]

    def run(self, words: list[str]) -> int:
        """Parse what it was given and carry it out; returns the exit code.

        Raises:
            ConfigError: an option or a word can't be taken.
        """
        words = [word for word in words if word != "--debug" or hasattr(self.options, "debug")]  # the others' is main's
        options: Any
        options, overrides = parse(self.options, self.name, words, _KEYS)
        if overrides and not self.overrides:
            word = overrides[0]
            raise ConfigError(f"{self.name}: '{word}' is not an option; see {PROGRAM} {self.name} --help")
        overrides = typed.with_paths(overrides, sweep=bool({"-m", "--multirun"} & {*overrides}))
        with messages.in_one_line(Config, overrides):
            typed.refuse_contradictions([each for each in overrides if typed.key_of(each) and each[0] != "-"])
        return self.call(options, overrides)


commands: dict[str, Command] = {}
"""By name; filled as the modules of the commands are imported."""


def command(
    name: str, options: type, example: str = "", *, overrides: bool = True, of_ranks: bool = False
) -> Callable[[F], F]:
    """Decorator: the function below does what `effloop NAME` asks for; its docstring is the help."""

    def add(call: F) -> F:
        commands[name] = Command(name, call, options, overrides, of_ranks, f"{name} {example}".rstrip())
        return call

    return add

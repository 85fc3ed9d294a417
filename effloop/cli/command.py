"""Commands: the table in which each registers itself, and their options, which a dataclass describes.

    @dataclass(frozen=True)
    class ShowOptions:
        \"\"\"Which samples are shown.

Attributes:
            split: which split.
            samples: how many, spread evenly over the split.
        \"\"\"

        split: Literal["train", "val"] = "train"
        samples: Annotated[int, range(1, 65)] = 8

A field with the metadata {"positional": NAME} is given without its name; help calls it NAME. If it is a tuple, it takes
all words that are neither options nor overrides.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from effloop.data.remote.location import is_remote
from effloop.errors import PROGRAM, ConfigError
from effloop.registry import either, field_meanings

T = TypeVar("T")
F = TypeVar("F", bound=Callable[[Any, list[str]], int])


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
        """Parse the words and carry the command out; returns the exit code."""
        from effloop.config.compose import checked, root_keys

        words = [word for word in words if word != "--debug" or hasattr(self.options, "debug")]  # the others' is main's
        options: Any
        options, overrides = parse(self.options, self.name, words, root_keys())
        if overrides and not self.overrides:
            raise ConfigError(f"{self.name}: '{overrides[0]}' is not an option; see {PROGRAM} {self.name} --help")
        return self.call(options, checked(overrides))


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


@dataclass(frozen=True)
class RunOptions:
    """Options of commands for a run.

    Attributes:
        run: the folder of a run.
    """

    run: Path = field(metadata={"positional": "RUN"})


@dataclass(frozen=True)
class Kind:
    """What an option takes, from the type of its field.

    bool, int, float, str and Path are what they say. A Literal has the words that are taken; a tuple is given with
    commas between, each value once; of a union the first type that fits is taken, and None can't be given.
    Annotated holds the values that are allowed (a range, the names of a table), or a sentence for the error line.

    Attributes:
        form: what it looks like, e.g. `auto|N`.
        allowed: words and descriptions, e.g. `auto`, `a whole number from 1 to 64`.
        read: makes a value of the text, or raises a ValueError.
        note: what an error adds.
    """

    form: str
    allowed: tuple[str, ...]
    read: Callable[[str], Any]
    note: str = ""

    @classmethod
    def of(cls, hint: Any) -> Kind:
        """That of a type."""
        origin, args = get_origin(hint), get_args(hint)
        if origin is Literal:
            return cls("|".join(args), args, lambda text: args[args.index(text)])
        if origin is tuple:
            one = cls.of(args[0])
            allowed = (*one.allowed, "several, each once, with commas between")
            return cls(f"{one.form}[,...]", allowed, lambda text: _each_once(map(one.read, text.split(","))), one.note)
        if origin in (Union, UnionType):
            kinds = [cls.of(each) for each in args if each is not NoneType]
            allowed = tuple(dict.fromkeys(word for kind in kinds for word in kind.allowed))
            return cls("|".join(kind.form for kind in kinds), allowed, lambda text: _first_that_fits(kinds, text))
        if origin is Annotated:
            one, limit = cls.of(args[0]), args[1]
            if isinstance(limit, str):
                return cls(one.form, one.allowed, one.read, limit)
            if isinstance(limit, range):
                allowed = (f"{one.allowed[0]} from {limit[0]:,} to {limit[-1]:,}",)
                return cls(one.form, allowed, lambda text: limit[limit.index(one.read(text))])
            return cls("NAME", tuple(limit), lambda text: [*limit][[*limit].index(text)])
        return _PLAIN[hint]


def _each_once(values: Any) -> tuple[Any, ...]:
    found = tuple(values)
    if len(set(found)) < len(found):
        raise ValueError
    return found


def _first_that_fits(kinds: Sequence[Kind], text: str) -> Any:
    for kind in kinds:
        with suppress(ValueError):
            return kind.read(text)
    raise ValueError


def _path(text: str) -> Path:
    path = Path(os.path.expanduser(text))
    # A URL would become a folder 's3:'; with a longer name the first look at the path raises an OSError.
    if is_remote(text) or any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        raise ValueError
    return path


_LONGEST_NAME = 255
"""Bytes of a file's name on Linux."""

_PLAIN = {
    str: Kind("TEXT", ("TEXT",), str),
    Path: Kind("PATH", (f"a PATH on this machine, whose names have at most {_LONGEST_NAME} bytes",), _path),
    int: Kind("N", ("a whole number",), int),
    float: Kind("X", ("a number",), float),
    bool: Kind("true|false", ("true", "false"), lambda text: ("false", "true").index(text) == 1),
}


@dataclass(frozen=True)
class Option:
    """A field of a dataclass of options.

    Attributes:
        name: the field's.
        kind: of its values.
        default: MISSING where it has to be given.
        meaning: from the dataclass's docstring.
        positional: what help calls it, if it is given without its name.
        many: whether it takes several words.
    """

    name: str
    kind: Kind
    default: Any
    meaning: str
    positional: str | None
    many: bool

    @property
    def usage(self) -> str:
        """`split=train|val`, `RUN`, `--debug`."""
        if self.positional:
            return f"{self.positional} [{self.positional} ...]" if self.many else self.positional
        return f"--{self.name}" if self.kind is _PLAIN[bool] else f"{self.name}={self.kind.form}"

    def value(self, text: str) -> Any:
        """The value that a text stands for."""
        try:
            return self.kind.read(text)
        except ValueError:
            fixes = [f"set {either(self.kind.allowed)}", *filter(None, [self.kind.note])]
            fixes += [f"did you mean '{word}'?" for word in difflib.get_close_matches(text, self.kind.allowed, n=1)]
            raise ConfigError(f"{self.name}: '{text}' is not allowed; {'; '.join(fixes)}") from None


def options_of(described: type) -> list[Option]:
    """The options that a dataclass describes."""
    hints, meanings = get_type_hints(described, include_extras=True), field_meanings(described)
    return [
        Option(
            name=each.name,
            kind=Kind.of(hints[each.name]),
            default=each.default,
            meaning=meanings.get(each.name, ""),
            positional=each.metadata.get("positional"),
            many=get_origin(hints[each.name]) is tuple,
        )
        for each in fields(described)
    ]


def _is_value(word: str) -> bool:
    """Whether a word is the value of a positional option: no override, unless that is a path, and no flag."""
    deletes = word.startswith("~") and "/" not in word  # ~augment.ops.crop, not ~/photos
    return os.path.exists(word) or not (word.startswith("-") or deletes or "=" in word)


def parse(described: type[T], command: str, words: Sequence[str], keys: Collection[str] = ()) -> tuple[T, list[str]]:
    """The options among `words`, and the other words.

    Args:
        described: a dataclass, whose `__post_init__` may refuse options that contradict each other.
        command: what the options are of, for errors.
        words: `KEY=VALUE`, `--KEY` for a bool, or a positional value.
        keys: those of the config; none of them is a misspelt option.
    """
    options = options_of(described)
    named = {option.name: option for option in options if not option.positional}
    given: dict[str, Any] = {}
    rest = []
    for word in words:
        key, equals, value = word.partition("=")
        if key in named and value:
            read = named[key].value(value)
            if given.setdefault(key, read) != read:
                raise ConfigError(f"{command}: {word} contradicts {key}={given[key]}; drop one of them")
        elif key in named:
            option = named[key]
            example = option.usage if option.default in (MISSING, None, (), "") else f"{key}={option.default}"
            raise ConfigError(f"{command}: '{word}' has no value; set {example} or drop it")
        elif word in [option.usage for option in named.values()]:
            given[word.removeprefix("--")] = True
        elif equals and key.isidentifier() and key not in keys and (close := difflib.get_close_matches(key, named, 1)):
            raise ConfigError(f"{command}: no option '{key}'; have {', '.join(named)}; did you mean '{close[0]}'?")
        else:
            rest.append(word)
    for option in options:
        if option.positional and option.many:
            if values := [word for word in rest if _is_value(word)]:
                given[option.name] = tuple(Path(os.path.expanduser(word)) for word in values)
                rest = [word for word in rest if not _is_value(word)]
        elif option.positional and rest and _is_value(rest[0]):
            given[option.name] = option.value(rest.pop(0))
        if option.default is MISSING and option.name not in given:
            raise ConfigError(f"{command} needs {option.usage}; see {PROGRAM} {command} --help")
    return described(**given), rest

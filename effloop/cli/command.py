"""Commands: the table in which each registers itself, and their options, which a dataclass describes, as `RunOptions`.

A field with the metadata {"positional": NAME} is given without its name; help calls it NAME. If it is a tuple, it takes
all words that are neither options nor overrides. Help has its meaning from the docstring's `Attributes:`.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from effloop.data.remote.location import is_remote
from effloop.errors import PROGRAM, ConfigError
from effloop.registry import either, field_meanings
from effloop.system.files import explained_writing

T = TypeVar("T")
F = TypeVar("F", bound=Callable[[Any, list[str]], int])


@dataclass(frozen=True)
class Command:
    """A command; `call` is given its options and the overrides, and returns the exit code."""

    name: str
    call: Callable[[Any, list[str]], int]
    options: type  # a dataclass
    overrides: bool  # whether it takes them
    of_ranks: bool  # whether it may be given to several ranks
    example: str  # words that it may be called with, for its help

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


commands: dict[str, Command] = {}  # by name; filled as the modules of the commands are imported


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


class Kind(NamedTuple):
    """What an option takes, from the type of its field.

    bool, int, float, str and Path are what they say. A Literal has the words that are taken; a tuple is given with
    commas between, each value once; of a union the first type that fits is taken, and None can't be given.
    Annotated holds the values that are allowed (a range, the names of a table), or a sentence for the error line.
    """

    form: str  # what it looks like, e.g. `auto|N`
    allowed: tuple[str, ...]  # words and descriptions, e.g. `auto`, `a whole number from 1 to 64`
    read: Callable[[str], Any]  # makes a value of the text, or raises a ValueError
    note: str = ""  # what an error adds


def kind_of(hint: Any) -> Kind:
    """That of a type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return Kind("|".join(args), args, lambda text: args[args.index(text)])
    if origin is tuple:
        one = kind_of(args[0])
        allowed = (*one.allowed, "several, each once, with commas between")
        return Kind(f"{one.form}[,...]", allowed, lambda text: _each_once(map(one.read, _parts(text))), one.note)
    if origin in (Union, UnionType):
        kinds = [kind_of(each) for each in args if each is not NoneType]
        allowed = tuple(dict.fromkeys(word for kind in kinds for word in kind.allowed))
        return Kind("|".join(kind.form for kind in kinds), allowed, lambda text: _first_that_fits(kinds, text))
    if origin is Annotated:
        one, limit = kind_of(args[0]), args[1]
        if isinstance(limit, str):
            return one._replace(note=limit)
        if isinstance(limit, range):
            allowed = (f"{one.allowed[0]} from {limit[0]:,} to {limit[-1]:,}",)
            return Kind(one.form, allowed, lambda text: limit[limit.index(one.read(text))])
        return Kind("NAME", tuple(limit), lambda text: [*limit][[*limit].index(text)])
    return _PLAIN.get(hint) or Kind(hint.form, (hint.allowed,), hint.parse)


def _parts(text: str) -> list[str]:
    """`a,b` or `[a, b]`, as overrides have lists, -> a, b."""
    return [part.strip() for part in text.removeprefix("[").removesuffix("]").split(",")]


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


_LONGEST_NAME = 255  # bytes, on Linux
_PLAIN = {
    str: Kind("TEXT", ("TEXT",), str),
    Path: Kind("PATH", (f"a PATH on this machine, whose names have at most {_LONGEST_NAME} bytes",), _path),
    int: Kind("N", ("a whole number",), int),
    float: Kind("X", ("a number",), float),
    bool: Kind("true|false", ("true", "false"), lambda text: ("false", "true").index(text) == 1),
}


class Option(NamedTuple):
    """A field of a dataclass of options."""

    name: str
    kind: Kind
    default: Any  # MISSING where it has to be given
    meaning: str  # from the dataclass's docstring
    positional: str | None  # what help calls it, if it is given without its name
    many: bool  # whether it takes several words

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
    found = []
    for each in fields(described):
        hint, name = hints[each.name], each.metadata.get("positional")
        found.append(
            Option(each.name, kind_of(hint), each.default, meanings.get(each.name, ""), name, get_origin(hint) is tuple)
        )
    return found


def _is_value(word: str) -> bool:
    """Whether a word is the value of a positional option: no override, unless that is a path, and no flag."""
    deletes = word.startswith("~") and "/" not in word  # ~augment.ops.crop, not ~/photos
    return os.path.exists(word) or not (word.startswith("-") or deletes or "=" in word)


def parse(described: type[T], command: str, words: Sequence[str], keys: Collection[str] = ()) -> tuple[T, list[str]]:
    """The options of a dataclass among `words`, and the other words; no key of the config is a misspelt option."""
    options = options_of(described)
    named = {option.name: option for option in options if not option.positional}
    given: dict[str, Any] = {}
    rest = []
    for word in words:
        key, equals, value = word.partition("=")
        if key in named:
            if not value:
                raise ConfigError(f"{command}: '{word}' has no value; set {named[key].usage} or drop it")
            read = named[key].value(value)
            if given.setdefault(key, read) != read:
                raise ConfigError(f"{command}: {word} contradicts {key}={given[key]}; drop one of them")
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


def new_files(out: Path, *endings: str) -> list[Path]:
    """The files NAME.html and NAME.csv of `out=NAME`, `.html` and `.csv` being `endings`: they aren't there, and their
    folder can be written to.

    Raises:
        ConfigError: one of them is there, or can't be written.
    """
    name = out.stem if out.suffix in endings else out.name
    if not name:
        raise ConfigError(
            f"out: '{out}' has no name; set out=NAME, for {' and '.join(f'NAME{end}' for end in endings)}"
        )
    paths = [out.with_name(f"{name}{end}") for end in endings]
    for path in paths:
        if os.path.lexists(path):
            raise ConfigError(f"out: {path} is there already, and nothing is overwritten; remove it or set out=NAME")
    with explained_writing("out", paths[0], "set out=NAME"):
        out.parent.mkdir(parents=True, exist_ok=True)
        NamedTemporaryFile(dir=out.parent, prefix=f".{paths[0].name}.", suffix=".tmp").close()  # as `replacing` does
    return paths

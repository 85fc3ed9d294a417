"""Registries of parts: a name, the dataclass that configures it, and what builds it."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from omegaconf import MISSING

from effloop.errors import ConfigError, EffLoopError, PluginError, reason

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

PLUGIN_GROUP = "effloop.plugins"
_FILES = "EFFLOOP_PLUGINS"  # environment variable with the plugin files of a command, for the processes that it starts

groups: dict[str, Registry[Any]] = {}  # config group -> its registry, filled as the packages of the groups are imported


@dataclass
class PartConfig:
    """What every part's config has: the name it is registered under."""

    name: str = MISSING


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered part."""

    config: type[PartConfig]
    factory: Callable[..., T]
    summary: str


class Modules(Mapping[str, T]):
    """Objects by name; the module that registers one, of `{name: module}`, is imported when the name is looked up.

    More may be registered by modules that are imported anyway. Errors call the objects `what`.
    """

    def __init__(self, what: str, modules: Mapping[str, str]) -> None:
        self.what = what
        self.modules = modules
        self._found: dict[str, T] = {}

    def add(self, name: str, value: T, module: str) -> None:
        """Register an object, which `module` defines; a ValueError where the name is taken."""
        if name in self._found or self.modules.get(name, module) != module:
            raise ValueError(f"{self.what} '{name}' is registered already, by {self[name]!r}")
        self._found[name] = value

    def __getitem__(self, name: str) -> T:
        if name not in self._found and name in self.modules:
            importlib.import_module(self.modules[name])
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._found or name in self.modules

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self.modules, *self._found}))

    def __len__(self) -> int:
        return len({*self.modules, *self._found})


class Registry(Modules[Entry[T]]):
    """The parts of one config group, by name.

    Args:
        group: the config group, e.g. `decode`; `decode=pillow` then chooses the part `pillow`.
        modules: part -> the module that registers it, imported when the part is chosen. Parts of plugins, and of the
            module that has the registry, aren't in it.
        lazy_names: the module that defines `lazy_names`, a function that returns {name: config} of choices that are too
            many, or too slow to list, to be registered one by one; empty if there are none.
    """

    def __init__(self, group: str, modules: Mapping[str, str] | None = None, lazy_names: str = "") -> None:
        if group in groups:
            raise ValueError(f"a registry for the group '{group}' exists already")
        super().__init__(group, modules or {})
        self.group = group
        self._lazy_names = lazy_names
        groups[group] = self

    def register(self, name: str, config: type[PartConfig]) -> Callable[[F], F]:
        """Decorator: the class or function below is built for `group=name`, with a `config` first.

        Raises:
            ValueError: the name is taken.
        """

        def add(factory: F) -> F:
            summary = (inspect.getdoc(factory) or "").partition("\n")[0]
            self.add(name, Entry(config, factory, summary), factory.__module__)
            return factory

        return add

    def names(self) -> list[str]:
        """All parts, sorted; none is imported."""
        return [*self]

    def __getitem__(self, name: str) -> Entry[T]:
        """The part registered as `name`; its module is imported."""
        if name not in self:
            raise ConfigError(f"{self.group}: no choice '{name}'; {choices(name, self.names())}")
        return super().__getitem__(name)

    def named_lazily(self) -> Mapping[str, PartConfig]:
        """{name: config} of the choices that are only listed on demand."""
        if not self._lazy_names:
            return {}
        found: Mapping[str, PartConfig] = importlib.import_module(self._lazy_names).lazy_names()
        return found

    def build(self, config: PartConfig, /, *args: Any, **kwargs: Any) -> T:
        """What `config.name` names, built from its config and what the assembler adds."""
        return self[config.name].factory(config, *args, **kwargs)

    def build_for(self, channels: int, config: PartConfig, /, *args: Any, **kwargs: Any) -> T:
        """As `build`, for images of 1 or 3 channels; what has no parameter `channels` takes 3.

        Raises:
            ConfigError: there is 1, and the part takes 3.
        """
        if channels == 3:
            return self.build(config, *args, **kwargs)
        if "channels" not in inspect.signature(self[config.name].factory).parameters:
            raise ConfigError(
                f"data.channels: {channels}, but {self.group}={config.name} takes 3 only; choose another {self.group}, "
                "or set data.channels=3"
            )
        return self.build(config, *args, channels=channels, **kwargs)


_LISTED = 16


def choices(got: str, allowed: Iterable[str]) -> str:
    """`have a, b, c; did you mean 'b'?` for an error line; long lists are cut."""
    names = list(allowed)
    close = difflib.get_close_matches(got, names, n=1)
    have = ", ".join(names[:_LISTED]) + (f", … ({len(names)} in all)" if len(names) > _LISTED else "")
    return f"have {have}" + (f"; did you mean '{close[0]}'?" if close else "")


def use_plugin_files(names: Sequence[str]) -> None:
    """Have `load_plugins` import some Python files, here and in all processes that are started from here.

    Their folders come last on the path, so that worker processes can import what they are sent.
    """
    paths = [Path(name).expanduser().absolute() for name in names]
    for name, path in zip(names, paths, strict=True):
        if path.suffix != ".py" or not path.is_file():
            raise ConfigError(f"plugins: '{name}' is not a Python file that is there; name one, e.g. plugins=[mine.py]")
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        found = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
        if found is None or not found.has_location or not found.origin or not path.samefile(found.origin):
            raise ConfigError(
                f"plugins: '{name}' can't be imported as '{path.stem}', which is another module; rename it"
            )
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # a launcher's process unpickles before it imports
    folders = dict.fromkeys([*filter(None, known), *(str(path.parent) for path in paths)])
    os.environ |= {_FILES: os.pathsep.join(map(str, paths)), "PYTHONPATH": os.pathsep.join(folders)}


def plugin_files() -> list[Path]:
    """The files that `use_plugin_files` was given, here or in the process that has started this one."""
    return [Path(name) for name in os.environ.get(_FILES, "").split(os.pathsep) if name]


def either(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def field_meanings(kind: type) -> dict[str, str]:
    """{name: meaning} of a dataclass's fields, from the section Attributes of its docstring and its bases'."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        doc = inspect.cleandoc(vars(each).get("__doc__") or "")
        section = re.search(r"^Attributes:\n((?: .*\n?|\n)+)", doc, re.MULTILINE)
        text = section[1] if section else ""
        entries = re.findall(r"^    (\w[\w, ]*): ((?:.*\n?)(?:      .*\n?)*)", text, re.MULTILINE)
        found |= {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
    return found


def plugin_words() -> list[str]:
    """What has to be typed with another command for it to use the same plugin files."""
    return [f"plugins=[{','.join(map(os.path.relpath, plugin_files()))}]"] if plugin_files() else []


def load_plugins() -> list[str]:
    """Import the plugin files, and every package that declares the entry point `effloop.plugins`: they register parts.
    Returns the packages' import names, in order.
    """
    for path in plugin_files():
        with _importing(f"plugins: {path.name}", "fix it"):
            importlib.import_module(path.stem)
    modules = []
    for point in _plugin_points(tuple(sys.path)):
        with _importing(f"plugin '{point.name}' ({point.value})", "fix or uninstall it"):
            point.load()
        modules.append(point.module)
    return modules


@functools.cache
def _plugin_points(path: tuple[str, ...]) -> list[EntryPoint]:
    """What is declared by the packages on `sys.path`: each look reads all packages' metadata, in 20 ms."""
    return sorted(entry_points(group=PLUGIN_GROUP), key=lambda point: point.name)


@contextmanager
def _importing(what: str, fix: str) -> Iterator[None]:
    try:
        yield
    except EffLoopError as error:
        raise ConfigError(f"{what}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{what} does not import: {type(error).__name__}: {error}; {fix}") from error


def explained(error: BaseException) -> EffLoopError | None:
    """The failure that an exception is: itself, or one of a plugin's, or of a file's beside one; None for a bug."""
    if isinstance(error, EffLoopError):
        return error
    packages = {point.module.partition(".")[0] for point in _plugin_points(tuple(sys.path))}
    folders = {os.path.realpath(path.parent) for path in plugin_files()}
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        top, file = frame.f_globals.get("__name__", "").partition(".")[0], os.path.realpath(frame.f_code.co_filename)
        beside = any(file.startswith(os.path.join(folder, top)) for folder in folders)
        if top not in ("", "effloop") and (top in packages or beside):
            place = f"{os.path.relpath(file)}:{line}, in {frame.f_code.co_name}"
            what = f"{type(error).__name__}: {reason(error)[:200]}"
            found = PluginError(f"plugin: {what} ({place}); its traceback is above")
            found.__cause__ = error
            return found
    return None


def line_of(error: EffLoopError) -> str:
    """The line of a failure; where an exception of a plugin's is its cause, that one's traceback is printed before."""
    cause = error.__cause__
    if isinstance(error, PluginError) or (cause and isinstance(explained(cause), PluginError)):
        traceback.print_exception(cause)
    return str(error)

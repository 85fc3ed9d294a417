"""Registries of parts: a name, the dataclass that configures it, and what builds it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from omegaconf import MISSING

from effloop.errors import ConfigError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

Names = TypeVar("Names", bound=Callable[[], Mapping[str, "PartConfig"]])

PLUGIN_GROUP = "effloop.plugins"

groups: dict[str, Registry[Any]] = {}
"""Config group -> its registry, filled as the packages of the parts are imported."""


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


class Registry(Generic[T]):
    """The parts of one config group, by name.

    Args:
        group: the config group, e.g. `decode`; `decode=pillow` then chooses the part `pillow`.
    """

    def __init__(self, group: str) -> None:
        if group in groups:
            raise ValueError(f"a registry for the group '{group}' exists already")
        self.group = group
        self._entries: dict[str, Entry[T]] = {}
        self._lazy_names: Callable[[], Mapping[str, PartConfig]] = dict
        groups[group] = self

    def register(self, name: str, config: type[PartConfig]) -> Callable[[F], F]:
        """Decorator: the class or function below is built for `group=name`, with a `config` first.

        Raises:
            ValueError: the name is taken.
        """

        def add(factory: F) -> F:
            if name in self._entries:
                raise ValueError(f"{self.group} '{name}' is registered already, by {self._entries[name].factory!r}")
            summary = (inspect.getdoc(factory) or "").partition("\n")[0]
            self._entries[name] = Entry(config, factory, summary)
            return factory

        return add

    def names(self) -> list[str]:
        """What is registered, sorted."""
        return sorted(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Entry[T]:
        """The part registered as `name`.

        Raises:
            ConfigError: no such part.
        """
        if name not in self._entries:
            raise ConfigError(f"{self.group}: no choice '{name}'; {choices(name, self.names())}")
        return self._entries[name]

    def lazy_names(self, names: Names) -> Names:
        """Decorator: the function below returns {name: config} of choices that are too many, or too slow to list, to
        register one by one; it is called only when a name isn't found otherwise.
        """
        self._lazy_names = names
        return names

    def named_lazily(self) -> Mapping[str, PartConfig]:
        """{name: config} of the choices that are only listed on demand."""
        return self._lazy_names()

    def build(self, config: PartConfig, /, *args: Any, **kwargs: Any) -> T:
        """What `config.name` names, built from its config and what the assembler adds."""
        return self[config.name].factory(config, *args, **kwargs)


def choices(got: str, allowed: Iterable[str]) -> str:
    """`have a, b, c; did you mean 'b'?` for an error line; long lists are cut."""
    names = list(allowed)
    close = difflib.get_close_matches(got, names, n=1)
    have = ", ".join(names[:12]) + (f", … ({len(names)} in all)" if len(names) > 12 else "")
    return f"have {have}" + (f"; did you mean '{close[0]}'?" if close else "")


def load_plugins() -> list[str]:
    """Import every package that declares the entry point `effloop.plugins`, so that it registers.

    Returns:
        The modules' import names, in order.

    Raises:
        ConfigError: a plugin doesn't import; the line names it.
    """
    modules = []
    for point in sorted(entry_points(group=PLUGIN_GROUP), key=lambda point: point.name):
        try:
            point.load()
        except Exception as error:
            raise ConfigError(
                f"plugin '{point.name}' ({point.value}) does not import: {type(error).__name__}: {error}; "
                "fix or uninstall it"
            ) from error
        modules.append(point.module)
    return modules

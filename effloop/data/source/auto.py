"""The source whose format `data.root` is in."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from effloop.data.source.base import DataConfig, Source, sources
from effloop.data.source.root import expand_root
from effloop.errors import ConfigError, DataError


@dataclass
class AutoConfig(DataConfig):
    """Fields of `data=auto`; an unset `root` means the embedded photographs."""

    root: str | None = None


@sources.register("auto", AutoConfig)
def open_source(config: AutoConfig, split: str) -> Source:
    """Whatever format `data.root` has; the embedded photographs if it is unset."""
    name = "embedded" if config.root is None else _format_of(config)
    shared = {field.name: getattr(config, field.name) for field in fields(DataConfig)}
    return sources.build(sources[name].config(**{**shared, "name": name}), split)


def _format_of(config: AutoConfig) -> str:
    root = expand_root(config)
    if name := format_of(root):
        return name
    formats = ", ".join(name for name in sources.names() if name not in ("auto", "embedded"))
    raise ConfigError(f"data.root: '{config.root}' is in no format that EffLoop knows; have {formats}: set data=FORMAT")


def format_of(root: Path) -> str | None:
    """The name of the source that a path looks like a dataset of; any folder that no other claims is a `folder`.

    Raises:
        DataError: it can't be read.
    """
    for name in sorted(sources.names(), key=lambda name: name == "folder"):  # last: it claims any folder
        factory = sources[name].factory
        try:
            if isinstance(factory, type) and issubclass(factory, Source) and factory.claims(root):
                return name
        except OSError as error:
            raise DataError(f"{error.filename or root} can't be read: {error.strerror}") from None
    return None

"""What commands are given."""

from __future__ import annotations

from pathlib import Path

from effloop.errors import ConfigError


def run_and_overrides(command: str, args: list[str]) -> tuple[Path, list[str]]:
    """The run that a command is given first, and the rest.

    Raises:
        ConfigError: there is none.
    """
    if not args or "=" in args[0] or args[0].startswith("-"):
        raise ConfigError(f"{command} needs a run: python -m effloop {command} RUN [OVERRIDE ...]")
    return Path(args[0]), args[1:]

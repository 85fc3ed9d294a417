"""Misspelt keys and flags, refused before torch is imported, which takes seconds."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from effloop.cli.options import refuse_misspelt
from effloop.cli.spelling import refuse_other_styles
from effloop.errors import ConfigError
from effloop.registry import PLUGIN_GROUP, plugin_files
from effloop.spelling import flags
from effloop.spelling.known import Known
from effloop.spelling.suggestions import unknown_key

_EXPERIMENT = "experiment"
_OF_RANKS = ("RANK", "WORLD_SIZE", "SLURM_STEP_ID")
_KEY = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)*")


def refuse_early(command: str, words: Sequence[str]) -> None:
    """Refuse what is misspelt for certain, by the line that the command itself would have; pass on all the rest.

    Args:
        command: its name.
        words: what it is given.

    Raises:
        ConfigError: a key, a flag or an option isn't there.
    """
    if any(name in os.environ for name in _OF_RANKS) or any(word.startswith(("--config-dir", "-cd")) for word in words):
        return
    if plugin_files() or Path("configs").exists() or any(entry_points(group=PLUGIN_GROUP)):
        return  # of which only composing knows the keys
    known = Known.read()
    if command not in known.options:
        return
    options, switches = known.options[command], known.switches[command]
    refuse_other_styles(words, switches, lambda: [*options, *known.groups, *known.keys])
    roots = {*(key.partition(".")[0] for key in known.keys), *known.groups, _EXPERIMENT}
    words = [word for word in words if word not in switches and word.partition("=")[0] not in options]
    for word in words:
        refuse_misspelt(command, word, options, roots)
    if command == "train":
        flags.parse([*words])
    _refuse_keys(words, known)


def _refuse_keys(words: Sequence[str], known: Known) -> None:
    """Check the keys of overrides.

    Raises:
        ConfigError: there is no such key.
    """
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals or not _KEY.fullmatch(key) or _may_be(key, known) or not _is_plain(word, words):
            continue
        first = _unknown_part(key, known)
        lines = {unknown_key(first, known.keys, known.groups, chosen) for chosen in _chosen(words, known)}
        if len(lines) == 1:
            raise ConfigError(lines.pop())


def _chosen(words: Sequence[str], known: Known) -> list[dict[str, str]]:
    """{group: part} as overrides choose; several where a name may be of any part, none where nothing is known."""
    typed = {group: name for group, equals, name in (word.partition("=") for word in words) if equals}
    chosen, own, lazy = {**known.chosen}, dict[str, str](), [""]
    for group in (_EXPERIMENT, *known.groups):
        if group not in typed:
            continue
        changes = known.choices[group].get(typed[group])
        if changes is None and group != known.lazy:
            return []
        if changes is None:
            lazy = sorted({known.chosen[group], *(each[group] for each in known.choices[group].values() if each)})
            continue
        chosen |= changes
        own[group] = changes.get(group, known.chosen.get(group, ""))
    own.pop(_EXPERIMENT, None)
    found = [chosen | own | ({known.lazy: part} if part else {}) for part in lazy]
    return [{group: part for group, part in each.items() if part} for each in found]


def _unknown_part(key: str, known: Known) -> str:
    """The beginning of an unknown key up to the first word that isn't there, at which Hydra stops."""
    words = key.split(".")
    starts = [".".join(words[: count + 1]) for count in range(len(words))]
    return next(start for start in starts if not any(f"{each}.".startswith(f"{start}.") for each in known.keys))


def _may_be(key: str, known: Known) -> bool:
    """Whether a key may be one: of any part, what holds keys, or below a key, whose value may be a dictionary."""
    first, *rest = key.split(".")
    if first in ("hydra", _EXPERIMENT) or rest == ["name"] or key in known.groups:
        return True
    return any(f"{each}.".startswith(f"{key}.") or f"{key}.".startswith(f"{each}.") for each in known.keys)


def _is_plain(word: str, words: Sequence[str]) -> bool:
    """Whether Hydra can read an override: without -m of a single value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return flags.is_sweep(words) or not parsed.is_sweep_override()

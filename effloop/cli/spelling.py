"""Words typed as other command lines want them: `--batch-size 64`, `lr = 0.1`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from effloop.cli.options import Option
from effloop.config import Config, hydra_app
from effloop.config.keys import keys_of
from effloop.config.suggestions import meant
from effloop.errors import ConfigError
from effloop.registry import groups


def refuse_other_styles(words: Sequence[str], options: Collection[Option], *, overrides: bool) -> None:
    """Check that keys have no dashes before, and `=` no blanks around.

    Args:
        words: of the command line.
        options: of the command.
        overrides: whether the command takes keys of the config, too.

    Raises:
        ConfigError: a word is spelled in another style; the line has the right spelling.
    """
    switches = {option.usage for option in options}  # --NAME of a bool among them
    for number, word in enumerate(words):
        before, after = words[number - 1] if number else "", words[number + 1] if number + 1 < len(words) else ""
        if word == "=" or (word.startswith("=") and before and "=" not in before):
            value = after if word == "=" else word[1:]
            raise ConfigError(f"'{word}': there are no blanks around =; write {before}={value}")
        if word.endswith("=") and after and "=" not in after and not after.startswith("-"):
            raise ConfigError(f"'{word} {after}': there are no blanks around =; write {word}{after}")
        flag, _, value = word.partition("=")
        if not flag.startswith("-") or hydra_app.is_flag(flag) or word in switches:
            continue
        name = flag.lstrip("-").replace("-", "_")
        known = [*(option.name for option in options), *([*groups, *keys_of(Config)] if overrides else ())]
        key = name if name in known else meant(name, known)
        if key:
            value = value or (after if after and "=" not in after and after[0] != "-" else "VALUE")
            typed = key if "=" in key else f"{key}={value}"
            raise ConfigError(f"'{word}' is not a flag; keys have no dashes before: write {typed}")

"""Words typed as other command lines want them: `--batch-size 64`, `lr = 0.1`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from effloop.errors import ConfigError
from effloop.spelling.flags import is_flag
from effloop.spelling.suggestions import meant


def refuse_other_styles(words: Sequence[str], switches: Collection[str], known: Callable[[], Collection[str]]) -> None:
    """Check that keys have no dashes before, and `=` no blanks around.

    Args:
        words: of the command line.
        switches: the command's options without a value, `--NAME`.
        known: gives the names of its options and, if it takes them, the keys of the config.

    Raises:
        ConfigError: a word is spelled in another style; the line has the right spelling.
    """
    for number, word in enumerate(words):
        before, after = words[number - 1] if number else "", words[number + 1] if number + 1 < len(words) else ""
        if word == "=" or (word.startswith("=") and before and "=" not in before):
            value = after if word == "=" else word[1:]
            raise ConfigError(f"'{word}': there are no blanks around =; write {before}={value}")
        if word.endswith("=") and after and "=" not in after and not after.startswith("-"):
            raise ConfigError(f"'{word} {after}': there are no blanks around =; write {word}{after}")
        flag, _, value = word.partition("=")
        if not flag.startswith("-") or is_flag(flag) or word in switches:
            continue
        name, names = flag.lstrip("-").replace("-", "_"), known()
        key = name if name in names else meant(name, names)
        if key:
            value = value or (after if after and "=" not in after and after[0] != "-" else "VALUE")
            typed = key if "=" in key else f"{key}={value}"
            raise ConfigError(f"'{word}' is not a flag; keys have no dashes before: write {typed}")

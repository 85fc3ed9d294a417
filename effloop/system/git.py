"""Asking git about a checkout that anybody may have written, whose configuration names programs for git to run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_TIMEOUT_S = 10
_OFF = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.pager": "cat",
    "core.sshCommand": "false",
    "diff.external": "",
    "diff.ignoreSubmodules": "dirty",  # else git asks each for its state, by that one's configuration
    "protocol.allow": "never",
    "safe.bareRepository": "explicit",
}
"""Settings that take precedence over a checkout's own."""
_KEPT = ("GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM", "GIT_EXEC_PATH")
"""Variables of git's that the caller may set; others would add settings, or another repository."""


class Git:
    """Runs git in a folder: no program that a checkout's or the user's configuration names, no network, no writing.

    Args:
        folder: anywhere in a checkout.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._settings = folder, [*_OFF.items()]

    def __call__(self, *words: str) -> bytes:
        """What `git WORDS` prints.

        Raises:
            OSError: there is no git.
            subprocess.SubprocessError: it fails, or takes more than 10 seconds.
        """
        return _output(["git", "-C", str(self._folder), "--no-pager", *words], _environment(self._settings))

    def shut_off(self) -> None:
        """Learn which further settings name programs, and turn those off.

        Raises:
            OSError, subprocess.SubprocessError: as of a call.
        """
        command = ["git", "config", "--get-all", "-z", "safe.directory"]  # the user's, not the checkout's
        trusted = _words(_output(command, {**_plain(), "GIT_DIR": os.devnull}, allowed=(0, 1)))
        self._settings += [("safe.directory", place) for place in trusted]
        names = _words(self("config", "--list", "--name-only", "-z"))
        filters = {name.rpartition(".")[0] for name in names if name.startswith("filter.")}
        for each in sorted(filters):  # they run where a file is compared
            self._settings += [(f"{each}.{key}", "") for key in ("clean", "smudge", "process")]
            self._settings.append((f"{each}.required", "false"))


def _words(output: bytes) -> list[str]:
    return output.decode(errors="surrogateescape").split("\0")[:-1]


def _plain() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in _KEPT}


def _environment(settings: list[tuple[str, str]]) -> dict[str, str]:
    numbered = {f"GIT_CONFIG_KEY_{number}": key for number, (key, _) in enumerate(settings)}
    numbered |= {f"GIT_CONFIG_VALUE_{number}": value for number, (_, value) in enumerate(settings)}
    return {
        **_plain(),
        **numbered,
        "GIT_CONFIG_COUNT": str(len(settings)),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",  # don't write to the repository
        "GIT_TERMINAL_PROMPT": "0",
    }


def _output(command: list[str], variables: dict[str, str], allowed: tuple[int, ...] = (0,)) -> bytes:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, env=variables, check=False
    )
    if done.returncode not in allowed:
        raise subprocess.CalledProcessError(done.returncode, command)
    return done.stdout

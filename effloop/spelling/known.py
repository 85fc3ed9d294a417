"""The keys, parts and commands of EffLoop as a file has them, which `docs/keys.py` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("known.json")


@dataclass(frozen=True)
class Known:
    """What can be typed where there are no plugins and no configs of the user's.

    Attributes:
        keys: key -> the parts of its group that have it.
        groups: the config groups.
        lazy: the one whose parts have names by which they aren't registered, such as all models of torchvision.
        chosen: group -> the part that is chosen by default; without those where none is.
        choices: group, or experiment -> name of a part, preset or experiment -> what of `chosen` it changes.
        options: command that composes the config -> its options.
        switches: the same for options without a value, `--NAME`.
    """

    keys: Mapping[str, Sequence[str]]
    groups: Sequence[str]
    lazy: str
    chosen: Mapping[str, str]
    choices: Mapping[str, Mapping[str, Mapping[str, str]]]
    options: Mapping[str, Sequence[str]]
    switches: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls) -> Known:
        """From the file."""
        return cls(**json.loads(FILE.read_text("utf-8")))

    def text(self) -> str:
        """The file's text: a line for each key, choice and command."""
        tables = [f"{json.dumps(name)}: {_text(value)}" for name, value in asdict(self).items()]
        return "{\n" + ",\n".join(tables) + "\n}\n"


def _text(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()) + "\n}"

"""Writes keys.md, every key of the config, from the dataclasses and YAML files.

`python docs/keys.py`.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from effloop.cli.help import choices_of
from effloop.config.messages import keys_of

HEAD = """# Keys

```sh
effloop list optim.lr
```

Every key, what it takes and its default, by config group. Where the parts of a group have different defaults, they are
named. This page is written by `docs/keys.py`.
"""


def page() -> str:
    """The page's text."""
    choices_of("data")  # registers the parts
    lines = [HEAD]
    for group, keys in groupby(keys_of().values(), lambda key: key.name.rpartition(".")[0]):
        lines += [f"## {group or 'Root'}", "", "| key | takes | |", "| --- | --- | --- |"]
        for key in keys:
            only = f"; only {key.owners}" if key.owners else ""
            lines.append(f"| `{key.name}` | {key.allowed}, default {key.default} | {key.meaning.rstrip('.')}{only} |")
        lines.append("")
    return "\n".join(lines).replace("*", "\\*")


if __name__ == "__main__":
    Path(__file__).with_name("keys.md").write_text(page(), "utf-8")

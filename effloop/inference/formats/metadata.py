"""Metadata as text: JSON of one layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from effloop.errors import CheckpointError

VERSION = 1
"""Of the layout."""


def write(metadata: Mapping[str, Any]) -> str:
    """Metadata as text."""
    return json.dumps(metadata, ensure_ascii=False)


def read(text: str | None, path: Path) -> dict[str, Any]:
    """Metadata of a file.

    Raises:
        CheckpointError: it has none, or some of another version.
    """
    try:
        found = json.loads(text or "null")
        version = found["version"]
        complete = {"config", "classes", "num_outputs", "provenance", "input"} <= set(found)
    except (ValueError, TypeError, LookupError):
        raise CheckpointError(f"{path} has no metadata of EffLoop's; name a file by effloop export") from None
    if version != VERSION or not complete:
        raise CheckpointError(
            f"{path} has metadata of version {version}, this EffLoop reads {VERSION}; export it again"
        )
    return dict(found)

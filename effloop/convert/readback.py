"""Opens what was written as training will open it, before it is published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from effloop.data.source import Kind, sources
from effloop.data.source.storage.targets import Targets
from effloop.errors import DataError

READ_BY = {"zarr2": "zarr", "n5": "zarr"}
"""`convert to=NAME` -> `data=NAME`, where they differ."""


def read_by(to: str, targets: Targets) -> str:
    """`convert to=NAME` -> `data=NAME`, for such targets."""
    if to == "folder" and targets:
        return "masks" if targets.kind is Kind.masks else "csv"
    return READ_BY.get(to, to)


def compare(to: str, path: Path, split: str, wanted: Mapping[str, Any], scans: Path, targets: Targets) -> None:
    """Open one split of what was written and compare its fingerprint with that of the records that went in.

    A folder is compared by its counts alone: keys that can't be paths have become numbers there.

    Args:
        to: the format, one of `writers`. A format that no source reads is not compared.
        path: what was written.
        split: its name.
        wanted: `samples`, `bytes`, `sha256`.
        scans: a folder for the indexes of formats that have none inside.
        targets: what the split's are.

    Raises:
        DataError: it can't be opened, or they differ.
    """
    name = read_by(to, targets)
    if name not in sources:
        return
    of = sources[name].config
    options = {"root": str(path)}
    if "index_dir" in {field.name for field in fields(of)}:
        options["index_dir"] = str(scans)
    try:
        source = sources.build(of(name=name, **options), split)
    except DataError as error:
        raise DataError(f"out: what was written can't be opened: {error}") from error
    found = source.fingerprint()
    if Targets.of(source) != targets:
        raise DataError(f"out: what was written as {to} reads back with other targets, split '{split}'; convert again")
    compared = ("samples", "bytes") if to == "folder" else ("samples", "bytes", "sha256")
    differ = [key for key in compared if found[key] != wanted[key]]
    if differ:
        said = "; ".join(f"{key} {found[key]}, should be {wanted[key]}" for key in differ)
        raise DataError(f"out: what was written as {to} reads back differently, split '{split}': {said}; convert again")

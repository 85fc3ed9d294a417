"""Parquet files of images as Hugging Face's `datasets` writes them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PLAIN = {"compression": "none", "use_dictionary": False, "write_page_index": True}
"""As `datasets` 4.6 and later write images."""
SNAPPY = {"compression": "snappy"}  # as before, and on the hub's `refs/convert/parquet`: the dictionary is tried, too


def class_label(*names: str) -> dict[str, Any]:
    """The feature of a column of classes."""
    return {"names": list(names), "_type": "ClassLabel"}


def write_images(
    path: Path,
    images: Sequence[bytes | None],
    labels: Sequence[Any] | None = None,
    *,
    names: Sequence[str | None] | None = None,
    feature: Any = None,
    column: str = "label",
    plain: bool = False,
    masks: Sequence[bytes] | None = None,
    rows: int = 3,
    **options: Any,
) -> Path:
    """One file; with row groups of a few rows."""
    arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    kind = arrow.binary() if plain else arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    paths = names or [None] * len(images)

    def stored(data: Sequence[bytes | None]) -> list[Any]:
        return [*data] if plain else [{"bytes": each, "path": name} for each, name in zip(data, paths, strict=True)]

    columns, features = {"image": arrow.array(stored(images), kind)}, {"image": {"_type": "Image"}}
    if labels is not None:
        columns[column] = labels if isinstance(labels, arrow.Array) else arrow.array(labels)
        features |= {column: feature} if feature else {}
    if masks is not None:
        columns["mask"] = arrow.array(stored(masks), kind)
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if feature else {}
    table = arrow.table(columns).replace_schema_metadata(metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=rows, **(options or PLAIN))
    return path

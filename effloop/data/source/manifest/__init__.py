"""Datasets that a table describes, with a row for each image."""

from effloop.data.source.manifest import source  # noqa: F401  (it registers)

"""Parquet files of encoded images."""

from effloop.data.source.formats.parquet import source, writer  # noqa: F401  (they register)

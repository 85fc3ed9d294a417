"""Parquet files of encoded images."""

"""Datasets that a table describes, with a row for each image."""

"""Runs beside each other: a table, plots, a page."""

"""Measuring: what costs what, in ratios, alternating in one run."""

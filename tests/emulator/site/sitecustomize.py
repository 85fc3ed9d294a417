"""Imported when a Python process starts that has this folder on its path: see `emulator.environment`."""

from emulator import kernels

kernels.install()

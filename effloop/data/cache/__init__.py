"""Samples kept in memory."""

from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108  memory

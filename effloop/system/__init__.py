"""The machine and its processes."""

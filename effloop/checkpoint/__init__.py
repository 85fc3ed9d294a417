"""What a run can go on from."""

from effloop.checkpoint import files, rng
from effloop.checkpoint.keeper import CheckpointConfig, Checkpoints, keepers

__all__ = ["CheckpointConfig", "Checkpoints", "files", "keepers", "rng"]

"""What a run can continue from."""

from effloop.checkpoint import files, rng
from effloop.checkpoint.checkpointer import CheckpointConfig, Checkpoints, checkpointers

__all__ = ["CheckpointConfig", "Checkpoints", "checkpointers", "files", "rng"]

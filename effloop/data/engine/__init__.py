"""Who fills the batches: the loop's thread, other threads, other processes."""

from effloop.data.engine import inline, processes, threads
from effloop.data.engine.base import Engine, EngineConfig, engines

__all__ = ["Engine", "EngineConfig", "engines", "inline", "processes", "threads"]

"""Engines that fill batches: the loop's thread, other threads, other processes, DALI."""

from effloop.data.engine.base import Engine, EngineConfig, engines

__all__ = ["Engine", "EngineConfig", "engines"]

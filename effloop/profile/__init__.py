"""Profilers: some updates of a run, looked at closely."""

from effloop.profile.base import ProfileConfig, Profiler, profilers

__all__ = ["ProfileConfig", "Profiler", "profilers"]

"""Profilers: some updates of a run, looked at closely."""

from effloop.profile import cprofile, nvtx, operators
from effloop.profile.base import ProfileConfig, Profiler, profilers

__all__ = ["ProfileConfig", "Profiler", "cprofile", "nvtx", "operators", "profilers"]

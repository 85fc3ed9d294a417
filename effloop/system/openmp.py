"""How long OpenMP's threads spin while they wait for each other.

libgomp, which torch computes with on Linux, reads it from the environment when torch is imported, and never again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SPINS = 1000
"""A thread tests so often whether it may continue before it sleeps: 27 µs on an AMD EPYC of 2025, 27 ns each.

An update of `model=cnn` at batch 32 has 176 parallel regions, and 58 % of the gaps between them are shorter: their
threads stay awake. libgomp's own 300,000 are 8 ms, longer than the scheduler's time slices: where another process has
the core of the thread that is waited for, the waiting one keeps that thread from running on its own core.
"""
_SPIN_COUNT, _WAIT_POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


def with_limit(env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a process to be started: with the limit, unless they have a user's choice."""
    return {**env} if _SPIN_COUNT in env or _WAIT_POLICY in env else {**env, _SPIN_COUNT: str(SPINS)}


def limit_spinning() -> None:
    """Limit it in processes to be started, and in this one if torch isn't imported yet."""
    os.environ.update(with_limit(os.environ))


@contextmanager
def without_limit() -> Iterator[None]:
    """Processes started inside spin as torch has them by default: what EffLoop is compared with."""
    ours = os.environ.get(_SPIN_COUNT) == str(SPINS)
    if ours:
        del os.environ[_SPIN_COUNT]
    try:
        yield
    finally:
        if ours:
            os.environ[_SPIN_COUNT] = str(SPINS)

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
_OURS = "EFFLOOP_SPINCOUNT"  # the count that is ours, which a user may have chosen, too; processes inherit both
_LIMIT = {_SPIN_COUNT: str(SPINS), _OURS: str(SPINS)}


def limit_spinning() -> None:
    """Limit it, unless the user has chosen, in processes to be started, and in this one if torch isn't imported yet."""
    if _SPIN_COUNT not in os.environ and _WAIT_POLICY not in os.environ:
        os.environ.update(_LIMIT)


def with_limit(env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a process to be started: with our limit, unless they have another choice.

    Args:
        env: its variables. A wait policy set since our limit was is the user's choice, which the count would overrule.
    """
    if _WAIT_POLICY in env:
        return {name: value for name, value in env.items() if not (_is_ours(env) and name in _LIMIT)}
    return {**env} if _SPIN_COUNT in env else {**env, **_LIMIT}


@contextmanager
def without_limit() -> Iterator[None]:
    """Processes started inside spin as torch has them by default: what EffLoop is compared with."""
    ours = _is_ours(os.environ)
    if ours:
        for name in _LIMIT:
            del os.environ[name]
    try:
        yield
    finally:
        if ours:
            os.environ.update(_LIMIT)


def _is_ours(env: Mapping[str, str]) -> bool:
    return _SPIN_COUNT in env and env.get(_OURS) == env[_SPIN_COUNT]

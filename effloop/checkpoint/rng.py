"""The state of every random generator of a process, as plain numbers and tensors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from effloop.lazy import torch
from effloop.system import gpu


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, on every device."""
    import rich.style  # noqa: F401  which draws from Python's generator when it is imported

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  the global one is what others draw from
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """The states of all generators; only types that `weights_only` loading allows."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": gpu.rng_states(),
    }


def restore(state: dict[str, Any]) -> None:
    """Set all generators to what `capture` saw."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    gpu.set_rng_states(state["cuda"])

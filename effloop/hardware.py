"""What this process may use of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from effloop.errors import ConfigError


def available_cores() -> int:
    """Cores this process may use: its affinity, cut by a container's CPU quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2 here: no quota to heed
    return cores


def find_device(name: str) -> torch.device:
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N` as a device that is there.

    Raises:
        ConfigError: not such a name, or no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: '{name}' is not a device; set auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: '{name}' is not supported; set auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"device: '{name}' is not there, this machine shows {count} CUDA devices; set device=cpu")
    return device

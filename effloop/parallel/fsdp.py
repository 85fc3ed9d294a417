"""FSDP: ranks that share weights, gradients and optimizer state, for models that don't fit one device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from effloop.errors import ConfigError
from effloop.lazy import torch
from effloop.parallel.base import Parallel, parallels
from effloop.parallel.ddp import DdpConfig

_WHOLE = re.compile(r"muon|kron|adamp|sgdp|mars|novograd|adafactor|rprop|lookahead|bnb|fused", re.IGNORECASE)
"""Optimizers that need whole parameters; the others of torch and timm are the same on split ones."""


@dataclass
class FsdpConfig(DdpConfig):
    """Fields of `parallel=fsdp`: those of ddp."""

    def check(self, config: Any) -> None:
        name = getattr(config.optim, "arch", config.optim.name)
        for key, refused, fix in (
            ("compile", config.compile, "compile=false"),
            ("max_grad_ratio", config.max_grad_ratio, "max_grad_norm instead"),
            ("optim", _WHOLE.search(name) and name, "optim=adamw, or another that updates each weight by itself"),
        ):
            if refused:
                got = str(refused).lower() if refused is True else refused
                raise ConfigError(
                    f"{key}: {got} needs whole weights, parallel=fsdp splits them; set {fix}, or parallel=ddp"
                )


@parallels.register("fsdp", FsdpConfig)
def fsdp(config: FsdpConfig, device: torch.device) -> Parallel:
    """As ddp, with weights, gradients and optimizer state split among ranks: torch's `fully_shard`."""
    from effloop.parallel.sharded import Fsdp  # imports torch

    return Fsdp(config, device)

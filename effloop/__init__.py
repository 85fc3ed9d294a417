"""EffLoop trains image models on PyTorch as fast as the machine allows.

import effloop
cfg = effloop.compose(["data.root=/data/in1k"])
for batch in effloop.build_loader(cfg, split="train"):
    batch.images, batch.targets, batch.ids, batch.valid
effloop.build_trainer(cfg).fit()
effloop.load("outputs/RUN").predict(["cat.jpg"])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effloop.assemble.loader import build_loader
    from effloop.assemble.trainer import build_trainer
    from effloop.batch import Batch
    from effloop.config.compose import compose
    from effloop.config.schema import Config
    from effloop.inference.predict import load

__version__ = "0.2.0"
__all__ = ["Batch", "Config", "build_loader", "build_trainer", "compose", "load"]

_MODULES = {
    "Batch": "batch",
    "Config": "config",
    "build_loader": "assemble.loader",
    "build_trainer": "assemble.trainer",
    "compose": "config",
    "load": "inference.predict",
}
"""Name -> its module, imported when it is used: torch takes a second, and a mistyped command doesn't need it."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'effloop' has no attribute '{name}'")
    found = globals()[name] = getattr(importlib.import_module(f"effloop.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

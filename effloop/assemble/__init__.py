"""Config -> parts -> Trainer."""

from effloop.assemble.loader import build_loader
from effloop.assemble.trainer import build_trainer

__all__ = ["build_loader", "build_trainer"]

"""Config -> parts -> Trainer."""

from effloop.build.loader import build_loader
from effloop.build.trainer import build_trainer

__all__ = ["build_loader", "build_trainer"]

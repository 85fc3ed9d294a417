"""The typed config tree, and Hydra behind one door."""

from effloop.config.compose import compose, finish, from_dict, load, save, to_dict
from effloop.config.schema import Config, SweepConfig

__all__ = ["Config", "SweepConfig", "compose", "finish", "from_dict", "load", "save", "to_dict"]

"""The typed config tree, and Hydra behind one door."""

from effloop.config.compose import compose, finish, for_ranks, from_dict, load, save, to_dict, with_overrides
from effloop.config.schema import Config, SweepConfig

__all__ = ["Config", "SweepConfig", "compose", "finish", "for_ranks", "from_dict", "load", "save", "to_dict"]
__all__ += ["with_overrides"]

"""How ranks work together."""

from effloop.parallel import single
from effloop.parallel.base import Parallel, ParallelConfig, parallels

__all__ = ["Parallel", "ParallelConfig", "parallels", "single"]

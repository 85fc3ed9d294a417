"""`cached_property` without a lock, and `default_property`, which isn't cached."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    cached_property = functools.cached_property
else:

    class cached_property(functools.cached_property):  # noqa: N801  as in functools
        """As `functools.cached_property` from Python 3.12 on: threads that ask at once each compute the value.

        Python 3.11's holds a lock meanwhile, one for all objects of a class. A worker process that is forked while
        another thread has it would wait for it forever.
        """

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return self
            found = instance.__dict__.get(self.attrname, self)
            if found is self:
                found = instance.__dict__[self.attrname] = self.func(instance)
            return found


if TYPE_CHECKING:
    default_property = property
else:

    class default_property:  # noqa: N801  as property
        """A property that an attribute of the same name, if an object has one, takes the place of."""

        def __init__(self, of: Any) -> None:
            self.of = of

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            return self if instance is None else self.of(instance)

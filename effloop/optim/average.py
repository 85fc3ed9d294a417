"""What is evaluated: the weights, or their average."""

from __future__ import annotations

from typing import Any

from torch import nn


class Average:
    """The weights themselves.

    Attributes:
        model: has what is evaluated.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def update(self) -> None:
        """An update was done."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


NoAverage = Average

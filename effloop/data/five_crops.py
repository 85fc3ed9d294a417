"""Five crops of each image for evaluation: its centre and its corners, in one batch after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from effloop.data.bad import OnBad
from effloop.data.order import Order
from effloop.data.plan import Plan
from effloop.errors import ConfigError, DataError

_LOOKED_AT = 64


@dataclass(frozen=True)
class _RepeatedOrder(Order):
    """Each batch several times in a row."""

    times: int = 1

    def __len__(self) -> int:
        return self.times * super().__len__()

    def batch(self, epoch: int, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return super().batch(epoch, number // self.times)


def five_crops(plan: Plan) -> Plan:
    """A plan of an evaluation -> one in which each batch comes five times: centre, top left, top right, bottom left,
    bottom right.

    All are squares of the same side, resized alike; of each only the box is decoded. A single stream of batches, so
    that no engine needs to know, and an epoch starts its workers once.

    Raises:
        ConfigError: the augmentation has no crop that could be elsewhere, or all five are the same.
        DataError: one of the images looked at can't be read.
    """
    crops = plan.augment.five_crops()
    order = _RepeatedOrder(**vars(plan.order), times=len(crops))
    found = replace(plan, order=order, crops=crops)
    ids = np.unique(np.linspace(0, order.num_samples - 1, _LOOKED_AT).astype(np.int64))
    if plan.on_bad is not OnBad.fail:
        ids = np.array([sample for sample in ids.tolist() if _can_be_read(plan, sample)], np.int64)
    read = plan.read(ids)
    boxes = [found.draw(turn, ids, *read).draws.boxes for turn in range(len(crops))]
    if len(ids) and all((each == boxes[0]).all() for each in boxes):
        raise ConfigError(
            "tta: fivecrop has only one crop here, as images are square and augment.eval_ratio=1 takes all of them; "
            "set augment.eval_ratio=0.875, or drop fivecrop"
        )
    return found


def _can_be_read(plan: Plan, sample: int) -> bool:
    try:
        plan.read(np.array([sample]))
    except DataError:
        return False
    return True

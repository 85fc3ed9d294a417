"""Confusion matrices on a GPU: those of a CPU, without a sync."""

from __future__ import annotations

import pytest
import torch

from effloop.task import Segmentation, SegmentationConfig
from effloop.task.segmentation import IGNORED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("classes", [2, 21])
def test_sums_are_those_of_a_cpu(classes: int) -> None:
    logits = torch.randn(3, classes, 40, 30)
    masks = torch.randint(classes, (3, 40, 30), dtype=torch.uint8)
    masks[torch.rand(3, 40, 30) < 0.2] = IGNORED
    task = Segmentation(SegmentationConfig(name="segmentation")).for_outputs(classes)
    valid = torch.tensor([True, True, False])
    ours = [each.cuda() for each in (logits, masks, valid)]
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = task.sums(*ours)
        task.loss(ours[0].requires_grad_(), ours[1]).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = task.sums(logits, masks, valid)
    assert torch.equal(found[1:].cpu(), expected[1:])
    torch.testing.assert_close(found.cpu(), expected)

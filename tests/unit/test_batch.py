"""A batch in a notebook, and the names of the package."""

import torch

import effloop
from effloop.batch import Batch


def test_a_batch_is_one_line():
    batch = Batch(torch.zeros(4, 3, 8, 9), torch.zeros(4, dtype=torch.int64), torch.arange(4), torch.arange(4) < 3)
    line = "Batch(images (4, 3, 8, 9) float32, targets (4,) int64, on cpu; 3 of 4 are valid)"
    assert repr(batch) == line


def test_public_names():
    assert dir(effloop) == sorted([*effloop.__all__, "__version__"])

"""One process, several GPUs: the arithmetic, on chunks made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from effloop.errors import ConfigError, warn
from effloop.parallel import parallels
from effloop.parallel.dp import DpConfig
from effloop.parallel.replicas import GatheredStep, ReplicaStep


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(5, 3)

    def forward(self, images: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(images)
        counts = torch.stack([valid.sum().double(), logits.argmax(1).eq(targets).sum().double()])
        return nn.functional.cross_entropy(logits, targets), counts


class Chunks(nn.Module):
    """As DataParallel: the batch cut along its first dimension, the results one below the other."""

    def __init__(self, share: nn.Module, pieces: int) -> None:
        super().__init__()
        self.share, self.pieces = share, pieces

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        parts = zip(*(tensor.chunk(self.pieces) for tensor in inputs), strict=True)
        return tuple(torch.cat(outputs) for outputs in zip(*(self.share(*part) for part in parts), strict=True))


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_shares_add_up_to_the_whole_batch(pieces):
    whole, step = Step(), Step()
    together = GatheredStep(Chunks(ReplicaStep(step), pieces))
    torch.manual_seed(1)
    batch = torch.randn(7, 5), torch.randint(3, (7,)), torch.arange(7) < 5  # 7: shares of unequal size
    loss, sums = whole(*batch)
    loss.backward()
    other_loss, other_sums = together(*batch)
    other_loss.backward()
    assert other_loss.shape == ()
    torch.testing.assert_close(other_loss, loss)
    torch.testing.assert_close(other_sums, sums)
    torch.testing.assert_close(step.model.weight.grad, whole.model.weight.grad)


def test_one_gpu_is_not_several():
    with pytest.raises(ConfigError, match=r"device: 'cuda:1' is one GPU, parallel=dp takes all .*; set device=cuda"):
        parallels.build(DpConfig(name="dp"), torch.device("cuda", 1))


def test_without_gpus_it_says_that_it_does_nothing(capfd):
    warn.cache_clear()  # which says each line once
    parallel = parallels.build(DpConfig(name="dp"), torch.device("cpu"))
    assert "parallel=dp does nothing here" in capfd.readouterr().err
    step = Step()
    assert parallel.wrap_step(parallel.wrap(step), find_unused=False) is step
    assert parallel.device == torch.device("cpu")

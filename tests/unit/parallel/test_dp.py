"""One process, several GPUs: the arithmetic, on chunks made by hand."""

import emulator
import pytest
import torch
from torch import Tensor, nn

import effloop
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


def trained(photos: str, parallel: str, device: str) -> dict[str, Tensor]:
    """Weights after an epoch; where there are two GPUs, without NCCL, which only a real one has."""
    from torch.nn.parallel import comm

    comm.broadcast_coalesced = lambda these, gpus, *_: [[each.to(gpu, copy=gpu > 0) for each in these] for gpu in gpus]
    comm.reduce_add_coalesced = lambda these, gpu, *_: [
        sum(each.to(gpu) for each in of) for of in zip(*these, strict=True)
    ]
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    words = f"image_size=16 batch_size=7 device={device} parallel={parallel} record=none checkpoint=none num_workers=0"
    trainer = effloop.build_trainer(
        effloop.compose([f"data.root={photos}", *words.split()]), model=nn.Sequential(*layers)
    )
    trainer.train_epoch(trainer.train.epoch(0))
    weights = {name: value.cpu() for name, value in trainer.model.state_dict().items()}
    return weights | {"scores": torch.tensor([*trainer.evaluate(trainer.val.epoch(0)).values()])}


@pytest.mark.slow
def test_two_gpus_train_as_one_process(photos):
    """Batches of 7 images, of which one GPU gets 4 and the other 3, and an uneven last one to evaluate."""
    one, two = emulator.call(trained, str(photos), "none", "cpu"), emulator.call(trained, str(photos), "dp", "cuda")
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)

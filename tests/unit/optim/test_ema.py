"""The weights' moving average, against sums done by hand."""

import io

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel

from effloop.optim import EMA, NoEMA


class Odd(nn.Module):
    """Every kind of tensor that a model has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.narrow = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("statistics", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)


def put(model: Odd, value: int) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)


def by_hand(values: list[int], decay: float, *, warmup: bool) -> float:
    average = 0.0
    for number, value in enumerate(values):
        kept = min(decay, (1 + number) / (10 + number) if warmup else number)
        average = kept * average + (1 - kept) * value
    return average


@pytest.mark.parametrize(
    ("decay", "warmup", "every"), [(0.0, True, 1), (0.15, True, 1), (0.999, True, 2), (0.4, False, 1), (0.4, False, 5)]
)
def test_average_by_hand(decay, warmup, every):
    model = Odd()
    average = EMA(model, decay, warmup=warmup, every=every)
    values = [4, 8, 1, 0, 16, 3]
    for value in values:
        put(model, value)
        average.update()
    wanted = by_hand(values[::every], decay, warmup=warmup)
    for name in ("weight", "statistics", "unsaved"):
        assert getattr(average.model, name).tolist() == pytest.approx([wanted] * getattr(model, name).numel())
    assert average.model.narrow.tolist() == pytest.approx([wanted] * 2, rel=0.05)
    assert int(average.model.count) == values[::every][-1]  # copied
    assert average.model.mask.tolist() == [True, True]
    assert model.weight.tolist() == [3.0] * 3


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))
    return model.to(memory_format=torch.channels_last)


def train(model: nn.Module, average: NoEMA, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        average.update()


def test_averages_of_timm_and_torchvision():
    """As their training scripts update them: timm's after each, torchvision's after every third update."""
    model = network()
    each, third = EMA(model, 0.9, warmup=False), EMA(model, 0.9, warmup=False, every=3)
    timms = ModelEmaV3(model, 0.9)
    torchvisions = AveragedModel(model, avg_fn=lambda mean, new, _: 0.9 * mean + 0.1 * new, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        train(model, each, optimizer, range(step, step + 1))
        third.update()
        timms.update(model, step=step + 1)
        if step % 3 == 0:
            torchvisions.update_parameters(model)
    torch.testing.assert_close(each.model.state_dict(), timms.module.state_dict(), rtol=0, atol=0)
    for name, wanted in torchvisions.module.named_parameters():
        torch.testing.assert_close(third.model.get_parameter(name), wanted, rtol=1e-6, atol=1e-8)


def test_going_on_is_equal_to_the_bit():
    def start() -> tuple[nn.Module, EMA, torch.optim.Optimizer]:
        model = network()
        return model, EMA(model, 0.99, every=3), torch.optim.SGD(model.parameters(), lr=0.1)

    straight = start()
    train(*straight, range(10))
    first, resumed = start(), start()
    train(*first, range(4))
    file = io.BytesIO()
    torch.save([first[0].state_dict(), first[1].state_dict(), first[1].model.state_dict()], file)
    file.seek(0)
    trained, state, averaged = torch.load(file, weights_only=True)
    resumed[0].load_state_dict(trained)
    resumed[1].load_state_dict(state, averaged)
    train(*resumed, range(4, 10))
    assert resumed[1].updates == 10
    for name, value in straight[1].model.state_dict().items():
        assert torch.equal(value, resumed[1].model.state_dict()[name]), name


def test_going_on_from_a_run_without_an_average():
    model = network()
    average = EMA(model, 0.99)
    before = NoEMA(model)
    train(model, before, torch.optim.SGD(model.parameters(), lr=0.1), range(3))
    average.load_state_dict(before.state_dict(), model.state_dict())
    assert average.updates == 0
    torch.testing.assert_close(average.model.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_compiled_model_and_shared_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model.compile(backend="eager")
    average = EMA(model, 0.5)
    assert average.model[1].weight is average.model[0].weight
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        average.model[0].weight.zero_()
    average.update()
    assert average.model[0].weight.tolist() == [[pytest.approx(0.9)] * 4] * 4  # once, not twice
    assert list(average.model.state_dict()) == list(model.state_dict())
    average.model.compile(backend="eager")
    assert average.model(torch.ones(1, 4)).shape == (1, 4)

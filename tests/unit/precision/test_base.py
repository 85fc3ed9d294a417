"""What a step does with its gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from effloop.measure.loops import process_state_restored
from effloop.optim import EMA, OptimConfig, clipping, optimizers
from effloop.precision import Precision, precisions

CPU = torch.device("cpu")
OWN = ("adamw", "sgd")
OPTIMIZERS = [(name, fused) for name in OWN for fused in (None, True)]


def optimizer_of(name: str, fused: bool | None, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    config: type[OptimConfig] = optimizers[name].config
    return optimizers.build(config(name=name, lr=0.1, weight_decay=0.0, fused=fused), parameters)


def scaled() -> Precision:
    """What `precision=fp16` is on a GPU."""
    return Precision(CPU, torch.float16, scale=True)


@pytest.mark.parametrize(("name", "fused"), OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 1.0, 1e9])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_updates_nothing(name, fused, max_norm, bad):
    precision, weights = scaled(), [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = optimizer_of(name, fused, weights)

    def step(factor: float) -> bool:
        optimizer.zero_grad()
        precision.backward(sum((weight * torch.tensor(1.0)).sum() for weight in weights))  # type: ignore[arg-type]
        weights[1].grad[0] *= factor
        return precision.step(optimizer, clipping(nn.Identity(), max_norm, None, None))

    assert step(1.0)
    before, moments = [weight.detach().clone() for weight in weights], copy.deepcopy(optimizer.state_dict()["state"])
    scale = precision.state_dict()["scale"]
    assert not step(bad)
    assert all(torch.equal(*pair) for pair in zip(before, weights, strict=True))
    torch.testing.assert_close(optimizer.state_dict()["state"], moments, rtol=0, atol=0)
    assert precision.state_dict()["scale"] == scale / 2
    assert step(1.0)
    assert not any(torch.equal(*pair) for pair in zip(before, weights, strict=True))


def test_schedule_and_average_do_not_step_then():
    """As the loop does it: three updates, of which the second overflows."""
    precision, model = scaled(), nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule, average = LambdaLR(optimizer, lambda step: 1 / (1 + step)), EMA(model, 0.5)
    rates = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        precision.backward(model(torch.ones(1, 3)).sum())
        model.weight.grad.mul_(factor)
        rates.append(schedule.get_last_lr()[0])
        if precision.step(optimizer):
            schedule.step()
            average.update()
    assert rates == [1.0, 0.5, 0.5]
    assert average.updates == 2
    assert schedule.last_epoch == 2


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_without_a_scale_every_step_is_one(dtype):
    precision, weight = Precision(CPU, dtype), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for value in (1.0, float("inf")):
        weight.grad = torch.full((2,), value)
        assert precision.step(optimizer)
    assert weight.isinf().all()


@pytest.mark.parametrize("make", [lambda: Precision(CPU), scaled])
@pytest.mark.parametrize(("max_norm", "wanted"), [(None, [3.0, 4.0]), (10.0, [3.0, 4.0]), (1.0, [0.6, 0.8])])
def test_gradients_are_cut_to_their_length_unscaled(make, max_norm, wanted):
    precision: Precision = make()  # type: ignore[operator]
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:]}], lr=1.0)  # one length for all groups
    precision.backward((3 * weights[0] + 4 * weights[1]).sum())
    assert precision.step(optimizer, clipping(nn.Identity(), max_norm, None, None))
    assert [-float(weight.detach()) for weight in weights] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", OWN)
def test_scaled_steps_are_unscaled_ones(name):
    found = []
    for precision, fused in ((Precision(CPU), None), (scaled(), None), (scaled(), True)):
        torch.manual_seed(0)
        model, images = nn.Linear(8, 4), torch.randn(16, 8)
        optimizer = optimizer_of(name, fused, list(model.parameters()))
        for _ in range(5):
            optimizer.zero_grad()
            precision.backward(model(images).square().mean())
            assert precision.step(optimizer, clipping(model, 0.1, None, None))
        found.append(model.weight.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-5)


def test_which_are_mixed():
    assert {name for name in precisions if precisions[name].config.mixed} == {"amp", "bf16", "fp16"}


CUDNN, MATMUL = torch.backends.cudnn, torch.backends.cuda.matmul
SWITCHES = [MATMUL, CUDNN.conv, CUDNN.rnn, torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv]


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("before", ["default", "old", "new", "of all", "mixed"])
def test_whatever_a_script_has_set_tf32_is_as_asked_for(before, tf32):
    """Also for what reads torch's old switches, which raise where the new ones say something else."""
    with process_state_restored():
        if before in ("old", "mixed"):
            MATMUL.allow_tf32 = CUDNN.allow_tf32 = not tf32
        if before in ("new", "mixed"):
            MATMUL.fp32_precision = CUDNN.conv.fp32_precision = "ieee" if tf32 else "tf32"
        if before == "of all":
            torch.backends.fp32_precision = "tf32"
        try:
            Precision(CPU, tf32=tf32)
            assert [each.fp32_precision == "tf32" for each in SWITCHES] == [tf32] * len(SWITCHES)
            assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
            assert MATMUL.allow_tf32 == CUDNN.allow_tf32 == tf32
        finally:
            torch.backends.fp32_precision = "none"

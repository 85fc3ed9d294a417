from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from effloop.data.augment.torchvision import seeded as module
from effloop.data.augment.torchvision.seeded import seeded

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(3, 4),
    "randn": lambda: torch.randn((20,), dtype=torch.float64),
    "randint": lambda: torch.randint(0, 1000, size=(5,)),
    "randperm": lambda: torch.randperm(30),
    "rand_like": lambda: torch.rand_like(torch.empty(3, 4)),
    "randn_like": lambda: torch.randn_like(torch.empty(3, 4, dtype=torch.uint8), dtype=torch.float32),
    "bernoulli_": lambda: torch.empty(50).bernoulli_(0.4),
    "cauchy_": lambda: torch.empty(5).cauchy_(),
    "exponential_": lambda: torch.empty(5).exponential_(),
    "geometric_": lambda: torch.empty(50).geometric_(0.1),
    "log_normal_": lambda: torch.empty(5).log_normal_(),
    "normal_": lambda: torch.empty(40).normal_(1, 2),
    "random_": lambda: torch.empty(5).random_(0, 1000),
    "uniform_": lambda: torch.empty(1).uniform_(torch.tensor(2.0), 3),
    "_sample_dirichlet": lambda: torch._sample_dirichlet(torch.tensor([[1.0, 2.0]])),
    "_standard_gamma": lambda: torch._standard_gamma(torch.tensor([1.0, 2.0])),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.4)),
    "binomial": lambda: torch.binomial(torch.full((50,), 20.0), torch.full((50,), 0.4)),
    "multinomial": lambda: torch.multinomial(torch.ones(1000), 5),
    "normal": lambda: torch.normal(torch.zeros(5), 1.0),
    "poisson": lambda: torch.poisson(torch.full((50,), 3.0)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_come_from_the_key_and_are_torchs(name: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(5)
    plain = draw()
    state = torch.get_rng_state()
    with seeded(5):
        first = draw()
    assert torch.equal(first, plain)
    with seeded(6):
        assert not torch.equal(draw(), first)
    with seeded(5):
        assert torch.equal(draw(), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_all_that_torch_has_to_draw_with_is_known() -> None:
    assert set(DRAWS) == {name for name, how in module._DRAWS.items() if how is not module._refused}
    drawing = set()
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        if full.startswith("aten::") and not name.startswith("_"):
            packet = getattr(torch.ops.aten, name)
            if torch.Tag.nondeterministic_seeded in getattr(packet, overload or "default").tags:
                drawing.add(name)
    assert drawing <= set(module._DRAWS)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randint_like(torch.zeros(3), 9),
        lambda: torch.nn.functional.dropout(torch.ones(3)),
        lambda: torch.nn.functional.gumbel_softmax(torch.ones(3)),
    ],
)
def test_what_cannot_be_given_numbers_is_refused(draw: Callable[[], torch.Tensor]) -> None:
    state = torch.get_rng_state()
    with seeded(0), pytest.raises(RuntimeError, match="global generator"):
        draw()
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_for_another_device_are_the_hosts() -> None:
    """`meta` stands for it here: its tensors have a device, and no values."""
    image = torch.empty(3, 4, 5, device="meta", dtype=torch.uint8)
    with seeded(1):
        drawn = [
            torch.randn_like(image, dtype=torch.float32),
            torch.rand(3, 4, 5, device="meta"),
            torch.empty(3, 4, 5, device="meta").uniform_(),
        ]
    assert all(tensor.device.type == "meta" and tensor.shape == image.shape for tensor in drawn)


def test_numbers_alike_do_not_depend_on_how_an_image_lies_in_memory() -> None:
    rows, channels = torch.empty(3, 4, 5), torch.empty(4, 5, 3).permute(2, 0, 1)
    drawn = []
    for image in (rows, channels):
        with seeded(1):
            drawn.append(torch.randn_like(image))
    assert torch.equal(*drawn)


def test_threads_share_none() -> None:
    def draw(key: int) -> list[float]:
        with seeded(key):
            meeting.wait()  # both are inside
            return [float(torch.rand(1)) for _ in range(200)]

    alone = []
    for key in (1, 2):
        torch.manual_seed(key)
        alone.append([float(torch.rand(1)) for _ in range(200)])
    meeting = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(draw, (1, 2))) == alone


def test_torch_computes_on_one_thread_in_it_and_elsewhere_as_before() -> None:
    def inside() -> tuple[int, int, int]:
        torch.set_num_threads(3)
        before = torch.get_num_threads()
        with seeded(0):
            within = torch.get_num_threads()
        return before, within, torch.get_num_threads()

    usual = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(inside).result() == (3, 1, 3)
        with ThreadPoolExecutor(1) as pool:  # what starts later isn't touched
            assert pool.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == usual
    finally:
        torch.set_num_threads(usual)

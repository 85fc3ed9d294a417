"""Everything on the second GPU: the first has no memory taken, and no context if it had none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runs import train

import effloop
from effloop.data.engine import dali
from effloop.parallel import Parallel, ParallelConfig, ddp, own_slice, parallels
from effloop.parallel.dp import DpConfig
from effloop.system import gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
SECOND = torch.device("cuda:1")


def first_gpu() -> tuple[bool, int, int]:
    return torch._C._cuda_hasPrimaryContext(0), torch.cuda.max_memory_allocated(0), torch.cuda.memory_reserved(0)


@pytest.fixture(autouse=True)
def _nothing_on_the_first(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.reset_peak_memory_stats(0)
    before = first_gpu()
    yield
    assert first_gpu()["dp_begins" in request.node.name :] == before["dp_begins" in request.node.name :]


def on_a_thread(call: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: a call on a thread of its own, whose current GPU is the first."""

    @functools.wraps(call)
    def there(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call, *args, **kwargs).result()

    return there


@on_a_thread
def test_memory_is_page_locked() -> None:
    array = np.zeros(8192, np.uint8)
    gpu.page_lock(array, SECOND)
    assert torch.from_numpy(array).is_pinned()
    assert torch.accelerator.current_device_index() == 0


@on_a_thread
def test_the_peak_is_that_of_the_fullest_gpu() -> None:
    kept = torch.zeros(1 << 20, device=SECOND)
    assert gpu.peak_memory() >= kept.nbytes
    assert gpu.peak_of(lambda: torch.zeros(1 << 20, device=SECOND), SECOND) == kept.nbytes


def by_ddp(device: torch.device) -> SimpleNamespace:
    ddp._open_group(None, None, device, 1.0)  # type: ignore[arg-type]
    return SimpleNamespace(device=device)


@pytest.mark.parametrize("choose", [own_slice, lambda device: Parallel(ParallelConfig(name="none"), device), by_ddp])
def test_a_device_that_is_chosen_is_the_current_one(choose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp.dist, "is_initialized", lambda: choose is by_ddp)

    @on_a_thread
    def check() -> None:
        assert choose(SECOND).device == SECOND
        assert torch.accelerator.current_device_index() == 1

    check()


@on_a_thread
def test_dp_begins_with_the_first_gpu() -> None:
    torch.accelerator.set_device_index(1)
    assert parallels.build(DpConfig(name="dp"), torch.device("cuda")).device == torch.device("cuda:0")
    assert torch.accelerator.current_device_index() == 0


@on_a_thread
def test_dali_works_where_the_batches_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def share_outputs(stream: torch.cuda.Stream) -> list[Any]:
        assert (torch.accelerator.current_device_index(), stream.device) == (1, SECOND)
        return []

    monkeypatch.setattr(dali._Pipeline, "_built", lambda self: SimpleNamespace(share_outputs=share_outputs))
    pipeline: Any = dali._Pipeline(2, (8, 8, 3), 1, SECOND)
    pipeline._given.append(None)
    assert pipeline.options["device_id"] == 1
    with pytest.raises(ValueError, match="values to unpack"):  # no outputs
        pipeline.take()


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_trains_and_predicts_on_any_thread(engine: str, here: Path, photos: Path) -> None:
    def load() -> tuple[Any, int]:
        return effloop.load(here / "outputs/x"), torch.accelerator.current_device_index()

    words = ("run=x", "device=cuda:1", "epochs=1", f"engine={engine}", "num_workers=1", "augment.device=gpu")
    assert on_a_thread(train)(photos, *words) == 0
    model, current = on_a_thread(load)()
    assert current == 1
    assert on_a_thread(lambda: len(list(model.predict(sorted((photos / "val").rglob("*.jpg"))[:3]))))() == 3

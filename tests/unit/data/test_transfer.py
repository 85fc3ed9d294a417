import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from effloop.batch import Batch
from effloop.data.random import sample_keys
from effloop.data.transfer import Transfer

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def keys_of(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    return sample_keys(3, 0, ids)


def make_batch(targets_dtype: torch.dtype = torch.uint8) -> Batch:
    """Every value in every channel."""
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(2, 16, 16, 3).contiguous()
    return Batch(
        images=levels.permute(0, 3, 1, 2),
        targets=torch.tensor([3, 250]).to(targets_dtype),
        ids=torch.tensor([7, 8]),
        valid=torch.tensor([True, False]),
    )


def transferred(batch: Batch, mean: list[float] | None, std: list[float] | None, channels_last: bool = True) -> Batch:
    (got,) = Transfer(torch.device("cpu"), mean, std, channels_last=channels_last).stream([batch], keys_of)
    return got


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), ([0.1, 0.5, 0.9], [0.01, 1.0, 7.0])])
def test_normalising(mean, std, channels_last):
    batch = make_batch()
    got = transferred(batch, mean, std, channels_last).images
    column = [torch.tensor(values, dtype=torch.float64).reshape(1, 3, 1, 1) for values in (mean, std)]
    wanted = (batch.images.double() / 255 - column[0]) / column[1]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)
    assert got.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), ([0.1, 0.5, 0.9], [0.01, 1.0, 7.0])])
def test_pixels_of_what_was_normalised(mean, std):
    batch, transfer = make_batch(), Transfer(torch.device("cpu"), mean, std, channels_last=True)
    got = transfer.pixels(transfer.normalize(batch.images))
    assert got.dtype == torch.uint8
    assert torch.equal(got, batch.images)
    (scale,) = transfer.normalize(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)) - transfer.normalize(
        torch.zeros((1, 3, 1, 1), dtype=torch.uint8)
    )
    for shift in (-0.4, 0.4):  # levels, as mixed images have them
        shifted = transfer.normalize(batch.images) + shift / 255 * scale
        assert torch.equal(transfer.pixels(shifted), batch.images)
    far = torch.tensor([-1e6, 1e6]).reshape(2, 1, 1, 1).expand(2, 3, 2, 2)
    assert transfer.pixels(far).flatten(1).unique(dim=1).tolist() == [[0], [255]]


def test_without_mean_and_std_images_stay_uint8():
    batch = make_batch()
    got = transferred(batch, None, None).images
    assert torch.equal(got, batch.images)
    assert got.dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint32])
def test_the_other_fields(dtype):
    got = transferred(make_batch(dtype), MEAN, STD)
    assert got.targets.dtype == torch.int64
    assert got.targets.tolist() == [3, 250]
    assert got.ids.tolist() == [7, 8]
    assert got.valid.tolist() == [True, False]


def test_batches_are_taken_one_by_one():
    def endless():
        while True:
            yield make_batch()

    assert len(next(Transfer(torch.device("cpu"), MEAN, STD, channels_last=True).stream(endless(), keys_of))) == 2


def test_a_host_batch_is_let_go_before_its_copy_is_handed_out():
    seen: list[weakref.ref[torch.Tensor]] = []

    def noted(batch: Batch) -> Batch:
        seen.append(weakref.ref(batch.images))
        return batch

    def batches() -> Iterator[Batch]:
        for _ in range(3):
            yield noted(make_batch())

    for _ in Transfer(torch.device("cpu"), MEAN, STD, channels_last=True).stream(batches(), keys_of):
        assert seen[-1]() is None
    assert len(seen) == 3

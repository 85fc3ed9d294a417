from __future__ import annotations

from pathlib import Path

from runs import TINY

import effloop
from effloop.diagnose.batch_tensors import device_batch, host_batch


def test_batches_are_those_of_the_loader(photos: Path) -> None:
    config = effloop.compose([f"data.root={photos}", *TINY, "num_workers=1", "augment=native_resize_crop"])
    train = effloop.build_loader(config, "train")
    batch = next(iter(train.engine.stream(0)))
    for told, tensor in zip(host_batch(train), (batch.images, batch.targets, batch.ids, batch.valid), strict=True):
        assert (told.shape, told.bytes) == (list(tensor.shape), tensor.nbytes), told.name
        assert f"torch.{told.dtype}" == str(tensor.dtype)
    moved = next(iter(train.epoch(0)))
    for told, tensor in zip(device_batch(config, train), (moved.images, moved.targets), strict=True):
        assert (told.shape, told.bytes, f"torch.{told.dtype}") == (list(tensor.shape), tensor.nbytes, str(tensor.dtype))
    train.close()

"""The loader through the public API, as somebody with a loop of their own uses it."""

import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from plans import line
from runs import composed

import effloop
from effloop.checkpoint import rng
from effloop.data.loader import Loader
from effloop.errors import ConfigError, DataError

SMALL = ("image_size=16", "batch_size=8", "num_workers=2", "device=cpu")


def loader(photos: Path, *overrides: str, split: str = "train") -> Loader:
    return effloop.build_loader(composed(f"data.root={photos}", *SMALL, *overrides), split=split)


def pixels(loader: Loader, epoch: int = 0) -> torch.Tensor:
    return torch.cat([batch.images for batch in loader.epoch(epoch)])


def ids(loader: Loader, epoch: int = 0, samples_seen: int = 0) -> list[int]:
    return [i for batch in loader.epoch(epoch, samples_seen) for i in batch.ids.tolist()]


def test_the_snippet_of_the_readme():
    cfg = effloop.compose(["device=cpu", "image_size=32"])
    for number, batch in enumerate(effloop.build_loader(cfg, split="train")):
        assert isinstance(batch, effloop.Batch)
        assert batch.images.shape == (32, 3, 32, 32)
        assert batch.images.dtype == torch.float32
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert batch.targets.dtype == batch.ids.dtype == torch.int64
        assert batch.valid.tolist() == [True] * 32
        assert -4 < batch.images.mean() < 4
        if number == 3:
            break
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("effloop")]


def test_an_epoch_is_a_permutation(photos):
    train = loader(photos)
    orders = [ids(train, epoch) for epoch in (0, 1)]
    assert [sorted(order) for order in orders] == [list(range(40))] * 2
    assert orders[0] != orders[1]
    assert ids(train, 0) == orders[0]
    assert ids(loader(photos, "seed=1")) != orders[0]
    assert len(train) == 5


def test_the_tail(photos):
    drop, wrap = loader(photos, "batch_size=12"), loader(photos, "batch_size=12", "data.tail=wrap")
    assert (len(drop), len(ids(drop))) == (3, 36)
    assert (len(wrap), len(ids(wrap))) == (4, 48)
    assert ids(wrap)[40:] == ids(wrap)[:8]


@pytest.mark.parametrize(
    ("engine", "overrides"),
    [
        ("inline", ("augment.device=gpu",)),
        ("processes", ("data.mean=null", "data.std=null")),
        ("threads", ("channels_last=false", "data.cache=bytes")),
    ],
)
def test_a_preview_shows_what_epochs_show(photos, engine, overrides):
    one = loader(photos, f"engine={engine}", *overrides)
    seen = {
        (sample, epoch): one.transfer.pixels(image[None])[0].permute(1, 2, 0).numpy()
        for epoch in range(2)
        for batch in one.epoch(epoch)
        for sample, image in zip(batch.ids.tolist(), batch.images, strict=True)
    }
    got = one.preview(4, 2)
    one.close()
    assert got.images.shape == (4, 2, 16, 16, 3)
    assert got.images.dtype == np.uint8
    for row, sample in enumerate((0, 13, 26, 39)):
        assert all(np.array_equal(got.images[row, epoch], seen[sample, epoch]) for epoch in range(2))
        name = f"{'abc'[one.plan.source.labels[sample]]}\n{one.plan.source.key(sample)}"
        assert got.rows[row] == name
    assert got.columns == ("epoch 0", "epoch 1")
    assert len(set(one.plan.source.labels[[0, 13, 26, 39]].tolist())) == 3


def test_a_preview_mixes(photos):
    one = loader(photos, "augment.cutmix=1", "augment.mixup=1")
    images = one.samples([0, 13, 26, 39], epoch=1).images
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    wanted = ((images * std + mean) * 255).permute(0, 2, 3, 1).numpy()
    got = one.preview(4, 2).images[:, 1]
    assert np.abs(got - wanted).max() <= 0.501
    assert not np.array_equal(got, loader(photos).preview(4, 2).images[:, 1])


@pytest.mark.parametrize("wrong", [-1, 2**70, "0"])
def test_samples_that_there_are_not(photos, wrong):
    wanted = f"ids: {wrong!r} is not a sample's number; give whole numbers from 0 to 39"
    with pytest.raises(ConfigError, match=line(wanted)):
        loader(photos).samples([3, wrong])  # type: ignore[list-item]


def test_a_preview_of_evaluation(photos):
    got = loader(photos, split="val").preview(100, 2)
    assert got.images.shape == (13, 2, 16, 16, 3)
    assert np.array_equal(got.images[:, 0], got.images[:, 1])


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_preview_changes_nothing(photos, engine):
    one, other = loader(photos, f"engine={engine}"), loader(photos, f"engine={engine}")
    before = rng.capture()
    first = one.preview(8, 3)
    for number, (got, wanted) in enumerate(zip(one.epoch(0), other.epoch(0), strict=True)):
        assert torch.equal(got.ids, wanted.ids)
        assert torch.equal(got.images, wanted.images)
        if number == 2:  # in the middle of an epoch
            assert np.array_equal(one.preview(8, 3).images, first.images)
    after = rng.capture()
    assert before["python"] == after["python"]
    assert str(before["numpy"]) == str(after["numpy"])
    assert torch.equal(before["numpy"][1], after["numpy"][1])
    assert torch.equal(before["torch"], after["torch"])
    one.close()
    other.close()


def test_uint8_on_request(photos):
    raw, normal = loader(photos, "data.mean=null", "data.std=null"), loader(photos)
    assert pixels(raw).dtype == torch.uint8
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    torch.testing.assert_close(pixels(normal), (pixels(raw) / 255 - mean) / std, rtol=1e-5, atol=1e-5)


def test_any_other_split_is_loaded_as_val_is(photos, tmp_path):
    (tmp_path / "test").symlink_to(photos / "val")
    test, val = loader(tmp_path, split="test"), loader(photos, split="val")
    assert ids(test) == ids(val)
    assert torch.equal(pixels(test), pixels(val))
    with pytest.raises(DataError, match="has no folder 'best'; it has test: set"):
        loader(tmp_path, split="best")


def test_it_is_iterated_as_a_dataloader_is(photos):
    train = loader(photos)
    assert [[i for batch in train for i in batch.ids.tolist()] for _ in range(2)] == [ids(train, 0), ids(train, 1)]
    assert repr(train) == f"Loader(40 images in 3 classes, {photos}/train, 5 batches of 8)"


def test_a_bad_sample_is_found_before_the_first_batch(tmp_path, photos):
    root = shutil.copytree(photos, tmp_path / "copy")
    bad = next((root / "train" / "b").iterdir())
    bad.write_bytes(bad.read_bytes()[:200])
    with pytest.raises(DataError, match=f"^{re.escape(str(bad))} is a truncated JPEG"):
        loader(root)
    assert len(loader(root, "data.check=0")) == 5

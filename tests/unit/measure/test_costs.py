"""What loading costs, stage by stage."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from masked import make_masks
from runs import TINY

import effloop
from effloop.data.loader import Loader
from effloop.data.source.view import View
from effloop.measure.measured import Timed, loading_costs, sample_ids


@pytest.fixture
def loader(photos: Path) -> Loader:
    return effloop.build_loader(effloop.compose([f"data.root={photos}", *TINY]))


class Slow(View):
    """A source that takes 5 ms to answer."""

    def read(self, index: int) -> bytes:
        time.sleep(0.005)
        return bytes(self.source.read(index))


def test_waiting_for_the_storage_is_no_computing(loader):
    found = loading_costs(replace(loader.plan, source=Slow(loader.plan.source)), 0.0)
    assert found.images == 16
    assert found.storage.wall_s > 0.005 > 2 * found.storage.cpu_s
    assert found.decode.wall_s < found.storage.wall_s
    assert found.total.wall_s > found.storage.wall_s + found.decode.wall_s


def test_many_images_decoded_in_one_call_are_decoding(loader):
    slow: Any = Timed(loader.plan.decoder, "decode_resized", before=lambda: time.sleep(0.08))
    assert loading_costs(replace(loader.plan, decoder=slow), 0.0).decode.wall_s > 0.005


@pytest.fixture
def masked(tmp_path: Path) -> Any:
    root = make_masks(tmp_path, {"train": 16, "val": 2})
    config = effloop.compose([f"data.root={root}", "image_size=16", "batch_size=8", "num_workers=0"])
    return effloop.build_loader(config).plan


def test_masks_are_read_and_decoded(masked):
    source, masks = (
        Timed(of, name, before=lambda: time.sleep(0.005))
        for of, name in ((masked.source, "read_mask"), (masked.masks, "decode"))
    )
    found = loading_costs(replace(masked, masks=masks, source=source), 0.0)
    assert min(found.storage.wall_s, found.decode.wall_s) > 0.005


def test_samples_are_the_first_of_the_epoch(loader):
    ids = sample_ids(loader.plan, 20).tolist()
    assert ids == [index for request in loader.plan.requests(0) for index in request.ids.tolist()][:20]
    assert loading_costs(loader.plan, 60.0, most=20).images == 20
    assert loading_costs(loader.plan, 0.0, at_once=3).images == 3

"""Which images the loop gets when, where their size changes over the epochs."""

import multiprocessing
import re
from contextlib import closing
from pathlib import Path

import pytest
import torch
from runs import composed

import effloop
from effloop.batch import Batch, ImageSize
from effloop.data.loader import Loader, Stages
from effloop.errors import ConfigError

TINY = ("batch_size=8", "num_workers=0", "device=cpu", "model.width=4", "record=none")


def overrides(root: Path, *more: str) -> list[str]:
    return [f"data.root={root}", *TINY, *more]


def make_loader(root: Path, size: int, *more: str) -> Loader:
    return effloop.build_loader(composed(*overrides(root, f"image_size={size}", *more)))


def make_stages(root: Path, sizes: list[int], epochs: int, *more: str) -> Stages:
    return Stages([ImageSize.of(size) for size in sizes], [make_loader(root, size, *more) for size in sizes], epochs)


def assert_equal(got: list[Batch], wanted: list[Batch]) -> None:
    for one, other in zip(got, wanted, strict=True):
        for field in ("images", "targets", "ids", "valid"):
            assert torch.equal(getattr(one, field), getattr(other, field))


@pytest.mark.parametrize(
    ("sizes", "epochs", "wanted"),
    [
        ([16, 24], 5, [16, 16, 16, 24, 24]),
        ([16], 2, [16, 16]),
        ([24, 16, 24], 6, [24, 24, 16, 16, 24, 24]),
        ([16, 16, 16, 16, 24], 88, [16] * 71 + [24] * 17),
    ],
)
def test_which_epoch_has_which_size(photos, sizes, epochs, wanted):
    loaders = {size: make_loader(photos, size) for size in {*sizes}}
    stages = Stages([*map(ImageSize.of, sizes)], [loaders[size] for size in sizes], epochs)
    assert [stages.size_at(epoch).height for epoch in range(epochs)] == wanted
    assert stages.size_at(epochs + 3).height == wanted[-1]


def test_the_same_samples_in_the_same_order_whatever_the_size(photos):
    stages, whole = make_stages(photos, [16, 24], 4), make_loader(photos, 24)
    assert len(stages) == len(whole) == 5
    assert stages.global_batch == whole.global_batch == 8
    for epoch in range(4):
        got, wanted = list(stages.epoch(epoch)), list(whole.epoch(epoch))
        assert {batch.images.shape[-1] for batch in got} == {16 if epoch < 2 else 24}
        assert [batch.ids.tolist() for batch in got] == [batch.ids.tolist() for batch in wanted]
        if epoch >= 2:
            assert_equal(got, wanted)


def test_what_goes_on_in_the_middle_gets_the_same_batches(photos):
    more = ("engine=threads", "num_workers=2")
    with closing(make_stages(photos, [16, 24], 5, *more)) as stages:
        wanted = [list(stages.epoch(epoch)) for epoch in range(5)]
        assert_equal(list(stages.epoch(1)), wanted[1])  # and back
    for epoch in (2, 3):
        with closing(make_stages(photos, [16, 24], 5, *more)) as again:
            assert_equal(list(again.epoch(epoch, samples_seen=16)), wanted[epoch][2:])
            assert_equal(list(again.epoch(epoch + 1)), wanted[epoch + 1])


def test_workers_of_the_stage_before_have_ended(photos):
    with closing(make_stages(photos, [16, 24, 16, 16], 4, "engine=processes", "num_workers=1")) as stages:
        assert [size.height for size in stages.loaders] == [16, 24]  # one for each size
        workers = []
        for epoch in range(4):
            list(stages.epoch(epoch))
            (worker,) = multiprocessing.active_children()
            workers.append(worker)
        assert len({*workers}) == 3
        assert workers[2] is workers[3]
    assert not multiprocessing.active_children()


def test_batches_memory_of_the_stage_before_is_let_go(photos):
    with closing(make_stages(photos, [16, 24], 2, "num_workers=2")) as stages:
        for epoch, slots in ((0, {16}), (1, {24}), (0, {16})):
            list(stages.epoch(epoch))
            rings = {size.height: loader.engine.ring for size, loader in stages.loaders.items()}  # type: ignore[attr-defined]
            assert {size for size, ring in rings.items() if len(ring)} == slots


def test_the_trainers_model_sees_them_and_evaluation_has_its_own(photos, here):
    config = effloop.compose(overrides(photos, "image_size=32", "progressive=[16,24]", "epochs=2", "checkpoint=none"))
    trainer = effloop.build_trainer(config)
    seen: dict[bool, list[int]] = {True: [], False: []}
    trainer.model.register_forward_pre_hook(lambda model, args: seen[model.training].append(args[0].shape[-1]))
    trainer.fit()
    assert seen[True] == [16] * 5 + [24] * 5
    assert set(seen[False]) == {32}


def test_what_cannot_be_is_one_line_before_the_first_step(photos, here):
    for more, wanted in (
        (["epochs=4", "augment.ops.crop.size=32"], "progressive: at 16 pixels augment.ops: the recipe gives images of"),
        (["epochs=1"], "progressive: 2 sizes for epochs=1"),
        (["epochs=4", "progressive=[16,0]"], "progressive: 0 is not allowed"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(wanted)}[^\n]*; set [^\n]+$"):
            effloop.build_trainer(effloop.compose(overrides(photos, "image_size=32", "progressive=[16,32]", *more)))
        assert not list(here.iterdir())

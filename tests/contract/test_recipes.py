"""Every recipe that comes along, on either device: the same sample every time, whoever loads it."""

import itertools
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import composed, make_photos

import effloop
from effloop.batch import Batch
from effloop.config import Config
from effloop.config import hydra_setup as search
from effloop.data.engine import engines
from effloop.data.loader import Loader
from effloop.errors import ConfigError
from effloop.parallel import Parallel, ParallelConfig

RECIPES = sorted(path.stem for path in (search.config_root() / "augment").glob("*.yaml"))
LEVELS = 0.5  # of 255, mean over a batch: what rounding on the way may come to, where an operation enlarges it

DEVICES = dict(zip(RECIPES, itertools.cycle(["cpu", "gpu"])))  # where each is tried; both are compared below
DEVICES |= {name: "cpu" for name in RECIPES if name.startswith(("albumentations", "torchvision"))}

every_recipe = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photos(tmp_path_factory.mktemp("photos"), train=16, val=3)


class Rank(Parallel):
    """One of several processes, for what loads their parts."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(ParallelConfig(), torch.device("cpu"))
        self.rank, self.world_size = rank, world_size


def make(root: Path, recipe: str, device: str = "cpu", parallel: Parallel | None = None, **values: int) -> Loader:
    """The loader of a recipe, with values of root keys; skips what can't be had."""
    return build(replace(config_of(root, recipe, device), **values), parallel)


def config_of(root: Path, recipe: str, device: str, *words: str) -> Config:
    """The config of a recipe's loader."""
    some = (f"data.root={root}", "image_size=24", "batch_size=8", "num_workers=0", "device=cpu")
    return composed(*some, f"augment={recipe}", f"augment.device={device}", *words)


def build(config: Config, parallel: Parallel | None = None) -> Loader:
    """The loader of a config; skips what can't be had."""
    try:
        return effloop.build_loader(config, parallel=parallel)
    except ConfigError as error:
        if "albumentations" in str(error) or "dali can only" in str(error):
            pytest.skip(str(error))
        raise


def epoch(loader: Loader, number: int = 1) -> list[Batch]:
    with closing(loader):
        return list(loader.epoch(number))


def assert_equal(got: list[Batch], wanted: list[Batch]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.targets, other.targets)
        assert torch.equal(one.images, other.images)


@contextmanager
def global_generators_untouched() -> Iterator[None]:
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    assert random.getstate() == before[2]


ENGINES = sorted(set(engines) - {"inline"})  # which is what they are compared with


# Engines don't look at the recipe: each recipe meets one of them; DALI refuses most.
WAYS = [
    *zip(RECIPES, itertools.cycle(itertools.product(sorted({*ENGINES} - {"dali"}), [1, 2]))),
    *((name, ("dali", 2)) for name in ("native", "native_rand", "torchvision")),
]


@pytest.mark.parametrize(("recipe", "way"), WAYS)
@pytest.mark.slow
def test_the_same_samples_by_every_engine(root, recipe, way):
    (engine, workers), device = way, DEVICES[recipe]
    with global_generators_untouched():
        wanted = epoch(make(root, recipe, device))
        assert len(wanted) == 2
        chosen = composed(f"engine={engine}", "engine.prefetch=1").engine
        loader = build(replace(config_of(root, recipe, device), engine=chosen, num_workers=workers))
        got = epoch(loader)
        if loader.engine.exact:
            assert_equal(got, wanted)


@every_recipe
def test_a_sample_depends_on_nothing_but_seed_epoch_and_number(root, recipe):
    """Not on the others of its batch, and not on the rank: two ranks with 4 each see the same eight images."""
    loader = make(root, recipe, DEVICES[recipe])
    whole = epoch(loader)
    for batch in whole:
        again = loader.samples(batch.ids.tolist()[::-1], 1)
        assert torch.equal(again.images.flip(0), batch.images)
    for sample, image in zip(batch.ids.tolist()[:3], batch.images, strict=False):
        assert torch.equal(loader.samples([sample], 1).images[0], image)
    ranks = [epoch(make(root, recipe, DEVICES[recipe], Rank(rank, 2), batch_size=4)) for rank in range(2)]
    for one, *parts in zip(whole, *ranks, strict=True):
        assert [len(part) for part in parts] == [4, 4]
        assert torch.equal(one.ids, torch.cat([part.ids for part in parts]))
        assert torch.equal(one.images, torch.cat([part.images for part in parts]))
    first, second = (loader.samples([3, 5], number).images for number in (0, 1))
    other = make(root, recipe, DEVICES[recipe], seed=1).samples([3, 5], 0).images
    for each in (second, other):
        assert (first != each).flatten(1).any(1).all()


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not name.startswith(("albumentations", "torchvision"))])
def test_the_same_sample_on_either_device(root, recipe):
    std = 0.25 * 255  # no channel's is smaller
    for one, other in zip(epoch(make(root, recipe)), epoch(make(root, recipe, "gpu")), strict=True):
        assert torch.equal(one.ids, other.ids)
        assert (one.images - other.images).abs().mean() * std < LEVELS


def test_evaluation_is_every_recipes(root):
    wanted = None
    for recipe in RECIPES:
        loader = effloop.build_loader(config_of(root, recipe, "cpu", "augment.eval_ratio=0.9"), "val")
        batches = [replace(batch, images=batch.images.clone()) for batch in epoch(loader, 0)]
        assert_equal(batches, wanted := wanted or batches)

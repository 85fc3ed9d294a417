"""MixUp and CutMix against torchvision's, by hand, and against the laws they follow."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from laws import assert_same_law, keys, mixing
from plans import line
from torch import Tensor
from torchvision.transforms import v2

from effloop.data.augment.base import AugmentConfig
from effloop.data.augment.mix import MixDraws, symmetric_beta
from effloop.data.random import uniforms
from effloop.errors import ConfigError

CLASSES = 7
LAYOUTS = [torch.channels_last, torch.contiguous_format]
KINDS = {"mixup": (0.4, 0.0), "cutmix": (0.0, 1.0), "both": (0.4, 1.0)}


def batch(
    count: int = 32, size: tuple[int, int] = (24, 20), layout: Any = torch.channels_last
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    images = torch.randn(count, 3, *size, generator=generator).contiguous(memory_format=layout)
    return images, torch.randint(CLASSES, (count,), generator=generator)


def torchvisions(images: Tensor, targets: Tensor, draws: MixDraws) -> tuple[Tensor, Tensor]:
    """What torchvision makes of each image with its own parameters, picked from batches that all have them."""
    mixup, cutmix = v2.MixUp(num_classes=CLASSES), v2.CutMix(num_classes=CLASSES)
    rows = []
    for row, (cut, share, box) in enumerate(zip(draws.cut, draws.shares.tolist(), draws.boxes.tolist(), strict=True)):
        transform, given = (cutmix, {"box": box, "lam_adjusted": share}) if cut else (mixup, {"lam": share})
        params = {"labels": targets, "batch_size": len(images), **given}
        rows.append([transform.transform(part, params)[row] for part in (images, targets)])
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


@pytest.mark.parametrize(("kind", "layout"), [*((kind, LAYOUTS[0]) for kind in KINDS), ("both", LAYOUTS[1])])
def test_pixels_and_shares_are_torchvisions(kind, layout):
    mix = mixing(*KINDS[kind], CLASSES)
    images, targets = batch(layout=layout)
    before = images.clone()
    mixed, shares = mix(images, targets, keys(32))
    draws = mix.draw(keys(32), 24, 20)
    wanted_images, wanted_shares = torchvisions(images, targets, draws)
    torch.testing.assert_close(mixed, wanted_images, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shares, wanted_shares, rtol=1e-6, atol=1e-7)
    assert torch.equal(mixed[draws.cut], wanted_images[draws.cut])  # nothing is computed there
    assert {"mixup": {False}, "cutmix": {True}, "both": {False, True}}[kind] == set(draws.cut.tolist())
    assert mixed.is_contiguous(memory_format=layout)
    assert torch.equal(images, before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_strides_of_grey_images_stay(kind, layout):
    images = torch.empty(8, 1, 24, 20, memory_format=layout).fill_(1)
    mixed, _ = mixing(*KINDS[kind], CLASSES)(images, torch.arange(8) % CLASSES, keys(8))
    assert mixed.stride() == images.stride()


@pytest.mark.parametrize("kind", KINDS)
def test_uint8_is_rounded(kind):
    mix = mixing(*KINDS[kind], CLASSES)
    images = torch.randint(256, (32, 3, 9, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.zeros(32, dtype=torch.int64)
    mixed, shares = mix(images, targets, keys(32))
    exact, same_shares = mix(images.float(), targets, keys(32))
    assert mixed.dtype == torch.uint8
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(mixed.float(), exact.round())
    assert torch.equal(shares, same_shares)


@pytest.mark.parametrize("size", [(24, 24), (17, 40)])
def test_the_share_is_the_area_that_stayed(size):
    mix = mixing(0.0, 1.0, 1000)
    images = torch.arange(1000.0)[:, None, None, None].expand(1000, 3, *size).contiguous()
    mixed, shares = mix(images, torch.arange(1000), keys(1000))
    stayed = (mixed == images).float().mean(dim=(1, 2, 3))
    torch.testing.assert_close(shares.diagonal(), stayed, rtol=0, atol=1e-6)
    torch.testing.assert_close(mix.draw(keys(1000), *size).shares, stayed.double().numpy(), rtol=0, atol=1e-6)
    assert (stayed == 1).any()  # a box may be empty
    assert (stayed < 0.2).any()


@pytest.mark.parametrize("alpha", [0.05, 0.4, 1.0, 3.0])
def test_shares_follow_numpys_beta_law(alpha):
    shares = mixing(alpha, 0.0, CLASSES).draw(keys(10_000), 8, 8).shares
    wanted = np.random.default_rng(0).beta(alpha, alpha, 300_000)
    # Rounded, as an eighth of alpha 0.05 lies where float64 has few numbers left, or one: next to 1.
    assert_same_law(shares.round(12), wanted.round(12))
    assert np.quantile(shares, [0, 1]) == pytest.approx(np.quantile(wanted[:10_000], [0, 1]), abs=0.05)
    assert np.abs(np.corrcoef(shares[:-1], shares[1:])[0, 1]) < 0.03  # neighbours have nothing to do with each other


def test_boxes_follow_torchvisions_law():
    alpha, count = 0.7, 4000
    torch.manual_seed(0)
    transform = v2.CutMix(alpha=alpha, num_classes=CLASSES)
    image = torch.empty(1, 3, 200, 300)
    drawn = [transform.make_params([image]) for _ in range(count)]
    draws = mixing(0.0, alpha, CLASSES).draw(keys(count), 200, 300)
    assert_same_law(draws.shares, [each["lam_adjusted"] for each in drawn])
    for ours, theirs in zip(draws.boxes.T, np.array([each["box"] for each in drawn]).T, strict=True):
        assert_same_law(ours, theirs)


@pytest.mark.parametrize("alpha", [1e-300, 5e-324, 1e-3, 1e6, 1e300])
def test_extreme_alphas(alpha):
    numbers = np.concatenate(
        [uniforms(keys(1000), 2).T, [[0.0, 0.0, 1 - 2**-53, 1 - 2**-53], [0, 0.25, 0.25, 0.75]]], 1
    )
    with np.errstate(all="raise", under="ignore"):
        shares = symmetric_beta(np.full(1004, alpha), numbers)
    assert ((shares >= 0) & (shares <= 1)).all()
    assert np.abs(shares - 0.5)[:1000].mean() == pytest.approx(0.5 if alpha < 1 else 0, abs=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_depends_on_its_key_only(kind):
    mix = mixing(*KINDS[kind], CLASSES)
    together = mix.draw(keys(67), 224, 200)
    order = np.random.default_rng(0).permutation(67)
    shuffled = mix.draw(keys(67)[order], 224, 200)
    for name in ("cut", "shares", "boxes"):
        np.testing.assert_array_equal(getattr(together, name)[order], getattr(shuffled, name))
        for row in range(67):
            alone = mix.draw(keys(67)[row : row + 1], 224, 200)
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[row])
    assert len(set(together.shares)) > 60
    assert not np.array_equal(together.shares, mix.draw(keys(67, 1), 224, 200).shares)


def test_mixing_hangs_on_nothing_else_that_a_key_draws():
    draws = mixing(0.4, 1.0, CLASSES).draw(keys(10_000), 224, 224)
    crop = uniforms(keys(10_000), 23)  # of native's flip and box
    assert draws.cut.mean() == pytest.approx(0.5, abs=0.015)
    for ours in (draws.cut, draws.shares, draws.boxes[:, 0], draws.boxes[:, 1]):
        found = [np.corrcoef(ours, theirs)[0, 1] for theirs in crop.T]
        assert np.abs(found).max() < 0.04


def test_draws_are_what_they_always_were():
    """Changing these values changes everybody's batches: it needs a new major version."""
    draws = mixing(0.2, 1.0, CLASSES).draw(keys(6), 224, 224)
    assert draws.cut.tolist() == [True, True, True, True, False, False]
    assert draws.shares == pytest.approx([0.50562022, 0.39660395, 0.90704719, 0.68650351, 0.0, 0.6390146], abs=1e-7)
    assert draws.boxes.tolist() == [
        [67, 66, 224, 224],
        [47, 14, 221, 188],
        [171, 4, 224, 92],
        [0, 61, 121, 191],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]


def test_the_partner_is_the_image_before():
    images = torch.zeros(4, 3, 8, 8)
    images[1] = 1.0
    mixed, shares = mixing(1.0, 0.0, 4)(images, torch.arange(4), keys(4))
    assert mixed.flatten(1).any(dim=1).tolist() == [False, True, True, False]
    assert (shares > 0).nonzero().tolist() == [[0, 0], [0, 3], [1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]


@pytest.mark.parametrize("mode", ["pair", "batch"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pairs_and_batches_are_timms(kind, layout, mode, monkeypatch):
    """Pixels and targets by the same shares and boxes, some of which mix nothing."""
    module = pytest.importorskip("timm.data.mixup")
    for seed in range(6 if mode == "batch" else 1):
        images, targets = batch(layout=layout)
        mix = mixing(*KINDS[kind], CLASSES, mix=mode, mix_prob=0.7)
        draws = mix.draw(keys(32, seed), 24, 20)
        mixed, shares = mix(images, targets, keys(32, seed))
        cuts = iter(np.flatnonzero(draws.cut[: 1 if mode == "batch" else 16] & (draws.shares < 1)[:16]).tolist())

        def box(*_: Any, cuts: Any = cuts, draws: MixDraws = draws, **__: Any) -> tuple[Any, float]:
            left, top, right, bottom = draws.boxes[row := next(cuts)].tolist()
            return (top, bottom, left, right), draws.shares[row]

        monkeypatch.setattr(module, "cutmix_bbox_and_lam", box)
        oracle = module.Mixup(*KINDS[kind], mode=mode, label_smoothing=0, num_classes=CLASSES)
        oracle._params_per_elem = lambda count, draws=draws: (draws.shares[:count].copy(), draws.cut[:count])
        oracle._params_per_batch = lambda draws=draws: (draws.shares[0], draws.cut[0])
        wanted, wanted_shares = oracle(images.clone(), targets)
        torch.testing.assert_close(mixed, wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(shares.double(), wanted_shares.double(), rtol=1e-6, atol=1e-7)
        assert torch.equal(mixed[draws.cut], wanted[draws.cut])
        assert torch.equal(mixed[draws.shares == 1], images[draws.shares == 1])
        assert mixed.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_two_is_torchvisions(kind):
    """Where the image before is the one as far from the other end."""
    images, targets = batch(2)
    for seed in range(6):
        mix = mixing(*KINDS[kind], CLASSES, mix="batch")
        found, wanted = mix(images, targets, keys(2, seed)), mix.draw(keys(2, seed), 24, 20)
        torch.testing.assert_close(found, torchvisions(images, targets, wanted), rtol=1e-6, atol=1e-6)
        assert (wanted.boxes[0] == wanted.boxes[1]).all()
        assert wanted.shares[0] == wanted.shares[1]


@pytest.mark.slow
@pytest.mark.parametrize("size", [(224, 224), (33, 60)])
def test_pairs_and_batches_follow_timms_law(size):
    module, count = pytest.importorskip("timm.data.mixup"), 100_000
    np.random.seed(0)  # noqa: NPY002  timm draws from it
    theirs, cut = module.Mixup(0.2, 0.7, prob=0.8, switch_prob=0.3)._params_per_elem(count)
    theirs, cut = theirs.astype(np.float64), cut & (theirs < 1)  # as float32 values near 1 are rounded to others
    boxes = np.array([module.cutmix_bbox_and_lam(size, lam)[0] for lam in theirs[cut]])
    mix = mixing(0.2, 0.7, CLASSES, mix="pair", mix_prob=0.8, cutmix_share=0.3)
    draws = mix.draw(keys(2 * count), *size)
    found = MixDraws(draws.cut[:count], draws.shares[:count], draws.boxes[:count])
    assert_same_law(found.shares[~found.cut].round(6), theirs[~cut].round(6))
    for column, place in enumerate((2, 0, 3, 1)):
        assert_same_law(found.boxes[found.cut][:, column], boxes[:, place])
    area = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
    assert_same_law(found.shares[found.cut], 1 - area / (size[0] * size[1]))
    wanted = count * np.array([0.8 * 0.3, 1 - 0.8 * 0.3])
    counts = np.array([found.cut.sum(), (~found.cut).sum()])
    assert ((counts - wanted) ** 2 / wanted).sum() < 10.8  # chi-squared, one in 1,000 of 1 degree of freedom
    one = mixing(0.2, 0.7, CLASSES, mix="batch", mix_prob=0.8, cutmix_share=0.3)
    for row in range(20):
        single = one.draw(keys(2 * count)[row : row + 8], *size)
        assert (single.shares == draws.shares[row]).all()
        assert (single.boxes == draws.boxes[row]).all()


def test_an_image_in_the_middle_is_its_own_pair():
    images, targets = batch(5)
    for kind in KINDS.values():
        mixed, shares = mixing(*kind, CLASSES, mix="pair")(images, targets, keys(5))
        assert torch.equal(mixed[2], images[2])
        assert shares[2].tolist() == torch.nn.functional.one_hot(targets[2], CLASSES).tolist()
    for count in (0, 1):
        assert len(mixing(0.2, 1.0, CLASSES, mix="batch")(images[:count], targets[:count], keys(count))[0]) == count


def test_mixing_ends():
    images, targets = batch()
    mix = mixing(0.2, 1.0, CLASSES, mix="pair", mix_epochs=2)
    assert not torch.equal(mix(images, targets, keys(32), 1)[0], images)
    assert mix(images, targets, keys(32), 2) == (images, targets)


def test_config_refuses():
    for key, value, allowed in (
        ("mixup", -0.1, "a number above 0, or 0 for none"),
        ("mixup", math.inf, "a number above 0, or 0 for none"),
        ("cutmix", math.nan, "a number above 0, or 0 for none"),
        ("mix_prob", 1.1, "a probability from 0 to 1"),
        ("cutmix_share", math.nan, "a probability from 0 to 1"),
        ("mix_epochs", -1, "a whole number of epochs, or null"),
    ):
        with pytest.raises(ConfigError, match=line(f"augment.{key}: {value} is not allowed; set {allowed}")):
            AugmentConfig(**{"name": "native", key: value})

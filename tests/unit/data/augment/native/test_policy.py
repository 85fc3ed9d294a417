from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from laws import assert_same_law, keys, pictures, same_law_p
from laws import drawn as drawn_by
from torch import Tensor
from torchvision.transforms import v2

from effloop.data.augment.native.policy import NAMES, AugMix, AutoAugment, PolicyDraws, RandAugment, TrivialAugmentWide

NEAREST, BILINEAR = v2.InterpolationMode.NEAREST, v2.InterpolationMode.BILINEAR
# Levels of these are offset + scale * torchvision's magnitude.
CHANGED = dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), (1, 1)) | {"Solarize": (0, 255)}
WARPS = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")


def by_torchvision(
    image: Tensor, drawn: PolicyDraws, row: int, interpolation: v2.InterpolationMode, fill: Any
) -> Tensor:
    theirs = v2.RandAugment(interpolation=interpolation, fill=fill)
    for choice, level in zip(drawn.choice[row].tolist(), drawn.level[row].tolist(), strict=True):
        offset, scale = CHANGED.get(NAMES[choice], (0, 1))
        magnitude = (level - offset) / scale
        image = theirs._apply_image_or_video_transform(image, NAMES[choice], magnitude, interpolation, theirs._fill)
    return image


def one(policy: Any, image: Tensor, drawn: PolicyDraws, row: int) -> Tensor:
    pixels = image.permute(1, 2, 0).numpy().copy()
    policy.apply_inplace(pixels, drawn, row)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def apart(left: Tensor, right: Tensor) -> Tensor:
    """(3, H, W) levels between."""
    return (left.int() - right.int()).abs()


@pytest.mark.parametrize(("interpolation", "fill"), [(NEAREST, 0), (NEAREST, [200, 0, 9]), (BILINEAR, None)], ids=str)
@pytest.mark.parametrize("size", [(64, 64), (67, 53)], ids=str)
def test_each_of_the_14_is_torchvisions(size, interpolation, fill):
    count = 300
    policy, images = TrivialAugmentWide(interpolation=interpolation.value, fill=fill), pictures(count, *size)
    drawn = drawn_by(policy, count, size)
    assert min(Counter(drawn.choice[:, 0].tolist()).values()) > 5
    assert set(drawn.choice[:, 0]) == set(range(14))
    batch = policy.apply_batch(images.clone(memory_format=torch.channels_last), drawn)
    for row, image in enumerate(images):
        expected, name = by_torchvision(image, drawn, row, interpolation, fill), NAMES[drawn.choice[row, 0]]
        off = apart(expected, batch[row])
        # A shear's coordinates can lie on pixels' edges, along a row or two; see test_geometry.
        assert off.max() <= 1 or (name in WARPS and (off > 1).any(0).float().mean() < 0.02), (name, off.max())
        assert apart(one(policy, image, drawn, row), batch[row]).max() <= (0 if name in WARPS else 1), name


@pytest.mark.parametrize("magnitude", [0, 5, 9, 29, 30])
def test_operations_follow_one_another_as_torchvisions(magnitude):
    count, size = 100, (61, 80)
    policy, images = RandAugment(2, magnitude), pictures(count, *size)
    drawn = drawn_by(policy, count, size)
    batch = policy.apply_batch(images.clone(memory_format=torch.channels_last), drawn)
    for row, image in enumerate(images):
        off = apart(by_torchvision(image, drawn, row, NEAREST, 0), batch[row])
        # A level in the first may be a bit in a second that posterizes, or a bin in one that equalizes.
        assert (off > 0).any(0).float().mean() < 0.03
        assert (apart(one(policy, image, drawn, row), batch[row]) > 0).any(0).float().mean() < 0.02


def test_a_batch_changes_its_rows_only_by_their_own_draws():
    policy, images, count = RandAugment(3, 20), pictures(40, 48, 48), 40
    drawn = drawn_by(policy, count, (48, 48))
    whole = policy.apply_batch(images.clone(memory_format=torch.channels_last), drawn)
    assert whole.is_contiguous(memory_format=torch.channels_last)
    for rows in (slice(0, 1), slice(3, 17)):
        own = policy.draw(keys(count)[rows], np.full((count, 2), 48)[rows])
        assert torch.equal(policy.apply_batch(images[rows].clone(memory_format=torch.channels_last), own), whole[rows])


class _Recording:
    """A torchvision policy that notes what it applies, and applies nothing."""

    noted: list[tuple[str, float]]

    def _apply_image_or_video_transform(self, image: Tensor, name: str, magnitude: float, **_: Any) -> Tensor:
        offset, scale = CHANGED.get(name, (0, 1))
        whole = float(int(magnitude)) if name.startswith("Translate") else magnitude
        self.noted.append((name, offset + scale * whole))
        return image


class RecordingRand(_Recording, v2.RandAugment):
    pass


class RecordingTrivial(_Recording, v2.TrivialAugmentWide):
    pass


class RecordingAuto(_Recording, v2.AutoAugment):
    pass


class RecordingMix(_Recording, v2.AugMix):
    pass


def recorded(policy: Any, size: tuple[int, int], count: int) -> list[tuple[str, float]]:
    torch.manual_seed(0)
    policy.noted = []
    image = torch.empty(3, *size, dtype=torch.uint8)
    for _ in range(count):
        policy(image)
    return list(policy.noted)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RandAugment(), RecordingRand()),
        (RandAugment(1, 3, 7), RecordingRand(1, 3, 7)),
        (TrivialAugmentWide(), RecordingTrivial()),
        (TrivialAugmentWide(5), RecordingTrivial(5)),
        *[(AutoAugment(name), RecordingAuto(v2.AutoAugmentPolicy(name))) for name in ("imagenet", "cifar10", "svhn")],
        (AugMix(), RecordingMix()),
        (AugMix(7, 2, 4, all_ops=False), RecordingMix(7, 2, 4, all_ops=False)),
    ],
)
@pytest.mark.nightly
def test_operations_magnitudes_and_signs_are_distributed_as_torchvisions(ours, theirs):
    count, size = 10_000, (224, 160)
    noted = Counter(recorded(theirs, size, count))
    drawn = drawn_by(ours, count, size)
    got = Counter(zip([NAMES[place] for place in drawn.choice.flat], drawn.level.flat, strict=True))
    if not isinstance(ours, RandAugment | TrivialAugmentWide):  # what isn't done is Identity here
        got = Counter({what: found for what, found in got.items() if what[0] != "Identity"})
    assert set(got) == set(noted)  # every level, to the bit
    assert same_law_p(got, noted) > 0.001


def test_the_second_operation_is_independent_of_the_first():
    count = 20_000
    drawn = drawn_by(RandAugment(), count, (32, 32))
    pairs = np.bincount(drawn.choice[:, 0] * 14 + drawn.choice[:, 1], minlength=196)
    squares = float(((pairs - count / 196) ** 2 / (count / 196)).sum())
    assert 195 - 4 * (2 * 195) ** 0.5 < squares < 195 + 4 * (2 * 195) ** 0.5
    signs = np.sign(signed(drawn)[np.isin(drawn.choice, range(1, 10)).all(axis=1)])
    assert abs((signs[:, 0] * signs[:, 1]).mean()) < 4 / len(signs) ** 0.5


def signed(drawn: PolicyDraws) -> Any:
    return drawn.level - np.isin(drawn.choice, range(6, 10))


@pytest.mark.parametrize(("width", "how", "fill"), [(3, BILINEAR, None), (2, NEAREST, [9, 99, 199])])
def test_augmix_mixes_as_torchvisions(width, how, fill):
    ours = AugMix(5, width, interpolation=how.value, fill=fill)
    images, count = pictures(30, 61, 53), 30
    drawn = drawn_by(ours, count, (61, 53))
    batch = ours.apply_batch(images.clone(memory_format=torch.channels_last), drawn)
    for row, image in enumerate(images):
        assert drawn.shares is not None
        mixed = drawn.shares[row, 0] * image
        for chain in range(width):
            steps = slice(3 * chain, 3 * chain + 3)
            some = PolicyDraws(drawn.choice[:, steps], drawn.level[:, steps], drawn.matrix, drawn.sampling)
            mixed = mixed + drawn.shares[row, 1 + chain] * by_torchvision(image, some, row, how, fill)
        off = apart(mixed.to(torch.uint8), batch[row])
        assert (off > 1).any(0).float().mean() < 0.02
        assert apart(one(ours, image, drawn, row), batch[row]).max() <= 1


def test_shares_of_augmix_are_uniform():
    shares = drawn_by(AugMix(), 20_000).shares
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-6)
    generator = torch.Generator().manual_seed(0)
    mixed = torch.rand(20_000, 1, generator=generator)
    parts = -torch.rand(20_000, 3, generator=generator).log()
    parts = parts / parts.sum(1, keepdim=True)
    for column, wanted in enumerate(torch.cat([1 - mixed, mixed * parts], 1).T):
        assert_same_law(shares[:, column], wanted)


def test_no_operations_and_no_images_are_allowed():
    images = pictures(3, 20, 20)
    nothing = RandAugment(num_ops=0)
    assert torch.equal(nothing.apply_batch(images.clone(), drawn_by(nothing, 3, (20, 20))), images)
    policy = RandAugment()
    assert policy.apply_batch(images[:0].clone(), drawn_by(policy, 0, (20, 20))).shape == (0, 3, 20, 20)

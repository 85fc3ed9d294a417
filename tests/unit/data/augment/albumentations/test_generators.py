from __future__ import annotations

import numpy as np

from effloop.data.augment.albumentations.generators import Generators, KeyedRandom
from effloop.data.random import uniforms, words

KEYS = np.array([0, 1, 12345678901234567, 2**64 - 1], np.uint64)


def test_pythons_numbers_are_the_keys() -> None:
    for key in KEYS:
        generator = KeyedRandom(int(key))
        assert [generator.random() for _ in range(9)] == uniforms(np.array([key]), 9)[0].tolist()
        generator.seed(int(key))
        first, second, third = words(np.array([key]), 0, 3)[0].tolist()
        assert generator.getrandbits(64) == first
        assert generator.getrandbits(96) == (second << 64 | third) >> 32
        assert generator.getrandbits(0) == 0


def test_numpys_numbers_are_philoxs() -> None:
    generators = Generators()
    for key in KEYS.tolist():
        generators.seed(key)
        wanted = np.random.Generator(np.random.Philox(key=key))
        np.testing.assert_array_equal(generators.numpy.random(9), wanted.random(9))
        assert generators.numpy.integers(5, dtype=np.uint32) == wanted.integers(5, dtype=np.uint32)


def test_nothing_is_left_of_the_key_before() -> None:
    generators = Generators()
    generators.seed(7)
    wanted = generators.numpy.integers(1000, dtype=np.uint32), generators.python.gauss()
    generators.numpy.integers(1000, size=4, dtype=np.uint32)
    generators.seed(7)
    assert (generators.numpy.integers(1000, dtype=np.uint32), generators.python.gauss()) == wanted


def test_pythons_are_uniform() -> None:
    generator = KeyedRandom(3)
    counts = np.bincount([generator.randrange(10) for _ in range(10_000)], minlength=10)
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9  # chi square with 9 degrees, 1 in 1000
    some = list(range(30))
    generator.shuffle(some)
    assert sorted(some) == list(range(30)) != some
    assert len(set(generator.sample(some, 10))) == 10
    gaussian = np.array([generator.gauss() for _ in range(10_000)])
    assert abs(gaussian.mean()) < 0.04
    assert abs(gaussian.std() - 1) < 0.03

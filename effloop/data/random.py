"""Order and random numbers as functions of a key: no state, the same on any worker.

The mixer is SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
One NumPy generator per sample would take 11 µs; here 23 numbers of a sample take 0.05, by native/random.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.lazy import Tensor, torch
from effloop.native import address, function
from effloop.system.cached import cached_property

Uint64s = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MASK = (1 << 64) - 1
_ORDER, _SAMPLE, _STREAM, _TEXT, _DRAW = range(1, 6)  # purposes of keys, so that order and pixels never share numbers


def _mix(x: Uint64s) -> Uint64s:
    """SplitMix64's finaliser, elementwise: every input bit changes half of the output's."""
    for shift, factor in _MIXING:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=1024)
def derive(*parts: int) -> int:
    """One 64-bit key from several integers in this order; 15 µs, cached."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = _mix(key + np.uint64((part * _GOLDEN + _GOLDEN) & _MASK))
    return int(key[0])


def sample_keys(seed: int, epoch: int, ids: NDArray[np.int64]) -> Uint64s:
    """(N,) ids -> (N,) uint64, the key of each sample's random numbers in this epoch."""
    return _keyed("effloop_sample_keys", np.ascontiguousarray(ids, np.int64), derive(_SAMPLE, seed, epoch))


def alternating(keys: Uint64s, seed: int, epoch: int, ids: NDArray[np.int64]) -> Uint64s:
    """`sample_keys` with another lowest bit: the same in every second epoch, the other one between."""
    bits = (sample_keys(seed, 0, ids) ^ np.uint64(epoch)) & np.uint64(1)
    return (keys & ~np.uint64(1)) | bits


def stream(keys: Uint64s, salt: int) -> Uint64s:
    """(N,) keys -> (N,) keys of independent random numbers for the same samples, by salt."""
    return _keyed("effloop_stream", np.ascontiguousarray(keys), derive(_STREAM, salt))


def _keyed(name: str, values: NDArray[Any], key: int) -> Uint64s:
    """(N,) values -> (N,) keys."""
    out = np.empty(len(values), np.uint64)
    function(name, "plkp")(address(values), len(values), key, address(out))
    return out


def words(keys: Uint64s, first: int, count: int) -> Uint64s:
    """(N,) keys -> (N, count) uint64, each key's numbers from `first` on; row i depends on keys[i] alone."""
    keys, out = np.ascontiguousarray(keys), np.empty((len(keys), count), np.uint64)
    function("effloop_words", "plllp")(address(keys), len(keys), first, count, address(out))
    return out


def uniforms(keys: Uint64s, count: int) -> NDArray[np.float64]:
    """(N,) keys -> (N, count) float64 in [0, 1), the first of each key's stream."""
    keys, out = np.ascontiguousarray(keys), np.empty((len(keys), count))
    function("effloop_uniforms", "pllp")(address(keys), len(keys), count, address(out))
    return out


def hashes(texts: Sequence[bytes], seed: int) -> Uint64s:
    """(N,) keyed hashes of byte strings: each depends on its bytes and the seed alone. 0.4 µs for 22 bytes."""
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    starts = np.cumsum(sizes) - sizes
    data = b"".join(texts) + bytes(8)
    eights = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))  # the eight bytes from each byte on
    found = _mix(sizes.astype(np.uint64) + np.uint64(derive(_TEXT, seed)))
    for start in range(0, int(sizes.max(initial=0)), 8):
        rows = np.flatnonzero(sizes > start)
        left = np.minimum(sizes[rows] - start, 8).astype(np.uint64)
        eight = eights[starts[rows] + start] & (np.uint64(_MASK) >> np.uint64(8) * (np.uint64(8) - left))
        found[rows] = _mix((found[rows] ^ eight) + np.uint64(_GOLDEN))
    return found


def words_on_device(keys: Tensor, first: int, count: int) -> Tensor:
    """`words` on the keys' device: (N,) int64 -> (N, count) int64, the same bits as uint64."""
    steps = torch.arange(first + 1, first + count + 1, device=keys.device) * _signed(_GOLDEN)
    x = keys[:, None] + steps
    for shift, factor in _MIXING:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 31)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


@dataclass(frozen=True)
class Permutation:
    """A keyed permutation of range(size), evaluated at single positions: no array of that length.

    A Feistel network over the next power of two, iterated until the value is inside (Black and Rogaway
    2002, "Ciphers with arbitrary finite domains"); 100 million samples cost what ten do.
    """

    size: int
    key: int

    _ROUNDS = 8  # even, so that the halves end where they began

    @classmethod
    def of_epoch(cls, size: int, seed: int, epoch: int) -> Permutation:
        return cls(size, derive(_ORDER, seed, epoch))

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) positions in range(size) -> (N,) int64, the elements at these positions."""
        # At least 6 bits: with fewer, the halves are so small that some orders never come up.
        bits = max(6, (self.size - 1).bit_length())
        values = self._encrypt(positions.astype(np.uint64), bits)
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            values[outside] = self._encrypt(values[outside], bits)
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    @cached_property
    def _round_keys(self) -> list[np.uint64]:
        return [np.uint64(derive(self.key, number)) for number in range(self._ROUNDS)]

    def _encrypt(self, x: Uint64s, bits: int) -> Uint64s:
        low_bits, high_bits = bits // 2, bits - bits // 2
        high, low = x >> np.uint64(low_bits), x & np.uint64((1 << low_bits) - 1)
        for number, key in enumerate(self._round_keys):
            # The halves and their widths swap each round.
            width = high_bits if number % 2 == 0 else low_bits
            noise = _mix(low + key)
            high, low = low, high ^ (noise & np.uint64((1 << width) - 1))
        return (high << np.uint64(low_bits)) | low

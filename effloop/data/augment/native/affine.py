"""Affine warps, each image with its own matrix; RandomRotation and RandomAffine, with torchvision's pixels or Pillow's.

torchvision multiplies its grid by a matrix product, whose rounding depends on the library. Here the same product is
written out in float32, so that a GPU, a CPU and a single image choose the same pixels, and TF32, which a model may use,
doesn't affect coordinates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from effloop.data.augment import operation as ops
from effloop.data.image.mask import IGNORED, Mask
from effloop.data.image.pixels import opencv
from effloop.data.random import uniforms
from effloop.lazy import F, Tensor, torch

Floats = NDArray[np.float64]
Matrices = NDArray[np.float64]

# Pixels at once. A CPU's caches hold 2 images of 224x224: nearest takes 300 µs per image, 680 with 20 at once. On a GPU
# 167 images: they take 250 MB, 360 with bilinear, whatever the batch size.
_ON_CPU, _ON_GPU = 1 << 17, 1 << 23


@dataclass(frozen=True)
class Sampling:
    """Interpolation, and the fill of pixels from outside."""

    bilinear: bool = False  # else nearest
    # of each channel: red, green, blue. As in torchvision, `bilinear` darkens border pixels twice with a fill, even 0,
    # and once without
    fill: tuple[float, ...] | None = None
    # BILINEAR or BICUBIC by Pillow's rules instead: `fill` where the source lies outside of the image, else the
    # border's pixels repeated; truncated, not rounded
    pillow: PIL.Image.Resampling | None = None

    @classmethod
    def of(cls, interpolation: object, fill: object) -> Sampling:
        """From an operation's parameters."""
        if interpolation not in ("nearest", "bilinear"):
            raise ops.bad("interpolation", interpolation, "nearest or bilinear")
        levels = None if fill is None else ops.check_levels("fill", fill, whole=False, other=", or null")
        return cls(interpolation == "bilinear", levels)


_MASKS = Sampling(fill=(float(IGNORED),))


def inverse_matrices(
    angle: Floats | float = 0.0,
    translate: Floats | float = 0.0,
    scale: Floats | float = 1.0,
    shear: Floats | float = 0.0,
    centre: Floats | float = 0.0,
) -> Matrices:
    """Output to input coordinates: torchvision's `affine` with these parameters, for N images.

    Args:
        angle: (N,) degrees, clockwise. For torchvision's `rotate` pass `-(angle % 360)`.
        translate: (N, 2) pixels to the right and down.
        scale: (N,) above 0.
        shear: (N, 2) degrees, x and y.
        centre: (N, 2) fixed point, x and y in pixels from the image's centre.

    Returns:
        (N, 2, 3), in pixels from the image's centre.
    """
    angle, scale = np.radians(angle), np.asarray(scale)
    (sx, sy), (cx, cy), (tx, ty) = (_pair(value) for value in (np.radians(shear), centre, translate))
    a = np.cos(angle - sy) / np.cos(sy)
    b = -(a * np.tan(sx) + np.sin(angle))
    c = np.sin(angle - sy) / np.cos(sy)
    d = np.cos(angle) - c * np.tan(sx)
    xx, xy, yx, yy = d / scale, -b / scale, -c / scale, a / scale
    x = cx - xx * (cx + tx) - xy * (cy + ty)
    y = cy - yx * (cx + tx) - yy * (cy + ty)
    rows = np.broadcast_arrays(xx, xy, x, yx, yy, y)
    return np.stack(rows, axis=-1).reshape(-1, 2, 3)


def warp(images: Tensor, matrices: Matrices, sampling: Sampling) -> Tensor:
    """Warp each image by its own matrix, without a sync.

    Args:
        images: (N, C, H, W) uint8, channels_last, as what is returned.
        matrices: (N, 2, 3) of `inverse_matrices`.
        sampling: how; with C numbers to fill with.
    """
    height, width = images.shape[-2:]
    terms = ops.to_device(_relative(matrices, height, width), images)
    result = torch.empty_like(images)
    fill = None if sampling.fill is None else ops.to_device(np.array(sampling.fill, np.float32), images)
    sample = _bilinear if sampling.bilinear else _nearest
    if sampling.pillow is not None:
        sample = functools.partial(_pillow, taps=2 if sampling.pillow is PIL.Image.Resampling.BILINEAR else 4)
    step = max(1, (_ON_GPU if images.is_cuda else _ON_CPU) // (height * width))
    for at in range(0, len(images), step):
        x, y = _grid(terms[at : at + step], height, width)
        result[at : at + step] = sample(images[at : at + step], x, y, fill)
    return result


def warp_one(image: ops.Image, matrix: Matrices, sampling: Sampling) -> None:
    """`warp` for one (H, W, C) uint8 image, in place, on the host, with the same pixels; matrix: (2, 3).

    Nearly all of it without the GIL: 120 to 260 µs at 224x224, torchvision takes 770; `bilinear` 800 to 950,
    torchvision 900 to 1,150; `pillow` 1,150 and 2,700, with Pillow's own pixels, while `warp` has them within
    1 level but for a border's pixel here and there.
    """
    if sampling.pillow is not None:
        _pillow_one(image, matrix, sampling)
        return
    if sampling.bilinear:
        batch = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
        batch.copy_(warp(batch, matrix[None], sampling))
        return
    height, width = image.shape[:2]
    horizontal, vertical = _relative(matrix, height, width).tolist()
    x, y = _places(horizontal, height, width, width), _places(vertical, height, width, height)
    border = [round(value) for value in sampling.fill or (0.0, 0.0, 0.0)]
    image[...] = opencv().remap(image, x, y, opencv().INTER_NEAREST, borderValue=border).reshape(image.shape)


def warp_masks(masks: Tensor, matrices: Matrices) -> Tensor:
    """`warp` for (N, H, W) uint8 masks, by nearest neighbour; what was outside is `IGNORED`."""
    return warp(masks[:, None], matrices, _MASKS)[:, 0]


def warp_mask(mask: Mask, matrix: Matrices) -> Mask:
    """`warp_masks` for one (H, W) uint8 mask, which isn't written, on the host; matrix: (2, 3)."""
    warped = np.array(mask)
    warp_one(warped[:, :, None], matrix, _MASKS)
    return warped


def _relative(matrices: Matrices, height: int, width: int) -> NDArray[np.float32]:
    """In units of half the image's sides, as in torch's grids."""
    return np.divide(matrices, np.array([[0.5 * width], [0.5 * height]], np.float32), dtype=np.float32)


def _ramp(length: int, device: torch.device | None = None) -> Tensor:
    """(length,) float32: pixels from the centre."""
    return torch.arange(0.5 * (1 - length), 0.5 * (1 + length), device=device)


def _grid(terms: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """(N, 2, 3) -> x and y of the source, (N, H, W) float32, -1 and 1 at the image's outer edges."""
    columns, rows = _ramp(width, terms.device), _ramp(height, terms.device)
    by_x = (terms[:, :, 0, None] * columns)[:, :, None, :]
    by_y = (terms[:, :, 1, None] * rows)[:, :, :, None]
    x, y = ((by_x[:, axis] + by_y[:, axis]).add_(terms[:, axis, 2, None, None]) for axis in (0, 1))
    return x, y


def _nearest(images: Tensor, x: Tensor, y: Tensor, fill: Tensor | None) -> Tensor:
    count, channels, height, width = images.shape
    # All pixels from outside are in a border of one pixel: masks took twice the time of the rest.
    framed = torch.empty((count, height + 2, width + 2, channels), dtype=torch.uint8, device=images.device)
    framed[:, :: height + 1] = framed[:, :, :: width + 1] = 0 if fill is None else fill.round().to(torch.uint8)
    framed[:, 1:-1, 1:-1] = images.permute(0, 2, 3, 1)
    # add, mul, sub, round: grid_sample's own steps.
    column = x.add_(1).mul_(0.5 * width).sub_(0.5).round_().clamp_(-1, width).int()
    index = y.add_(1).mul_(0.5 * height).sub_(0.5).round_().clamp_(-1, height).int().mul_(width + 2).add_(column)
    first = torch.arange(count, device=images.device) * ((height + 2) * (width + 2)) + (width + 3)
    index += first[:, None, None]
    pixels = framed.view(-1, channels).index_select(0, index.view(-1))
    return pixels.view(count, height, width, channels).permute(0, 3, 1, 2)


def _bilinear(images: Tensor, x: Tensor, y: Tensor, fill: Tensor | None) -> Tensor:
    count, _, height, width = images.shape
    source = torch.empty((count, 3 if fill is None else 4, height, width), device=images.device)
    source[:, :3] = images
    source[:, 3:] = 1
    result = F.grid_sample(source, torch.stack((x, y), -1), "bilinear", "zeros", align_corners=False)
    if fill is not None:
        fill = fill[:, None, None]
        result = result[:, :3].sub_(fill).mul_(result[:, 3:]).add_(fill)
    return result.round_().to(torch.uint8)


def _pillow(images: Tensor, x: Tensor, y: Tensor, fill: Tensor, taps: int) -> Tensor:
    count, channels, height, width = images.shape
    pixels = images.permute(0, 2, 3, 1).reshape(-1, channels)
    column, row = x.add_(1).mul_(0.5 * width), y.add_(1).mul_(0.5 * height)
    inside = ((column >= 0) & (column < width) & (row >= 0) & (row < height))[..., None]
    left, above = column.sub_(0.5).floor(), row.sub_(0.5).floor()
    right, down = column.sub_(left)[..., None], row.sub_(above)[..., None]
    first = torch.arange(count, device=images.device)[:, None, None] * (height * width)
    offsets, lines = range(1 - taps // 2, 1 + taps // 2), []
    for line in offsets:
        start = (above + line).clamp_(0, height - 1).long().mul_(width).add_(first)
        places = [(left + place).clamp_(0, width - 1).long().add_(start).view(-1) for place in offsets]
        lines.append(_interpolated([pixels[at].view(*x.shape, channels).to(torch.float32) for at in places], right))
    values = _interpolated(lines, down).clamp_(0, 255).to(torch.uint8)
    return values.where(inside, fill.round().to(torch.uint8)).permute(0, 3, 1, 2)


def _interpolated(values: Sequence[Tensor], share: Tensor) -> Tensor:
    """Between the two in the middle: of 2 values the line, of 4 the cubic of Pillow's Geometry.c (Keys 1981)."""
    if len(values) == 2:
        return torch.addcmul(values[0], values[1] - values[0], share)
    a, b, c, d = values
    cubic = torch.addcmul(2 * (a - b) + c - d, b - a + d - c, share)
    return torch.addcmul(b, torch.addcmul(c - a, cubic, share), share)


def _pillow_one(image: ops.Image, matrix: Matrices, sampling: Sampling) -> None:
    height, width = image.shape[:2]
    (a, b, c), (d, e, f) = matrix.tolist()
    # From the image's corner instead of its centre.
    terms = a, b, c + 0.5 * (width - a * width - b * height), d, e, f + 0.5 * (height - d * width - e * height)
    fill = tuple(round(level) for level in sampling.fill or (0.0, 0.0, 0.0))
    assert sampling.pillow is not None
    whole, affine = PIL.Image.fromarray(image), PIL.Image.Transform.AFFINE
    image[...] = np.asarray(whole.transform((width, height), affine, terms, sampling.pillow, fillcolor=fill))


def _places(terms: Sequence[float], height: int, width: int, side: int) -> NDArray[np.float32]:
    """One coordinate's 3 terms -> (H, W) float32, the source's column (or row) by pixel, whole numbers.

    With NumPy, which starts no threads; along one axis where it depends on one only, as in most warps of a policy.
    """
    by_x, by_y, shift = terms
    columns, rows = _ramp(width).numpy(), _ramp(height).numpy()[:, None]
    if by_y == 0:
        at = (columns * by_x)[None]
    elif by_x == 0:
        at = rows * by_y
    else:
        at = columns * by_x + rows * by_y
    at += shift
    at += 1
    at *= 0.5 * side
    at -= 0.5
    return np.ascontiguousarray(np.broadcast_to(np.rint(at, out=at), (height, width)))


def _pair(value: Floats | float) -> tuple[Any, Any]:
    both = np.asarray(value)
    return (both[..., 0], both[..., 1]) if both.ndim else (both, both)


class _Warp(ops.PixelOperation):
    """Draws `inverse_matrices`, one for each image."""

    takes_masks = True
    _sampling: Sampling

    def apply_inplace(self, image: ops.Image, drawn: Matrices, row: int) -> None:
        warp_one(image, drawn[row], self._sampling)

    def apply_batch(self, images: Tensor, drawn: Matrices) -> Tensor:
        return warp(images, drawn, self._sampling)

    def apply_mask(self, mask: Mask, drawn: Matrices, row: int) -> Mask:
        return warp_mask(mask, drawn[row])

    def apply_mask_batch(self, masks: Tensor, drawn: Matrices) -> Tensor:
        return warp_masks(masks, drawn)


@ops.operation
class RandomRotation(_Warp):
    """Rotation by a uniform angle about the centre; what was outside is filled.

    Args:
        degrees: [smallest, largest], counter-clockwise; a number is [-number, number].
        interpolation: `nearest` or `bilinear`.
        fill: a level of 0..255, or three.
    """

    def __init__(self, degrees: Any, interpolation: str = "nearest", fill: Any = 0) -> None:
        self._degrees = _angles("degrees", degrees)
        self._sampling = Sampling.of(interpolation, fill)

    def draw(self, keys: ops.Keys, sizes: ops.Sizes) -> Matrices:
        return inverse_matrices(angle=-(_between(self._degrees, uniforms(keys, 1)[:, 0]) % 360))


@ops.operation
class RandomAffine(_Warp):
    """Rotation, translation, scaling and shear, each uniform; what was outside is filled.

    Args:
        degrees: [smallest, largest], clockwise; a number is [-number, number].
        translate: largest shift in either direction, as a share of the width and of the height.
        scale: [smallest, largest], 0.001 to 1,000.
        shear: [smallest, largest] in degrees along x, two more along y; a number is [-number, number] along x.
        interpolation: `nearest` or `bilinear`.
        fill: a level of 0..255, or three.
    """

    def __init__(
        self,
        degrees: Any,
        translate: Any = None,
        scale: Any = None,
        shear: Any = None,
        interpolation: str = "nearest",
        fill: Any = 0,
    ) -> None:
        self._degrees = _angles("degrees", degrees)
        self._translate = _shares(translate)
        self._scale = (1.0, 1.0) if scale is None else ops.check_range("scale", scale, *ops.RATIOS)
        self._shear_x, self._shear_y = _shears(shear)
        self._sampling = Sampling.of(interpolation, fill)

    def draw(self, keys: ops.Keys, sizes: ops.Sizes) -> Matrices:
        angle, move_x, move_y, scale, shear_x, shear_y = uniforms(keys, 6).T
        reach = np.array(self._translate) * sizes[:, ::-1]
        return inverse_matrices(
            angle=_between(self._degrees, angle),
            translate=np.rint(reach * (2 * np.stack((move_x, move_y), axis=1) - 1)),
            scale=_between(self._scale, scale),
            shear=np.stack((_between(self._shear_x, shear_x), _between(self._shear_y, shear_y)), axis=1),
        )


def _between(bounds: tuple[float, float], numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    return bounds[0] + (bounds[1] - bounds[0]) * numbers


def _angles(name: str, value: object) -> tuple[float, float]:
    if isinstance(value, Sequence):
        return ops.check_range(name, value, -360, 360)
    largest = ops.check_number(name, value, 0, 360)
    return -largest, largest


def _shares(translate: object) -> tuple[float, float]:
    pair = [0.0, 0.0] if translate is None else ops.as_list(translate)
    if len(pair) != 2 or not all(type(share) in (int, float) and 0 <= share <= 1 for share in pair):
        raise ops.bad("translate", translate, "[of the width, of the height], 0 to 1")
    return float(pair[0]), float(pair[1])


def _shears(shear: object) -> tuple[tuple[float, float], tuple[float, float]]:
    if len(four := ops.as_list(shear)) == 4:
        return _angles("shear", four[:2]), _angles("shear", four[2:])
    return _angles("shear", 0 if shear is None else shear), (0.0, 0.0)

"""The operations of `kernels`, for one image on the host, in place: the same pixels, except `hue`.

An image is (H, W, 3) uint8 RGB, contiguous; it is written. Every pass over the pixels releases the GIL and uses one
thread; the fewer the better, as each then waits for the GIL: 45 short ones took 403 µs per image with one thread,
624 with two. torch multiplies and adds floats (rounding once, as in `kernels`); NumPy converts to uint8, in 12 µs at
224x224 where torch takes 81; OpenCV does what neither of them offers.
"""

from __future__ import annotations

import numpy as np
import PIL.Image
import PIL.ImageOps
from numpy.typing import NDArray

from effloop.data.augment.native import kernels
from effloop.data.image.pixels import opencv
from effloop.lazy import Tensor, torch

Image = NDArray[np.uint8]

# Luma is a multiple of 0.0001 with an error below half of that: whole numbers must not be rounded down.
_LUMA = np.array([[*kernels.LUMA, 5e-5]], np.float32)


def brightness(image: Image, factor: float) -> None:
    """As `kernels.brightness`."""
    _look_up(image, torch.arange(256.0).mul_(float(np.float32(factor))))


def contrast(image: Image, factor: float, rest: float) -> None:
    """As `kernels.contrast`."""
    mean = float(_luma(_floats(image)).mean(dtype=torch.float64).to(torch.float32))
    _look_up(image, torch.arange(256.0).mul_(float(np.float32(factor))).add_(mean, alpha=rest))


def saturation(image: Image, factor: float, rest: float) -> None:
    """As `kernels.saturation`."""
    floats = _floats(image)
    # Repeated: torch takes 84 µs to add one plane to three at 224x224, OpenCV 11 to repeat it.
    other = torch.from_numpy(opencv().cvtColor(_luma(floats).numpy(), opencv().COLOR_GRAY2RGB))
    floats.mul_(float(np.float32(factor))).add_(other, alpha=rest)
    _write(image, floats.clamp_(0, 255) if factor > 1 else floats)


def sharpness(image: Image, factor: float, rest: float) -> None:
    """As `kernels.sharpness`."""
    height, width = image.shape[:2]
    if min(height, width) <= 2:
        return
    # All rows as one: 4 µs per pass at 224x224; row by row 28.
    row = 3 * width
    pixels = image.reshape(-1).astype(np.uint16)
    high = pixels[: -2 * row] + pixels[row:-row]
    high += pixels[2 * row :]
    nine = high[:-6] + high[3:-3]
    nine += high[6:]
    inner = pixels[row + 3 : -row - 3]
    nine += 4 * inner
    nine += 6
    nine //= 13  # thirteenths, rounded
    change = np.zeros(image.shape, np.int16)
    np.subtract(nine.view(np.int16), inner.view(np.int16), out=change.reshape(-1)[row + 3 : -row - 3])
    change[:, 0] = change[:, -1] = 0
    floats = _floats(image).add_(torch.from_numpy(change).to(torch.float32), alpha=rest)
    _write(image, floats.clamp_(0, 255) if factor > 1 else floats)


def hue(image: Image, shift: float) -> None:
    """As `kernels.hue`, except for 1 level in about one value of 10,000.

    The kernel takes 415 µs at 224x224, OpenCV 153, with 40 fewer calls that release the GIL.
    """
    cv2, floats = opencv(), image.astype(np.float32)
    cv2.cvtColor(floats, cv2.COLOR_RGB2HSV, floats)
    cv2.add(floats, (360 * (float(shift) % 1), 0, 0, 0), floats)  # negative hues wouldn't wrap around
    cv2.cvtColor(floats, cv2.COLOR_HSV2RGB, floats)
    floats *= np.float32(kernels.TOP / 255)
    np.copyto(image, floats, casting="unsafe")


def posterize(image: Image, bits: float) -> None:
    """As `kernels.posterize`."""
    np.bitwise_and(image, np.uint8(min(256 - (256 >> int(bits)), 255)), out=image)


def solarize(image: Image, threshold: float) -> None:
    """As `kernels.solarize`."""
    first = np.clip(np.ceil(np.float32(threshold)), 0, 256)
    if first < 256:
        turned = np.greater_equal(image, np.uint8(first)).view(np.uint8)
        np.bitwise_xor(image, np.negative(turned, out=turned), out=image)


def autocontrast(image: Image) -> None:
    """As `kernels.autocontrast`."""
    low = image.min(0).min(0).astype(np.float32)  # by rows first: 10 µs at 224x224; by both at once, 687
    span = image.max(0).max(0) - low
    if (span == 255).all():
        return
    flat = span == 0
    low[flat], scale = 0, span * np.float32(1 / 255)
    scale[flat] = 1
    width = image.shape[1]
    floats = _floats(image).numpy().reshape(len(image), -1)
    floats -= np.tile(low, width)
    floats /= np.tile(scale, width)
    np.copyto(image.reshape(floats.shape), floats, casting="unsafe")


def equalize(image: Image) -> None:
    """As `kernels.equalize`."""
    # 370 µs at 224x224 between other operations; by OpenCV's histogram and the kernel's tables 510
    np.copyto(image, np.asarray(PIL.ImageOps.equalize(PIL.Image.fromarray(image))))


def solarize_add(image: Image, amount: float) -> None:
    """As `kernels.solarize_add`."""
    table = np.arange(256, dtype=np.uint8)
    table[:128] += np.uint8(amount)
    opencv().LUT(image, table, image)


def blur(image: Image, sigma: float) -> None:
    """As `kernels.blur`."""
    mean, one = kernels.mean_weights(torch.tensor([sigma]))[0].numpy(), np.ones(1, np.float32)
    for across, down in [(mean, one)] * 3 + [(one, mean)] * 3:
        convolve(image, across, down, opencv().BORDER_REPLICATE)


def convolve(image: Image, across: NDArray[np.float32], down: NDArray[np.float32], border: int) -> None:
    """Convolve with (k,) horizontal and (l,) vertical weights; OpenCV's rule for what lies beyond the `border`."""
    cv2 = opencv()
    # By float32: from uint8 to uint8 OpenCV rounds the weights to 8 bits.
    values = cv2.sepFilter2D(image, cv2.CV_32F, across, down, borderType=border)
    cv2.convertScaleAbs(values, image)  # rounds


def grayscale(image: Image) -> None:
    """As `kernels.grayscale`."""
    opencv().cvtColor(_luma(_floats(image)).numpy().astype(np.uint8), opencv().COLOR_GRAY2RGB, image)


def invert(image: Image) -> None:
    """As `kernels.invert`."""
    np.invert(image, out=image)


def _floats(image: Image) -> Tensor:
    """(H, W, 3) float32, new."""
    return torch.from_numpy(image).to(torch.float32)


def _luma(floats: Tensor) -> Tensor:
    """(H, W) float32 whole numbers, as in `kernels` except for 3 of the 16.7 million colours."""
    return torch.from_numpy(opencv().transform(floats.numpy(), _LUMA)).floor_()


def _look_up(image: Image, table: Tensor) -> None:
    """Map each value by a (256,) float32 table, truncated to 0..255 and not rounded."""
    opencv().LUT(image, table.clamp_(0, 255).to(torch.uint8).numpy(), image)


def _write(image: Image, values: Tensor) -> None:
    """Truncated, not rounded."""
    np.copyto(image, values.numpy(), casting="unsafe")

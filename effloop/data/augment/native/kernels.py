"""Colour operations on a batch, each image with its own parameter; on any device, without a sync.

The arithmetic and its rounding are those of torchvision's functions on one uint8 image (float32, truncated to uint8),
so the pixels are the same to the bit on a CPU, except for `hue`. A blend's `rest` is 1 - factor, computed before the
factor was rounded to float32: torchvision computes both from one float64, and up to 0.7 % of the values depend on it by
one level. Images are (N, 3, H, W) uint8, best in channels_last; outputs are new and of the same layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from effloop.lazy import F, Tensor, torch

LUMA = (0.2989, 0.587, 0.114)  # torchvision's shares of red, green and blue; they add up to 0.9999
TOP = 255.999  # its scale of [0, 1] before truncation


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Each image times its (N,) float32 factor, at least 0."""
    return _to_uint8(images.mul(_each(factor)))


def contrast(images: Tensor, factor: Tensor, rest: Tensor) -> Tensor:
    """Each image blended with its mean luma: (N,) float32 factor, 0 is flat, 1 is the image.

    The mean is of exact sums; in float32, as in torchvision, it depends on the number of threads from 256x256 on.
    """
    return _blend(images, luma(images).floor_().mean((1, 2, 3), True, dtype=torch.float64).float(), factor, rest)


def saturation(images: Tensor, factor: Tensor, rest: Tensor) -> Tensor:
    """Each image blended with its luma: (N,) float32 factor, 0 is grey, 1 is the image."""
    return _blend(images, luma(images).floor_(), factor, rest)


def sharpness(images: Tensor, factor: Tensor, rest: Tensor) -> Tensor:
    """Each image blended with itself smoothed: (N,) float32 factor, 0 is smooth, 1 is the image; its border stays."""
    if min(images.shape[-2:]) <= 2:
        return images.clone()
    sharp = images.to(torch.float32)
    inner = sharp[..., 1:-1, 1:-1]
    # Thirteenths of a whole number are never halves, so all orders of summation round alike.
    values = images.to(torch.int16)
    threes = values[..., :-2, :] + values[..., 1:-1, :] + values[..., 2:, :]
    nines = threes[..., :-2] + threes[..., 1:-1] + threes[..., 2:]
    smooth = nines.add_(images[..., 1:-1, 1:-1], alpha=4).mul(1 / 13).round_()
    inner.addcmul_(smooth.sub_(inner), _each(rest))
    return _to_uint8(sharp)


def hue(images: Tensor, shift: Tensor) -> Tensor:
    """Each image's hues rotated by its (N,) float32 shift, -0.5 to 0.5 of the circle.

    At most 1 level from torchvision's, in about one value of 10,000: it takes more steps, and rounds at each.
    """
    out = torch.empty_like(images)
    # 100 µs for an image of 224x224 on a CPU, but each pass reads contiguous memory
    planes = images.contiguous().unbind(1)
    for channel, values in enumerate(rotate_hue(planes, shift.view(-1, 1, 1))):
        out[:, channel] = values
    return out


def rotate_hue(planes: Iterable[Tensor], shift: Tensor) -> list[Tensor]:
    """`hue` of three (N, H, W) uint8 planes by (N, 1, 1) float32 -> three (N, H, W) float32, to be truncated."""
    red, green, blue = planes
    high, low = red.maximum(green).maximum(blue), red.minimum(green).minimum(blue)
    span = high - low
    # All bits set where it is the highest, so that & and ^ select: 12 µs at 224x224 on a CPU, where() takes 42.
    in_red, in_green = ((channel == high).to(torch.int16).neg_() for channel in (red, green))
    red, green, blue = (channel.to(torch.int16) for channel in (red, green, blue))
    side, in_second, in_first = red - green, blue - red, green - blue
    side ^= in_second.bitwise_xor_(side).bitwise_and_(in_green)
    side ^= in_first.bitwise_xor_(side).bitwise_and_(in_red)
    # Hue is 0 at red, 2 at green, 4 at blue.
    start = in_green.bitwise_and_(-2).add_(4).bitwise_and_(in_red.bitwise_not_())
    place = side.to(torch.float32).div_(span.clamp(min=1).to(torch.float32))  # 0 / 1 for greys
    place.add_(start.to(torch.float32)).add_(6 * shift)
    place.sub_(place.mul(1 / 6).floor_(), alpha=6)
    top, depth = high.to(torch.float32).mul_(TOP / 255), span.to(torch.float32).mul_(TOP / 255)
    reds = (place - 3).abs_().sub_(2).clamp_(-1, 0)
    greens = (place - 2).abs_().sub_(1).clamp_(0, 1).neg_()
    blues = place.sub_(4).abs_().sub_(1).clamp_(0, 1).neg_()
    return [torch.addcmul(top, depth, share, out=share) for share in (reds, greens, blues)]


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Each value's highest bits: (N,) whole numbers, 0 to 8."""
    return images & (256 - (256 >> _each(bits).long())).clamp_(max=255).to(torch.uint8)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Each image's values inverted from its (N,) float32 threshold on."""
    return torch.where(images >= _each(threshold), ~images, images)


def autocontrast(images: Tensor) -> Tensor:
    """Each channel of each image stretched to 0..255; a channel of one value stays."""
    low = images.amin((2, 3), keepdim=True).to(torch.float32)
    span = images.amax((2, 3), keepdim=True) - low
    flat = span == 0
    scale = span.mul_(1 / 255).masked_fill_(flat, 1)
    return _to_uint8(images.sub(low.masked_fill_(flat, 0)).div_(scale))


def equalize(images: Tensor) -> Tensor:
    """Each channel of each image with its histogram equalised, as Pillow does; a channel of one value stays."""
    values = images.flatten(2).to(torch.int64)
    counts = values.new_zeros((*values.shape[:2], 256)).scatter_add_(2, values, values.new_ones(1).expand_as(values))
    last = images.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    upto = counts.cumsum(2)
    step = (upto[..., -1:] - counts.gather(2, upto.argmax(2, keepdim=True))) // 255
    table = ((upto - counts + step // 2) // step.clamp(min=1)).clamp_(max=255)
    table = torch.where(step == 0, torch.arange(256, device=counts.device), table).to(torch.uint8)
    return table.gather(2, values).view(images.shape).contiguous(memory_format=layout)


def solarize_add(images: Tensor, amount: Tensor) -> Tensor:
    """Each image's values below 128 plus its (N,) whole number, 0 to 128."""
    return torch.where(images < 128, images + _each(amount).to(torch.uint8), images)


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Each image blurred as by Pillow's GaussianBlur of its (N,) float32 radius, 0 to 2: by means, three each way."""
    mean, values = mean_weights(sigma), images.to(torch.float32)
    for dim in (3, 3, 3, 2, 2, 2):
        values = _weighted(values, mean, dim, "replicate").round_()
    return values.to(torch.uint8)


def mean_weights(sigma: Tensor) -> Tensor:
    """(N,) sigmas, 0 to 2 -> (N, 5), a mean's weights; three have the Gaussian's variance (Gwosdek et al. 2011)."""
    variance = sigma**2 / 3
    whole = ((12 * variance + 1).sqrt().sub(1) / 2).floor()
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    length = (whole + part)[:, None]
    return (length + 1 - torch.arange(-2, 3, device=sigma.device).abs()).clamp(0, 1) / (2 * length + 1)


def convolve(images: Tensor, across: Tensor, down: Tensor, border: str) -> Tensor:
    """Each image with its (N, k) horizontal and (N, l) vertical float32 weights; `border` is a mode of `F.pad`."""
    values = _weighted(images.to(torch.float32), across, 3, border)
    return _weighted(values, down, 2, border).round_().to(torch.uint8)


def _weighted(values: Tensor, weights: Tensor, dim: int, border: str) -> Tensor:
    """(N, 3, H, W) -> the same, convolved along a dimension."""
    length, reach = values.shape[dim], weights.shape[1] // 2
    padding = (reach, reach, 0, 0) if dim == 3 else (0, 0, reach, reach)
    padded = F.pad(values, padding, mode=border).contiguous(memory_format=torch.channels_last)
    total = torch.zeros_like(values)
    for place in range(weights.shape[1]):
        # Not conv2d, which uses TensorFloat-32 on a GPU unless that is turned off for the whole process.
        total.addcmul_(padded.narrow(dim, place, length), weights[:, place].view(-1, 1, 1, 1))
    return total


def grayscale(images: Tensor) -> Tensor:
    """Each pixel's luma, three times."""
    return torch.empty_like(images).copy_(luma(images))


def invert(images: Tensor) -> Tensor:
    """255 less each value."""
    return ~images


def luma(images: Tensor) -> Tensor:
    """(N, 3, H, W) uint8 -> (N, 1, H, W) float32."""
    red, green, blue = images.unsqueeze(1).unbind(2)
    return red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


def on_rows(images: Tensor, rows: Tensor, kernel: Callable[..., Tensor], *parameters: Tensor) -> Tensor:
    """`kernel(images, *parameters)` for some of (N, 3, H, W) images, maybe in place; the others stay.

    `rows` are (M,), ascending, each once, the parameters (M,).
    """
    if len(rows) == len(images):
        return kernel(images, *parameters)
    pixels = images.movedim(1, -1)  # indexed so, the result is channels_last, too
    some = pixels.index_select(0, rows).movedim(-1, 1)
    pixels.index_copy_(0, rows, kernel(some, *parameters).movedim(1, -1))
    return images


def _each(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def _to_uint8(values: Tensor) -> Tensor:
    return values.clamp_(0, 255).to(torch.uint8)


def _blend(images: Tensor, other: Tensor, factor: Tensor, rest: Tensor) -> Tensor:
    # addcmul, as torchvision's add with alpha, rounds once; a product and a sum would round twice.
    return _to_uint8(torch.addcmul(images.mul(_each(factor)), other, _each(rest)))

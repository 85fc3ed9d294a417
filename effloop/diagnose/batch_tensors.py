"""The tensors of a batch, as engines load it and as the model gets it."""

from __future__ import annotations

from collections.abc import Sequence

from effloop.batch import ImageSize
from effloop.config import Config
from effloop.data.loader import Loader
from effloop.data.source import Kind
from effloop.diagnose.memory import Tensors


def host_batch(loader: Loader) -> list[Tensors]:
    """A batch as engines load it."""
    count, targets = loader.plan.order.batch_per_rank, loader.plan.source.targets
    height, width, channels = loader.plan.shape_of_image
    shape, dtype = targets.shape[1:], targets.dtype.newbyteorder("=").name
    return [
        Tensors.of("images", (count, channels, height, width), image_dtype(loader)),
        Tensors.of("targets", (count, *((height, width) if has_masks(loader) else shape)), dtype),
        Tensors.of("ids", (count,), "int64"),
        Tensors.of("valid", (count,), "bool"),
    ]


def device_batch(config: Config, loader: Loader) -> list[Tensors]:
    """A batch as the model gets it."""
    images, targets, *_ = host_batch(loader)
    count, size = images.shape[0], largest_size(config)
    shape, dtype = targets.shape, str(loader.transfer.target_dtype).removeprefix("torch.")
    if has_masks(loader):
        shape, dtype = [count, *size], targets.dtype
    elif loader.transfer.mix is not None and loader.transfer.mix.on and len(shape) == 1:
        shape, dtype = [count, len(loader.classes)], "float32"
    return [Tensors.of("images", (count, config.data.channels, *size), "float32"), Tensors.of("targets", shape, dtype)]


def has_masks(loader: Loader) -> bool:
    """Whether targets are masks."""
    return loader.plan.source.kind is Kind.masks


def image_dtype(loader: Loader) -> str:
    """The type of images as engines load them."""
    return str(loader.plan.output.dtype).removeprefix("torch.")


def largest_size(config: Config) -> ImageSize:
    """The largest images that a run's model is given."""
    return max([config.size, *config.train_sizes], key=lambda size: size.pixels)


def is_loaded_so(tensor: Tensors, loader: Loader) -> bool:
    """Whether the model gets a part of a batch in the memory that it was loaded into."""
    mixes = loader.transfer.mix is not None and loader.transfer.mix.on
    return tensor.name == "images" and tensor.dtype == image_dtype(loader) and not mixes


def mask_bytes_in_loss(batch: Sequence[Tensors], loader: Loader) -> int:
    """Bytes of a batch's masks as int64, which the loss makes of them on the device."""
    return 8 * batch[1].bytes if has_masks(loader) else 0

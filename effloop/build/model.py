"""Config -> the model: built, tried on an image, told what it is told, on its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from effloop.config import Config
from effloop.errors import ConfigError, EffLoopError
from effloop.model import checkpoint_blocks, freeze, models


def build_model(config: Config, classes: Sequence[str], device: torch.device) -> nn.Module:
    """The model on its device, in its memory layout, compiled if asked for.

    Raises:
        ConfigError: `model.num_classes` differs from the data's, or the model can't take such images.
    """
    wanted = config.model.num_classes
    if wanted is not None and wanted != len(classes):
        raise ConfigError(
            f"model.num_classes: {wanted}, but the data has {len(classes)} classes; "
            f"set model.num_classes={len(classes)} or null"
        )
    size = config.image_size
    try:
        model: nn.Module = models.build(config.model, num_classes=len(classes), image_size=config.image_size)
        # Many a network can't take a small image, and says so only now.
        for size in dict.fromkeys([config.image_size, *config.progressive]):
            with torch.no_grad():
                logits = model.eval()(torch.zeros(1, 3, size, size))
            if logits.shape != (1, len(classes)):
                raise ValueError(f"it gives {tuple(logits.shape)} for one image, not (1, {len(classes)}) logits")
    except EffLoopError:
        raise
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        key = "image_size" if size == config.image_size else "progressive"
        raise ConfigError(
            f"model: {getattr(config.model, 'arch', config.model.name)} can't be had for {key}={size}: {reason}; "
            f"set another {key} or model"
        ) from error
    if config.model.freeze:
        freeze(model, config.model.freeze)
    if config.model.checkpointing:
        checkpoint_blocks(model)
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    model = model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    if config.compile:
        model.compile()  # in place, so that names in checkpoints stay as they are
    return model

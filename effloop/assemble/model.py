"""Config -> the model: built, tried on an image, told what it is told, on its device."""

from __future__ import annotations

import torch
from torch import nn

from effloop.assemble.resolve import Resolved
from effloop.errors import ConfigError, EffLoopError, reason
from effloop.model import checkpoint_blocks, freeze, models, norms_of_one_value
from effloop.parallel import Parallel
from effloop.task import is_spatial


def build_model(config: Resolved, num_outputs: int, device: torch.device) -> nn.Module:
    """The model on its device, in its memory layout, compiled if asked for.

    Raises:
        ConfigError: `model.num_classes` differs from the data's, or the model can't take such images.
    """
    wanted = config.model.num_classes
    if wanted is not None and wanted != num_outputs:
        raise ConfigError(
            f"model.num_classes: {wanted}, but the data has {num_outputs}; set model.num_classes={num_outputs} or null"
        )
    model = _tried(config, num_outputs)
    if config.model.freeze:
        freeze(model, config.model.freeze)
    if config.model.checkpointing:
        checkpoint_blocks(model)
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    if config.compile:
        model.compile()  # in place, so that names in checkpoints stay as they are
    return model


def _tried(config: Resolved, num_outputs: int) -> nn.Module:
    """The model as it is built, once it has taken an image of each size: many can't take a small one."""
    size, spatial = config.size, is_spatial(config.task.name)
    name = getattr(config.model, "arch", config.model.name)
    try:
        built: nn.Module = models.build(
            config.model, num_classes=num_outputs, image_size=config.image_size, channels=config.data.channels
        )
        for size in dict.fromkeys([config.size, *config.train_sizes]):
            with torch.no_grad():
                outputs = built.eval()(torch.zeros(1, config.data.channels, *size))
            if (outputs.ndim == 4) != spatial:
                has, learns = ("each image", "each pixel") if spatial else ("each pixel", "each image")
                others = (
                    "model=unet, deeplabv3_resnet50 or another model of pixels"
                    if spatial
                    else "model=resnet50 or another model of images, or task=segmentation for masks"
                )
                raise ConfigError(
                    f"model: {name} has an output for {has}, and task={config.task.name} learns one for {learns}; "
                    f"set {others}"
                )
            if outputs.shape != (wanted := (1, num_outputs, *(size if spatial else ()))):
                raise ValueError(f"it gives {tuple(outputs.shape)} for one image, not {wanted} outputs")
    except EffLoopError:
        raise
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        key = "image_size" if size == config.size else "progressive"
        raise ConfigError(
            f"model: {name} can't be built for {key}={size.word}: {reason(error)}; set another {key} or model"
        ) from error
    return built


def check_batch_norm(config: Resolved, model: nn.Module, parallel: Parallel) -> None:
    """Refuse to train on one image at a time where BatchNorm would have one value of each channel.

    Raises:
        ConfigError: a layer would; torch would say so in the first step.
    """
    synced = parallel.world_size > 1 and config.parallel.syncs_batch_norm
    if config.probe or synced or parallel.least_images(config.batch_size) > 1:
        return
    for size in dict.fromkeys([config.size, *config.train_sizes]):
        if names := norms_of_one_value(model, size, config.data.channels):
            sync = " or parallel.sync_batchnorm=true" * hasattr(config.parallel, "sync_batchnorm")
            raise ConfigError(
                f"batch_size: {config.batch_size} leaves BatchNorm one value of each channel in {names[0]} (of "
                f"{size.word} pixels; {len(names)} such layer{'s' * (len(names) > 1)}), and that has no variance; set "
                f"batch_size={config.batch_size + 1}{sync}, or another model"
            )

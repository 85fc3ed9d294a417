"""Models of segmentation_models_pytorch, by their names there: a decoder on the encoder of a model of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from effloop.errors import ConfigError, optional_package, reason
from effloop.model.base import Normalisation, Zoo, check_known, downloading, models, subclassed
from effloop.model.zoo import WHERE_THERE_IS_A_NETWORK, BackboneConfig

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
        smp = _package()
        if self.arch.startswith(_OF_TIMM):
            import timm

            return ["DEFAULT"] if timm.is_model_pretrained(self.arch.removeprefix(_OF_TIMM)) else []
        settings = smp.encoders.encoders.get(self.arch, {}).get("pretrained_settings", {})
        return ["DEFAULT", *settings] if settings else []

    def weights(self, name: str, image_size: Any) -> tuple[Mapping[str, Tensor], Normalisation]:
        del image_size
        given: Any = self.names()[1] if name == "DEFAULT" and not self.arch.startswith(_OF_TIMM) else name
        if self.arch.startswith(_OF_TIMM):
            given = True  # the encoder's own name has the tag
        encoders, what = _package().encoders, f"{name} of {self.arch}"
        with downloading("model.backbone_weights", what, "huggingface.co", WHERE_THERE_IS_A_NETWORK):
            encoder: nn.Module = encoders.get_encoder(self.arch, weights=given)
            found = encoders.get_preprocessing_params(self.arch, given)
        return encoder.state_dict(), (tuple(found["mean"]), tuple(found["std"]))


@models.register("smp", SmpConfig)
def smp_model(config: SmpConfig, *, num_classes: int, channels: int) -> nn.Module:
    """Any model of segmentation_models_pytorch, by model.arch and model.encoder; untrained, unless
    model.backbone_weights=DEFAULT.

    Its names in the state dict are the package's. (N, C, H, W) of any size -> (N, K, H, W) logits: where a network
    takes only multiples of its stride, images are padded at the right and the bottom with 0, the mean colour.
    """
    smp = _package()
    kinds = {kind.__name__: kind for kind in smp.MODEL_ARCHITECTURES_MAPPING.values()}
    check_known("model.arch", config.arch, [*kinds], "segmentation_models_pytorch")
    if config.encoder.startswith(_OF_TIMM):
        import timm

        arch = config.encoder.removeprefix(_OF_TIMM)
        check_known("model.encoder", arch, [arch] if timm.is_model(arch) else timm.list_models(), "timm")
    else:
        more, known = "; or one of timm's as tu-NAME", [*smp.encoders.encoders]
        check_known("model.encoder", config.encoder, known, "segmentation_models_pytorch", more)
    options = {"dynamic_img_size": True} if config.arch == "DPT" else {}  # images of any size
    try:
        model: nn.Module = kinds[config.arch](
            encoder_name=config.encoder, encoder_weights=None, in_channels=channels, classes=num_classes, **options
        )
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
        def forward(self, images: Tensor) -> Tensor:
            height, width = images.shape[2:]
            stride = self.encoder.output_stride if self.requires_divisible_input_shape else 1
            stride *= 2 if halves_below else 1
            logits: Tensor = super().forward(F.pad(images, (0, -width % stride, 0, -height % stride)))
            return logits[:, :, :height, :width]

    return OfAnySize


def _package() -> Any:
    return optional_package("segmentation_models_pytorch", "model=smp", "effloop[smp]")

"""Number formats of a step: full, TF32, or mixed by autocast with or without loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from effloop.errors import ConfigError
from effloop.lazy import Tensor, torch
from effloop.registry import PartConfig, Registry
from effloop.system import gpu


@dataclass
class PrecisionConfig(PartConfig):
    """Fields that every precision has: none so far."""

    mixed: ClassVar[bool] = False  # whether it computes in fewer bits than the weights have, as `amp=true` demands


@dataclass
class MixedConfig(PrecisionConfig):
    """Fields that every mixed precision has: none so far."""

    mixed: ClassVar[bool] = True


def set_tf32(*, products: bool, convolutions: bool) -> None:
    """Set, for the whole process, whether float32 matrix products and convolutions may round inputs to TensorFloat-32.

    torch has old switches and new ones. Reading an old one raises where a new one says something else, as torch.compile
    does in torch 2.11 and 2.12; so the old ones are set, which sets both. What they leave to be inherited is set, too.
    """
    torch.set_float32_matmul_precision("high" if products else "highest")
    torch.backends.cudnn.allow_tf32 = convolutions
    backends: Any = torch.backends  # without types for these
    for library in (backends.cudnn, backends.mkldnn):
        library.conv.fp32_precision = library.rnn.fp32_precision = "tf32" if convolutions else "ieee"


def tf32_switches() -> dict[str, bool]:
    """What `set_tf32` or a script has set."""
    backends: Any = torch.backends
    switches = {"products": backends.cuda.matmul, "convolutions": backends.cudnn.conv}
    return {name: switch.fp32_precision == "tf32" for name, switch in switches.items()}


class Precision:
    """Full float32, TF32 or mixed precision.

    Args:
        device: where the step runs.
        dtype: what autocast computes matrix products and convolutions in; None is no autocast.
        scale: whether the loss is scaled, which float16's range requires.
        tf32: whether float32 products and convolutions may round their inputs to TensorFloat-32.

    Attributes:
        name: what a forward pass computes in, for users: float32, tf32, bfloat16 or float16.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype | None = None, *, scale: bool = False, tf32: bool = False
    ) -> None:
        set_tf32(products=tf32, convolutions=tf32)
        self.device = device
        self.dtype = dtype
        self.name = "tf32" if tf32 else str(dtype or torch.float32).removeprefix("torch.")
        self.scaler = torch.amp.GradScaler(device.type, enabled=scale)

    def autocast(self) -> AbstractContextManager[Any]:
        """Around the forward pass and the loss."""
        return torch.autocast(self.device.type, self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(
        self, optimizer: torch.optim.Optimizer, clip: Callable[[torch.optim.Optimizer], None] | None = None
    ) -> bool:
        """Update the parameters, unless scaled gradients overflowed: then it returns False, schedule and EMA must not
        step, and the loss scale is halved. Only with loss scaling it syncs, once. `clip` clips unscaled gradients.
        """
        if clip is not None:
            self.scaler.unscale_(optimizer)
            clip(optimizer)
        if not self.scaler.is_enabled():
            optimizer.step()
            return True
        # GradScaler has no flag for an update. If gradients overflowed it doesn't call the optimizer, or passes
        # `found_inf` to a fused one, which then skips the update. Comparing the scale before and after, as is often
        # done, would sync twice more, the second time for the whole update.
        stepped: list[bool] = []

        def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            stepped.append(not getattr(optimizer, "found_inf", False))

        with optimizer.register_step_pre_hook(note):
            self.scaler.step(optimizer)
        self.scaler.update()
        return stepped == [True]

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, where there is one."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:  # else that run had no loss scaling
            self.scaler.load_state_dict(state)


precisions: Registry[Precision] = Registry("precision")


@precisions.register("fp32", PrecisionConfig)
def fp32(config: PrecisionConfig, device: torch.device) -> Precision:
    """Float32 throughout."""
    return Precision(device)


@precisions.register("tf32", PrecisionConfig)
def tf32(config: PrecisionConfig, device: torch.device) -> Precision:
    """Float32 with TensorFloat-32 matrix products and convolutions (NVIDIA, Ampere on)."""
    if not gpu.is_ampere(device):
        raise _lacks(config, device)
    return Precision(device, tf32=True)


@precisions.register("bf16", MixedConfig)
def bf16(config: PrecisionConfig, device: torch.device) -> Precision:
    """Autocast in bfloat16."""
    if not _has_bf16(device):
        raise _lacks(config, device)
    return Precision(device, torch.bfloat16)


@precisions.register("fp16", MixedConfig)
def fp16(config: PrecisionConfig, device: torch.device) -> Precision:
    """Autocast in float16 with loss scaling (CUDA)."""
    if device.type != "cuda":
        raise _lacks(config, device)
    return Precision(device, torch.float16, scale=True)


@precisions.register("amp", MixedConfig)
def amp(config: PrecisionConfig, device: torch.device) -> Precision:
    """Autocast: bfloat16 where the device has it, else float16 with loss scaling."""
    return (bf16 if _has_bf16(device) else fp16)(config, device)


def _has_bf16(device: torch.device) -> bool:
    return device.type == "cpu" or gpu.is_ampere(device)


def _lacks(config: PrecisionConfig, device: torch.device) -> ConfigError:
    mixed = ["bf16"] * _has_bf16(device) + ["fp16"] * (device.type == "cuda")
    supported = ["fp32", *mixed, *["amp"] * bool(mixed)]
    return ConfigError(
        f"precision: '{config.name}' is not supported on device '{device}', which supports "
        f"{', '.join(supported)}; set precision={supported[-1]}"
    )

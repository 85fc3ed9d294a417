"""Facts about a model from one image, for advice at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from effloop.batch import ImageSize
from effloop.errors import ConfigError
from effloop.lazy import Tensor, nn, torch
from effloop.model.base import is_channel_norm
from effloop.system.memory import SavedForBackward

_TILE = 8  # channels that tensor cores process at once in half precision


@dataclass(frozen=True)
class Probe:
    """Names, in the order of calls or of definition."""

    # layers with a trained bias whose output goes straight into a BatchNorm or InstanceNorm, which cancels it
    biases_before_norm: list[str]
    unused: list[str]  # trainable parameters that the logits don't depend on
    frozen: int  # number of frozen scalars
    # layers whose number of inputs or outputs is not a multiple of 8, so that tensor cores are partly idle; per group
    # for grouped convolutions, in total for depthwise ones. Without 3 inputs, or 1, the layer of the logits, and
    # convolutions with one output position (squeeze-and-excitation)
    odd_widths: list[str]
    # memory of what autograd keeps of one image from forward to backward: of all of it, and of the largest tensor. Not
    # of dropout, which is off
    saved_bytes: int = field(default=0, compare=False)
    largest_bytes: int = field(default=0, compare=False)


def probe(model: nn.Module, size: ImageSize, channels: int = 3, *, channels_last: bool) -> Probe:
    """Run one black image through a model in eval mode, forward and backward, and record what is found; auxiliary heads
    count. The model is unchanged afterwards: modes, buffers, gradients and random numbers. It isn't compiled for this.
    """
    parameters = dict(model.named_parameters())
    trained = {name: each for name, each in parameters.items() if each.requires_grad}
    device = next(iter(parameters.values())).device
    layout = torch.channels_last if channels_last else torch.contiguous_format
    image = torch.zeros(1, channels, *size, device=device).contiguous(memory_format=layout)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), _in_eval_mode(model), _watched(model) as (biases, odd):
        with SavedForBackward(chain(model.parameters(), model.buffers(), [image])) as saved:
            found: Any = model.forward(image)  # a call would compile a model that is to be compiled
        heads: list[Tensor] = [found] if isinstance(found, torch.Tensor) else [*found.values()]
        logits = heads[0]
        if not logits.requires_grad:
            raise ConfigError("model.freeze: nothing that the logits depend on is left to train; freeze fewer")
        # Not backward(), which would leave gradients in the parameters.
        total = torch.stack([head.sum() for head in heads]).sum() if len(heads) > 1 else logits.sum()
        gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    return Probe(
        biases_before_norm=biases,
        unused=[name for name, gradient in zip(trained, gradients, strict=True) if gradient is None],
        frozen=sum(each.numel() for each in parameters.values() if not each.requires_grad),
        odd_widths=[name for name, outputs in odd.items() if outputs != logits.shape[1]],
        saved_bytes=saved.bytes,
        largest_bytes=saved.largest,
    )


def _widths(layer: Any) -> list[int]:
    """The layer's inputs and outputs that tensor cores tile."""
    if not hasattr(layer, "groups"):
        return [layer.in_features, layer.out_features]
    inputs, outputs, groups = layer.in_channels, layer.out_channels, layer.groups
    if inputs in (1, 3):
        return [outputs // groups]
    return [inputs, outputs] if groups == inputs else [inputs // groups, outputs // groups]


def takes_statistics(norm: nn.Module) -> bool:
    """Whether it subtracts the batch's mean; a frozen one subtracts a constant."""
    own = list(norm.parameters(recurse=False))
    return not own or any(each.requires_grad for each in own)


@contextmanager
def _watched(model: nn.Module) -> Iterator[tuple[list[str], dict[str, int]]]:
    """Of one image: layers whose bias goes straight into a norm, and {layer of odd widths: outputs}."""
    before_norm: list[str] = []
    odd: dict[str, int] = {}
    biased: dict[int, tuple[str, Tensor, int]] = {}  # keeps the tensor, or another could get its id
    names = {module: name for name, module in model.named_modules()}

    def layer(module: Any, _: Any, output: Tensor) -> None:
        if module.bias is not None and module.bias.requires_grad:
            biased[id(output)] = names[module], output, output._version
        if (output.ndim < 4 or output[0, 0].numel() > 1) and any(width % _TILE for width in _widths(module)):
            odd[names[module]] = module.weight.shape[0]

    def norm(_: Any, inputs: Any) -> None:
        name, _, version = biased.get(id(inputs[0]), ("", None, -1))
        if version == inputs[0]._version:  # else an in-place operation came between them
            before_norm.append(name)

    with ExitStack() as hooks:
        for module in names:
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                hooks.enter_context(module.register_forward_hook(layer))
            elif is_channel_norm(module) and takes_statistics(module):
                hooks.enter_context(module.register_forward_pre_hook(norm))
        yield before_norm, odd


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        model.training = getattr(model, "has_auxiliary_heads", False)  # its own outputs, not its layers' mode
        yield
    finally:
        for module, training in before:
            module.training = training  # one by one: frozen modules have their own mode

"""Which parameters are trained, with which learning rate and weight decay, and what is kept for that."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from effloop.batch import ImageSize
from effloop.errors import ConfigError
from effloop.lazy import Tensor, nn, no_grad, torch
from effloop.model.base import is_norm, subclassed
from effloop.registry import choices


@dataclass(frozen=True)
class Layer:
    """Parameters with a learning rate."""

    name: str  # the module that they are in, or those of the first and the last
    lr: float  # the rate
    parameters: tuple[str, ...]  # their names
    factor: float = 1.0  # what the rate was multiplied by, but not what an update decays by


def rates_by_layer(model: nn.Module, lr: float, layer_decay: float | None) -> list[Layer]:
    """The layers of a model, frozen ones, too, with their learning rates, from the last, which has `lr`, to the first;
    `layer_decay` is what a rate is multiplied by for the layer below (Bao et al. 2022, "BEiT"), None makes one layer.
    """
    if layer_decay is None:
        return [Layer("all", lr, tuple(name for name, _ in model.named_parameters()))]
    layers = enumerate(reversed(layers_of(model)))
    return [Layer(_name(names), lr * layer_decay**depth, tuple(names)) for depth, names in layers]


def with_head(layers: Sequence[Layer], head: Sequence[str], lr: float) -> list[Layer]:
    """The same with a rate of its own for the modules `head`, which come last."""
    prefixes = tuple(f"{name}." for name in head)
    own = [name for layer in layers for name in layer.parameters if name.startswith(prefixes)]
    return [*_split(layers, own)[False], Layer(", ".join(head), lr, tuple(own))]


def with_factors(layers: Sequence[Layer], factors: Mapping[str, float]) -> list[Layer]:
    """The same with rates multiplied for parameters whose names fit a glob pattern (`*` also matches dots), by the
    factor of the first that fits; they come last.
    """
    found: list[Layer] = []
    every = [name for layer in layers for name in layer.parameters]
    for pattern, factor in factors.items():
        own = [name for name in every if fnmatchcase(name, pattern)]
        if not own:
            raise ConfigError(f"optim.lr_factors: no parameter fits '{pattern}'; {choices(pattern, every)}")
        layers, apart = _split(layers, own)
        if not apart:
            raise ConfigError(f"optim.lr_factors: whatever fits '{pattern}' fits an earlier pattern; put it first")
        found += [Layer(pattern, each.lr * factor, each.parameters, factor) for each in apart]
    return [*layers, *found]


def _split(layers: Sequence[Layer], own: Collection[str]) -> tuple[list[Layer], list[Layer]]:
    """The layers without their parameters in `own`, and with these alone; none is empty."""
    sides: tuple[list[Layer], list[Layer]] = [], []
    for layer, side in product(layers, (False, True)):
        if names := tuple(name for name in layer.parameters if (name in own) is side):
            sides[side].append(Layer(layer.name, layer.lr, names))
    return sides


def modules_above_backbone(model: nn.Module) -> list[str]:
    """The modules of a model of pixels that aren't its `backbone`, or `encoder`; none where it has neither."""
    names = [name for name, _ in model.named_children()]
    backbone = next((name for name in ("backbone", "encoder") if name in names), None)
    return [name for name in names if name != backbone] if backbone else []


def layers_of(model: nn.Module) -> list[list[str]]:
    """The names of each layer's parameters, from the input on: as a model of timm says (`group_matcher`); the layers of
    others are their blocks, or, where there are none, their modules. What precedes the first and what follows the last
    are layers, too; what is between two belongs to the next.
    """
    if matcher := getattr(model, "group_matcher", None):
        from timm.models import group_parameters

        places = group_parameters(model, matcher(coarse=False), reverse=True)
    else:
        blocks = [*_blocks(model)] or [each for each in model.modules() if [*each.parameters(recurse=False)]]
        inside = {id(each): place for place, block in enumerate(blocks, 1) for each in block.parameters()}
        places, following = {}, len(blocks) + 1
        for name, parameter in reversed([*model.named_parameters()]):
            own = inside.get(id(parameter))
            following = own or following
            places[name] = following if own or following > 1 else 0
    names = [name for name, _ in model.named_parameters()]
    return [[name for name in names if places[name] == place] for place in sorted(set(places.values()))]


def _name(names: Sequence[str]) -> str:
    """The module that all of a layer's parameters are in, or those of its first and last."""
    modules = [(name.rpartition(".")[0] or name).replace(".", "/") for name in names]
    return (os.path.commonpath(modules) or f"{modules[0]} to {modules[-1]}").replace("/", ".")


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    decay_norm_and_bias: bool = True,
    decay_norm: bool = True,
    listed: bool = True,
    layers: Sequence[Layer] = (),
) -> list[dict[str, Any]]:
    """The parameters to train, in groups for a torch optimizer, such groups for each of `layers`.

    Without `decay_norm` parameters of norms are a second group without decay: a norm cancels the scale of the weights
    before it, but not its own (He et al. 2018, "Bag of tricks"). Without `decay_norm_and_bias` so are, as by timm's
    `param_groups_weight_decay`, biases, all others of one dimension, and what the model lists (`no_weight_decay`), such
    as class tokens and position embeddings; until EffLoop 0.2 the last decayed, as they do if not `listed`.
    """
    norms = {id(each) for module in model.modules() if is_norm(module) for each in module.parameters()}
    parameters = dict(model.named_parameters())
    patterns: Collection[str] = getattr(model, "no_weight_decay", tuple)() if listed else ()

    def decays(name: str, parameter: nn.Parameter) -> bool:
        if id(parameter) in norms:
            return decay_norm and decay_norm_and_bias
        small = parameter.ndim <= 1 or name.endswith(".bias")
        return decay_norm_and_bias or not (small or any(fnmatchcase(name, each) for each in patterns))

    groups: list[dict[str, Any]] = []
    for layer in layers or [Layer("all", 0, tuple(parameters))]:
        trained = [name for name in layer.parameters if parameters[name].requires_grad]
        settings = {"lr": layer.lr} if layers else {}
        for kind, decay in ((True, weight_decay / layer.factor), (False, 0.0)):
            own = [parameters[name] for name in trained if decays(name, parameters[name]) is kind]
            groups.append({"params": own, "weight_decay": decay, **settings})
    return [group for group in groups if group["params"]]


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze modules and parameters by names or glob patterns (`*` also matches dots); returns the parameters' names.

    A module that is frozen completely stays in eval mode when the model is put into train mode: BatchNorm keeps its
    statistics, dropout is off. This survives `copy.deepcopy`, and keeps the names in the state dict.
    """
    parameters = dict(model.named_parameters())
    modules = [name for name, _ in model.named_modules() if name]
    matched: set[str] = set()
    for pattern in patterns:
        found = [name for name in (*modules, *parameters) if fnmatchcase(name, pattern)]
        if not found:
            raise ConfigError(
                f"model.freeze: no module or parameter fits '{pattern}'; {choices(pattern, [*modules, *parameters])}"
            )
        matched.update(found)
    frozen = [name for name in parameters if any(name == each or name.startswith(f"{each}.") for each in matched)]
    if not any(each.requires_grad for name, each in parameters.items() if name not in frozen):
        raise ConfigError(
            f"model.freeze: {list(patterns)} leaves none of the {len(parameters)} parameters to train; freeze fewer"
        )
    for name in frozen:
        parameters[name].requires_grad_(False)
    _keep_in_eval(model, matched.union(frozen))
    return frozen


def _keep_in_eval(module: nn.Module, frozen: set[str], prefix: str = "") -> None:
    """Keep the outermost modules that are frozen completely, given all frozen names, in eval mode."""
    kept = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        parameters = [f"{path}.{below}" for below, _ in child.named_parameters()]
        if path in frozen or (parameters and frozen.issuperset(parameters)):
            child.eval()
            kept.append(name)
        else:
            _keep_in_eval(child, frozen, f"{path}.")
    if kept:
        subclassed(module, _keeping, tuple(kept))


def _keeping(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass that keeps children in eval mode, which `SyncBatchNorm.convert_sync_batchnorm` replaces."""

    class Keeping(kind):  # type: ignore[misc]
        def train(self, mode: bool = True) -> nn.Module:
            module: nn.Module = super().train(mode)
            for name in names:
                module.get_submodule(name).eval()
            return module

    return Keeping


# A model's last layer, and training it alone on the features below it.


def find_head(model: nn.Module, size: ImageSize, channels: int = 3) -> str:
    """Name of the linear layer that gives the model's output, in evaluation mode; a ConfigError if there is none."""
    calls: list[tuple[str, Tensor, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda _, inputs, output, name=name: calls.append((name, inputs[0], output)))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    device = next(model.parameters()).device
    with torch.no_grad():
        logits = model(torch.zeros(1, channels, *size, device=device))
    for handle in handles:
        handle.remove()
    for name, features, output in calls:
        if output is logits and features.ndim == 2:
            return name
    raise ConfigError("probe: this model doesn't end with a linear layer; choose another model, or set probe=0")


class Features:
    """The features below the head of a model in evaluation mode: (N, C, H, W) images -> (N, D)."""

    def __init__(self, model: nn.Module, head: str) -> None:
        self.model, self.head = model, model.get_submodule(head)

    @no_grad
    def __call__(self, images: Tensor) -> Tensor:
        """The input of the head, (N, D) float32 on the images' device."""
        seen: list[Tensor] = []
        with self.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
            self.model(images)
        return seen[0].float()


def train_head_only(model: nn.Module, head: str) -> None:
    """Let a model take (N, D) features instead of images, and freeze all but its head."""
    model.requires_grad_(False)
    model.get_submodule(head).requires_grad_(True)
    subclassed(model, _of_features, head)


def _of_features(kind: Any, head: str) -> type[nn.Module]:
    class OfFeatures(kind):  # type: ignore[misc]
        def forward(self, features: Tensor) -> Tensor:
            outputs: Tensor = self.get_submodule(head)(features)
            return outputs

    return OfFeatures


# Activation checkpointing: less memory for more computing.


def checkpoint_blocks(model: nn.Module) -> int:
    """Make each block of a model store only its input for the backward pass, and recompute the rest there; how many.

    Gradients, BatchNorm's statistics and dropout are the same as without; timm's own switch (`set_grad_checkpointing`)
    updates BatchNorm's statistics twice.
    """
    blocks = blocks_of(model, "model.checkpointing", "set model.checkpointing=false")
    for block in blocks:
        subclassed(block, _checkpointed)
    return len(blocks)


def blocks_of(model: nn.Module, key: str, fix: str) -> list[nn.Module]:
    """A ResNet's residual blocks, a ViT's layers, the stages of a plainer network; a ConfigError about `key` if there
    are none, as in a plain sequence of layers.
    """
    # Without lists (Inception v3) they are direct children.
    direct = [child for child in model.children() if _is_composite(child) and not _is_list(child)]
    if not (blocks := [*_blocks(model)] or direct):
        raise ConfigError(
            f"{key}: {type(model).__name__} has no blocks, it is a plain sequence of layers; {fix} or choose another "
            "model"
        )
    return blocks


def _blocks(module: nn.Module, *, in_list: bool = False) -> Iterator[nn.Module]:
    """The outermost modules in lists that have children themselves; lists of lists are entered."""
    for child in module.children():
        if _is_list(child) and any(map(_is_composite, child.children())):
            yield from _blocks(child, in_list=True)
        elif in_list and _is_composite(child) and not _is_stage(child):
            yield child
        else:
            yield from _blocks(child)


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_list(module: nn.Module) -> bool:
    """Whether it is a plain list of its children, without its own forward."""
    return isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward


def _is_stage(module: nn.Module) -> bool:
    """Whether it contains a list of equal blocks (timm's ConvNeXt), 9 to 27 of which would be recomputed at once."""
    for child in module.children():
        kinds = {type(block) for block in child.children()} if _is_list(child) else set()
        if len(kinds) == 1 and all(_is_composite(block) and not _is_list(block) for block in child.children()):
            return True
    return False


def _checkpointed(kind: Any) -> type[nn.Module]:
    class Checkpointed(kind):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not (self.training and torch.is_grad_enabled()):
                return super().forward(*args, **kwargs)
            if not torch.compiler.is_compiling():  # which itself keeps updates of buffers out of the recomputation
                kwargs["context_fn"] = lambda: (nullcontext(), _statistics_kept(self))
            return torch.utils.checkpoint.checkpoint(super().forward, *args, use_reentrant=False, **kwargs)

    return Checkpointed


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Keep the running statistics of the block's norms unchanged by forwards inside, without copying them."""
    # A momentum of 0 keeps mean and variance to the bit. The buffers can't be removed: the recomputation must save as
    # many tensors as the forward did.
    modules: Iterator[Any] = block.modules()
    norms = [each for each in modules if getattr(each, "num_batches_tracked", None) is not None]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0.0, torch.empty_like(norm.num_batches_tracked)
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count

"""Optimizers, and the moving average of the weights that they train."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from effloop.errors import ConfigError, check_value
from effloop.lazy import Tensor, nn, no_grad, torch
from effloop.registry import PartConfig, Registry

Parameters: TypeAlias = "Iterable[nn.Parameter] | Iterable[dict[str, Any]]"
"""Parameters, or torch's groups of them: each a dict of `params` and of settings of their own."""


@dataclass
class OptimConfig(PartConfig):
    """Fields that every optimizer has.

    Attributes:
        lr: peak learning rate; the root's `lr` is short for it.
        weight_decay: decay towards zero, per unit of learning rate.
        fused: use torch's fused kernels; null is torch's default, which is not to so far.
        decay_norm_and_bias: whether weight decay applies to norms' parameters and biases, too, and to those that the
            model lists (`no_weight_decay()` of timm's), such as class tokens and position embeddings.
        decay_norm: whether weight decay applies to norms' parameters, too.
        scale_lr: images per update that `lr` is meant for; the rate is then scaled linearly. Null doesn't scale it.
        ema: decay of the weights' exponential moving average, which is then evaluated and saved; 0 is off.
        layer_decay: for fine-tuning: what the learning rate is multiplied by for each layer further down, from the
            last layer, which has `lr`; null is one rate for all.
        head_lr: learning rate of the model's last layer, the head; null is that of the layers below it.
        lr_factors: {pattern of parameters' names, as of `model.freeze`: what their learning rate is multiplied by}, but
            not what they decay by in an update; the first that fits.
        ema_warmup: whether the first averagings keep less than `ema`, (1 + n) / (10 + n) after n of them; without, only
            the very first, which takes the weights.
        ema_every: updates from one averaging to the next, the first of them averaged.
    """

    lr: float | None = 0.1
    weight_decay: float = 0.0
    fused: bool | None = None
    decay_norm_and_bias: bool = True
    decay_norm: bool = True
    scale_lr: int | None = None
    ema: float = 0.0
    layer_decay: float | None = None
    head_lr: float | None = None
    lr_factors: dict[str, float] = field(default_factory=dict)
    ema_warmup: bool = True
    ema_every: int = 1

    def __post_init__(self) -> None:
        images, decay, head = self.scale_lr, self.layer_decay, self.head_lr
        for key, good, allowed in (
            ("lr", self.lr is None or _finite(self.lr) > 0, "a finite number above 0"),
            ("weight_decay", _finite(self.weight_decay) >= 0, "a finite number of at least 0"),
            ("scale_lr", images is None or images > 0, "a number of images above 0, e.g. 256, or null"),
            ("ema", 0 <= self.ema < 1, "a share from 0 to below 1, e.g. 0.999"),
            ("layer_decay", decay is None or 0 < decay <= 1, "a factor above 0, at most 1, or null"),
            ("head_lr", head is None or _finite(head) > 0, "a finite number above 0, or null"),
            ("lr_factors", all(_finite(each) > 0 for each in self.lr_factors.values()), "finite factors above 0"),
            ("ema_every", self.ema_every > 0, "a number of updates above 0"),
        ):
            check_value(f"optim.{key}", getattr(self, key), good, allowed)

    def default_lr(self) -> float:
        """The peak learning rate where the root has none."""
        check_value("lr", self.lr, self.lr is not None, "a finite number above 0")
        return self.lr or 0.0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan  # which is neither above nor below anything


def scaled_lr(config: OptimConfig, images_per_update: int) -> float:
    """The learning rate for updates of this many images, over all ranks and accumulated batches (Goyal et al. 2017)."""
    lr = config.default_lr()
    return lr * images_per_update / config.scale_lr if config.scale_lr else lr


_LIBRARY = "effloop.optim.library"
optimizers: Registry[torch.optim.Optimizer] = Registry("optim", {"timm": _LIBRARY, "torch": _LIBRARY}, _LIBRARY)
"""Built as `optimizers.build(config, parameters)`, from parameters or from torch's groups of them."""


def _made(
    kind: type[torch.optim.Optimizer], config: OptimConfig, parameters: Parameters, **settings: Any
) -> torch.optim.Optimizer:
    make: Callable[..., torch.optim.Optimizer] = kind
    optimizer = make(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=config.fused, **settings)
    if config.fused is False:
        # torch then also turns off foreach, its own default on a GPU.
        for group in optimizer.param_groups:
            group["foreach"] = all(each.is_cuda for each in group["params"])
    return optimizer


@dataclass
class SgdConfig(OptimConfig):
    """Fields of `optim=sgd`.

    Attributes:
        momentum: share of the last update that is kept.
        nesterov: Nesterov momentum.
    """

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("optim.momentum", self.momentum, 0 <= self.momentum < 1, "a share from 0 to below 1")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optim.nesterov: true needs momentum; set optim.momentum above 0 or optim.nesterov=false")


@optimizers.register("sgd", SgdConfig)
def sgd(config: SgdConfig, parameters: Parameters) -> torch.optim.Optimizer:
    """Stochastic gradient descent with (Nesterov) momentum."""
    return _made(torch.optim.SGD, config, parameters, momentum=config.momentum, nesterov=config.nesterov)


@dataclass
class AdamwConfig(OptimConfig):
    """Fields of `optim=adamw`.

    Attributes:
        betas: decay of the first and second moments' running means.
        eps: added to the denominator.
    """

    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        good = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check_value("optim.betas", self.betas, good, "two numbers from 0 to below 1")
        check_value("optim.eps", self.eps, _finite(self.eps) > 0, "a finite number above 0")


@optimizers.register("adamw", AdamwConfig)
def adamw(config: AdamwConfig, parameters: Parameters) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay."""
    return _made(torch.optim.AdamW, config, parameters, betas=(config.betas[0], config.betas[1]), eps=config.eps)


def clipping(
    model: nn.Module, norm: float | None, value: float | None, ratio: float | None
) -> Callable[[torch.optim.Optimizer], None] | None:
    """What clips the gradients of an optimizer's parameters, on the device and without a sync: the norm of all of them,
    each value, or, for all but the last layer, the norm of each unit's to a ratio of its weights' (Brock et al. 2021,
    "High-performance large-scale image recognition without normalization"). NaN and infinity remain, or make others
    NaN; a value's infinity does not.
    """
    if norm is value is ratio is None:
        return None
    last = {*[*model.parameters()][-2:]} if ratio else set()  # weight and bias, as timm has it

    def clip(optimizer: torch.optim.Optimizer) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, norm)
        elif value is not None:
            torch.nn.utils.clip_grad_value_(parameters, value)
        elif ratio is not None:
            _clip_units([each for each in parameters if each.grad is not None and each not in last], ratio)

    return clip


@no_grad
def _clip_units(parameters: Iterable[nn.Parameter], ratio: float) -> None:
    """A unit is a row of a matrix, a filter of a convolution, or all values of one dimension, as in timm."""
    for each in parameters:
        gradient: Any = each.grad
        axes = tuple(range(1, each.ndim)) or None
        allowed = torch.linalg.vector_norm(each, dim=axes, keepdim=True).clamp_(min=1e-3) * ratio
        gradient.mul_((allowed / torch.linalg.vector_norm(gradient, dim=axes, keepdim=True)).clamp_(max=1))


def state_ratio(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], device: torch.device) -> float:
    """Bytes that an optimizer keeps for each byte of its parameters: of a square matrix, found by a few updates."""
    parameters = [nn.Parameter(torch.ones(shape, device=device)) for shape in ((8, 8), (8, 8, 3, 3), (8,))]
    optimizer = make(parameters)
    optimizer.zero_grad()  # has torch add its hooks to the class, as timm's Lookahead doesn't
    for each in parameters:
        each.grad = torch.full_like(each, 0.01)
    for _ in range(6):  # Lookahead copies the weights in the sixth update
        optimizer.step()
    entries = optimizer.state_dict()["state"].get(0, {}).values()  # of timm's Kron lists of tensors, too
    kept = [each for value in entries for each in (value if isinstance(value, list) else [value])]
    return sum(each.nbytes for each in kept if isinstance(each, torch.Tensor) and each.ndim) / parameters[0].nbytes


def restore(
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    optimizer_state: dict[str, Any],
    schedule_state: dict[str, Any],
) -> None:
    """Restore moments and position, but keep the settings that both were built with, as of `resume RUN lr=0.01`."""
    whole = getattr(optimizer, "_base_optimizer", optimizer)  # timm's Lookahead has one inside
    # Groups hold what the constructor was given, and some optimizers' counts of updates, which are state.
    kinds = type(whole).__mro__[:-1]  # a subclass may pass on what it is given (`**kwargs`)
    settings = {"initial_lr"}.union(*(inspect.signature(each).parameters for each in kinds)) - {"params"}
    groups = [
        {**built, **{key: value for key, value in saved.items() if key not in settings}}
        for built, saved in zip(optimizer.param_groups, optimizer_state["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**optimizer_state, "param_groups": groups})
    _match_memory_format(whole)
    # One step back and one forward, so that the schedule itself sets the rate of the next update.
    before = {name: schedule_state[name] - 1 for name in ("last_epoch", "_step_count")}
    schedule.load_state_dict({**schedule_state, **before, "base_lrs": schedule.base_lrs})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # after a single update: it had one
        schedule.step()


def _match_memory_format(optimizer: torch.optim.Optimizer) -> None:
    """Give moments the memory format of their parameters, which may have changed (`channels_last`)."""
    # The CPU's fused kernels iterate in memory order, and silently pair a moment of another layout with the wrong
    # parameters (torch 2.15: SGD was off by 4.0 after three steps of random numbers).
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            same_shape = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if same_shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


# The exponential moving average of the weights, which is evaluated and saved instead of the last ones.


class NoEMA:
    """No averaging: the trained model itself is evaluated."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def update(self) -> None:
        """After each update of the weights."""

    def state_dict(self) -> dict[str, Any]:
        """State for resuming beside that of `model`: plain values; empty without an average."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, {} of a run without an average; `weights` of that run's `model`."""


class EMA(NoEMA):
    """The exponential moving average of a model's weights (Polyak and Juditsky 1992).

    Only the first of every `every` updates is averaged. With `warmup` the first averagings keep less than `decay`,
    `min(decay, (1 + n) / (10 + n))` after n of them as in TensorFlow, so that the initial weights are soon forgotten;
    without, the first takes the weights and all others keep `decay`, as in the scripts of timm and torchvision. That of
    torchvision averages every 32nd update, with a decay of 1 - (1 - decay) * images of an update * 32 / epochs: 0.99891
    instead of 0.99998, with 1,024 images and 600 epochs.

    `model` is a copy without gradients, and not compiled, even if the trained model is. The tensors of both are looked
    up once: they may be written to, but not replaced (`model.to`) later.
    """

    # Floating-point buffers are averaged, too, as in timm's ModelEmaV3: BatchNorm's statistics describe the outputs of
    # the layers below, which are averaged. On the embedded photographs (`model=cnn`, decay 0.998) that gives 69-70 %,
    # copied statistics 59-65 %, and no average 51-62 %. Other buffers, such as BatchNorm's count, are copied.

    def __init__(
        self, model: nn.Module, decay: float, *, warmup: bool = True, every: int = 1, copied: nn.Module | None = None
    ) -> None:
        super().__init__((copied or copy.deepcopy(model)).requires_grad_(False))
        self.decay, self.warmup, self.every = decay, warmup, every
        self.updates = 0
        # By dtype: _foreach functions are fast for tensors of one dtype only; and whether they are split among ranks.
        # Non-persistent buffers are averaged, too.
        pairs: defaultdict[tuple[torch.dtype, type], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        ours, theirs = (chain(each.parameters(), each.buffers()) for each in (self.model, model))
        for own, new in zip(ours, theirs, strict=True):
            kept, given = pairs[own.dtype, type(own.data)]
            kept.append(own)
            given.append(new)
        self._averaged = [each for (dtype, _), each in pairs.items() if dtype.is_floating_point]
        self._copied = [each for (dtype, _), each in pairs.items() if not dtype.is_floating_point]

    @no_grad
    def update(self) -> None:
        """Update the average by the current weights: a few kernels for all tensors, without a sync."""
        averagings, rest = divmod(self.updates, self.every)
        self.updates += 1
        if rest:
            return
        kept = (1 + averagings) / (10 + averagings) if self.warmup else float(averagings > 0)
        self._average(min(self.decay, kept))

    def _average(self, kept: float) -> None:
        for own, new in self._averaged:
            torch._foreach_lerp_(own, new, 1 - kept)
        for own, new in self._copied:
            torch._foreach_copy_(own, new)

    def state_dict(self) -> dict[str, Any]:
        """`updates`: how many so far."""
        return {"updates": self.updates}

    @no_grad
    def load_state_dict(self, state: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
        """See `NoEMA`; the average starts from the current weights if that run had none."""
        if state:
            self.model.load_state_dict(weights)
        else:
            self._average(0)
        self.updates = state.get("updates", 0)

"""The operations of a training step and the memory it keeps, of fake tensors on a GPU that needn't be there."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from effloop.assemble.environment import Resolved
from effloop.assemble.model import build_model, random_batch
from effloop.errors import ConfigError, reason
from effloop.model import blocks_of, checkpoint_blocks
from effloop.precision import Precision
from effloop.task import Task
from effloop.train.trainer import Step

# A build without CUDA can't have fake tensors on a GPU: torch 2.13 ends the process. They are on the CPU there, where
# autocast computes `_FULL` in fewer bits, and a GPU in float32.
_GPU = torch.device("cuda:0" if torch.backends.cuda.is_built() else "cpu")  # type: ignore[no-untyped-call]
_FULL = {"layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "interpolate"}
_BATCHES = (2, 4)  # images; what grows with the batch is the difference of the two
_OF_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_BLOCK = 512  # bytes that the caching allocator rounds up to
_INITIALISING = {"uniform_", "normal_", "erfinv_", "exponential_", "orthogonal_", "trunc_normal_", "kaiming_uniform_"}
_VIEWS = {
    "device",
    "_unsafe_view",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "_local_scalar_dense",
}


class Op(NamedTuple):
    """An operation of the forward pass or the loss; `flops` and `bytes` are of one image."""

    name: str  # torch's, such as `mm`; of convolutions conv1x1, conv, conv_grouped or conv_depthwise
    dtype: str  # that it computes in, such as float16
    flops: float  # a multiplication and an addition are two
    bytes: float  # that it reads and writes
    fixed: float  # bytes that it reads and writes whatever the batch: weights
    # share of its backward pass that is computed: none where nothing before it is trained, half of a product's where
    # only one of its inputs needs a gradient, as in a model's first layer
    backward: float = 1.0
    forward: int = 1  # times that it is computed: 2 in a block that is checkpointed


@dataclass(frozen=True)
class Trace:
    """What a training step of a model does, whatever the card."""

    ops: Sequence[Op]  # of the forward pass and the loss, in their order
    saved: float  # bytes of an image that are kept for the backward pass
    fixed: float  # bytes that are kept whatever the batch, such as weights in fewer bits
    buffers: float  # bytes of an image beside these when most is in use: gradients, and what isn't kept
    weights: int  # bytes of parameters and buffers
    trained: int  # bytes of the parameters that are trained
    parameters: int  # tensors that are trained
    block: float = 0.0  # bytes of an image that are kept beside `saved` while a block is recomputed


def trace(config: Resolved, task: Task, num_outputs: int, dtype: torch.dtype | None) -> Trace:
    """Build the model, and run forward pass and loss of a step on fake tensors for two batch sizes.

    Args:
        config: model, image size and memory layout; its `batch_size` doesn't matter.
        task: as made for the data.
        num_outputs: of the model.
        dtype: that autocast computes in; None is none.

    Raises:
        ConfigError: the model can't be built, or decides by values, which fake tensors haven't.
    """
    plain = replace(config, compile=False, model=replace(config.model, checkpointing=False))
    model = built(plain, num_outputs).train()
    blocks = blocks_of(model, "model.checkpointing", "set it to false") if config.model.checkpointing else []
    with _fake_gpu(), mock.patch.object(F, "scaled_dot_product_attention", _attention):
        step = Step(made_fake(model), task, _Autocast(dtype))
        found = _run(step, plain, num_outputs, blocks)
        if blocks:
            checkpoint_blocks(model)
            kept = _run(step, plain, num_outputs)
            block = max(0.0, found.block - kept.saved)
            buffers = max(found.buffers, kept.buffers - block)
            found = replace(found, saved=kept.saved, fixed=kept.fixed, buffers=buffers, block=block)
    return found


def built(config: Resolved, num_outputs: int) -> nn.Module:
    """A model whose weights have any values, once it has taken fake images of its sizes; those may be huge."""
    trial = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(devices=[]), _Uninitialised():
        try:
            return build_model(config, num_outputs, torch.device("cpu"), trial=trial)
        except ConfigError as error:
            if isinstance(error.__cause__, (*_OF_VALUES, UnsupportedOperatorException)):
                raise _untraced(config, error.__cause__) from error
            raise


def _untraced(config: Resolved, error: Exception) -> ConfigError:
    name = getattr(config.model, "arch", config.model.name)
    why = "it reads values of tensors" if isinstance(error, _OF_VALUES) else "it can't be traced"
    return ConfigError(f"model: {name} can't be planned, as {why}: {reason(error)}")


def _run(step: Step, config: Resolved, num_outputs: int, blocks: Sequence[nn.Module] = ()) -> Trace:
    """Forward pass and loss for each of `_BATCHES`, as if these blocks were recomputed."""
    kept, peaks, seen = [], [], []
    for count in _BATCHES:
        batch = random_batch(replace(config, batch_size=count), config.size, step.task, num_outputs, _GPU)
        with ExitStack() as stack:
            watch = stack.enter_context(_Watch())
            for each in blocks:
                stack.enter_context(each.register_forward_pre_hook(watch.enter))
                stack.enter_context(each.register_forward_hook(watch.leave))
            try:
                outputs = step(*batch)
            except Exception as error:  # of any kind, in the code of any model
                raise _untraced(config, error) from error
        kept.append(watch.kept)
        peaks.append(watch.peak())
        del outputs
        seen.append((watch.ops, watch.blocks))
    ops, of_blocks = (zip(few, many, strict=True) for few, many in zip(*seen, strict=True))
    saved, fixed = _line(*kept)
    trained = [each for each in step.model.parameters() if each.requires_grad]
    return Trace(
        ops=[_of_image(*pair) for pair in ops],
        saved=saved,
        fixed=fixed,
        buffers=_line(*peaks)[0] - saved,
        block=max((_line(*pair)[0] for pair in of_blocks), default=0.0),
        weights=sum(each.nbytes for each in chain(step.model.parameters(), step.model.buffers())),
        trained=sum(each.nbytes for each in trained),
        parameters=len(trained),
    )


def _line(at_few: float, at_many: float) -> tuple[float, float]:
    """What grows with each image, and what doesn't grow."""
    few, many = _BATCHES
    slope = (at_many - at_few) / (many - few)
    return slope, max(0.0, at_few - few * slope)


def _of_image(few: Op, many: Op) -> Op:
    each, fixed = _line(few.bytes, many.bytes)
    return few._replace(flops=_line(few.flops, many.flops)[0], bytes=each, fixed=fixed)


_in_parts = F.scaled_dot_product_attention


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations, and the memory that outlives them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.kept, self.most = 0, 0  # bytes that are in use now, and at most so far
        self.gradients = list[int]()  # bytes of the gradients of each operation's tensors
        self.blocks, self._recomputed = list[int](), 0  # bytes in use while each block is recomputed; that all keep so
        self._known = dict[int, tuple[int, int]]()  # address of a storage that is in use -> its bytes and operation
        self._entered = 0, 0  # operations and bytes before a block

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if function.is_view or name in _VIEWS:
            return made
        given, results = (
            [each for each in tree_leaves(tree) if isinstance(each, Tensor)] for tree in ((args, kwargs), made)
        )
        for each in results:
            self._keep(each.untyped_storage())
        floats = {each.untyped_storage()._cdata for each in (*given, *results) if each.is_floating_point()}
        self.gradients.append(sum(self._known[each][0] for each in floats & {*self._known}) * torch.is_grad_enabled())
        flops = flop_registry.get(function.overloadpacket, lambda *_, **__: 0)(*args, **(kwargs or {}), out_val=made)
        dtype = next((str(each.dtype).removeprefix("torch.") for each in given if each.is_floating_point()), "")
        moved = sum(each.nbytes for each in (*given, *results))
        self.ops.append(Op(_timed_as(name, args), dtype, flops, moved, 0, _backward(given, product=flops > 0)))
        return made

    def enter(self, *_: Any) -> None:
        """A block that is going to be recomputed begins."""
        self._entered = len(self.ops), self.kept

    def leave(self, _: nn.Module, __: Any, outputs: Any) -> None:
        """It ends."""
        first, before = self._entered
        self.ops[first:] = [each._replace(forward=2) for each in self.ops[first:]]
        self.blocks.append(self.kept - self._recomputed)
        given = sum(each.nbytes for each in tree_leaves(outputs) if isinstance(each, Tensor))
        self._recomputed += max(0, self.kept - before - given)

    def _keep(self, storage: Any) -> None:
        if (address := storage._cdata) not in self._known:
            size = -(-storage.nbytes() // _BLOCK) * _BLOCK
            self._known[address] = size, len(self.ops)
            self.kept += size
            self.most = max(self.most, self.kept)
            weakref.finalize(storage, self._free, address).atexit = False

    def _free(self, address: int) -> None:
        self.kept -= self._known.pop(address)[0]

    def peak(self) -> int:
        """Bytes in use at most, in the forward pass, or as the backward pass comes to an operation: what it and those
        before it have kept, and gradients of its tensors.
        """
        kept = [0] * len(self.ops)
        for size, number in self._known.values():
            kept[number] += size
        return max(
            self.most, *(each + gradient for each, gradient in zip(accumulate(kept), self.gradients, strict=True))
        )


def _backward(given: Sequence[Tensor], *, product: bool) -> float:
    factors = [each for each in given if each.is_floating_point() and (each.ndim > 1 or not product)]  # no biases
    needed = [each.requires_grad and torch.is_grad_enabled() for each in factors]
    return sum(sorted(needed)[-2:]) / 2 if product else float(any(needed))


def _timed_as(name: str, args: Any) -> str:
    if name != "convolution":
        return name
    (_, inputs, *kernel), groups = args[1].shape, args[8]
    if groups > 1:
        return "conv_depthwise" if inputs == 1 else "conv_grouped"
    return "conv1x1" if max(kernel) == 1 else "conv"


class _Autocast(Precision):
    """Autocast alone; the rest of a precision sets switches of the process."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.device, self.dtype = _GPU, dtype


class _Uninitialised(TorchFunctionMode):
    """Leaves out what fills new weights with random numbers: their values don't matter, and it takes half the time."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in _INITIALISING:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


class _FullPrecision(TorchFunctionMode):
    """Where fake tensors are on the CPU: `_FULL` takes float32, as on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in _FULL and args and torch.is_autocast_enabled("cpu"):
            args = (args[0].float(), *args[1:])
        return function(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention as the one operation that it is on a GPU; for fake tensors torch takes its parts, which it is there,
    too, where a query hasn't 4 dimensions.
    """
    if query.ndim != 4:
        return _in_parts(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled(_GPU.type):
        query, key, value = (each.to(torch.get_autocast_dtype(_GPU.type)) for each in (query, key, value))
    bias = attn_mask if attn_mask is None or attn_mask.is_floating_point() else None
    if bias is not None:
        bias = bias.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    whole = torch.ops.aten._scaled_dot_product_efficient_attention
    return whole(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


@contextmanager
def _fake_gpu() -> Iterator[None]:
    """Tensors without memory, also on a GPU that isn't there, for which torch switches autocast off or refuses it."""
    missing = mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False)
    bf16 = mock.patch("torch.cuda.is_bf16_supported", return_value=True)
    full = nullcontext() if _GPU.type == "cuda" else _FullPrecision()
    with missing, bf16, FakeTensorMode(allow_non_fake_inputs=True), full:  # tasks have tensors of their own
        yield


def made_fake(model: nn.Module) -> nn.Module:
    """The same module, its parameters and buffers without memory on the GPU; `to` can't swap them."""

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_GPU)

    for each in model.modules():
        for name, weight in each._parameters.items():
            if weight is not None:
                each._parameters[name] = nn.Parameter(fake(weight), requires_grad=weight.requires_grad)
        for name, buffer in each._buffers.items():
            each._buffers[name] = buffer if buffer is None else fake(buffer)
    return model

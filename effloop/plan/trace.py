"""The operations of a training step and the memory it keeps, of fake tensors on a GPU that needn't be there."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from effloop.assemble.environment import Resolved
from effloop.assemble.model import build_model, random_batch
from effloop.errors import ConfigError, reason
from effloop.precision import Precision
from effloop.task import Task
from effloop.train.trainer import Step

_GPU = torch.device("cuda:0")
_BATCHES = (2, 4)  # images; what grows with the batch is the difference of the two
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
    width: int  # of products: the smaller number of a group's inputs and outputs, by which tensor cores are filled


@dataclass(frozen=True)
class Trace:
    """What a training step of a model does, whatever the card."""

    ops: Sequence[Op]  # of the forward pass and the loss, in their order
    saved: float  # bytes of an image that are kept for the backward pass
    fixed: float  # bytes that are kept whatever the batch, such as weights in fewer bits
    largest: float  # bytes of an image's largest tensor
    weights: int  # bytes of parameters and buffers
    trained: int  # bytes of the parameters that are trained
    parameters: int  # tensors that are trained


def trace(config: Resolved, task: Task, num_outputs: int, dtype: torch.dtype | None, *, fused: bool = True) -> Trace:
    """Build the model, and run forward pass and loss of a step on fake tensors for two batch sizes.

    Args:
        config: model, image size and memory layout; its `batch_size` doesn't matter.
        task: as made for the data.
        num_outputs: of the model.
        dtype: that autocast computes in; None is none.
        fused: whether attention is one operation, as torch 2 has it on GPUs; else its weights are in memory.

    Raises:
        ConfigError: the model can't be built, or decides by values, which fake tensors haven't.
    """
    with torch.random.fork_rng(devices=[]), _Uninitialised():
        model = build_model(replace(config, compile=False), num_outputs, torch.device("cpu")).train()
    trained = [each for each in model.parameters() if each.requires_grad]
    sizes = sum(each.nbytes for each in (*model.parameters(), *model.buffers())), sum(each.nbytes for each in trained)
    seen = []
    with _fake_gpu():
        step = Step(_made_fake(model), task, _Autocast(dtype))
        for count in _BATCHES:
            few = replace(config, batch_size=count)
            with ExitStack() as stack:
                if fused:
                    stack.enter_context(_FusedAttention())
                watch = stack.enter_context(_Watch())
                try:
                    outputs = step(*random_batch(few, config.size, task, num_outputs, _GPU))
                except Exception as error:  # of any kind, in the code of any model
                    name = getattr(config.model, "arch", config.model.name)
                    raise ConfigError(
                        f"model: {name} can't be planned, as it reads values of tensors: {reason(error)}"
                    ) from error
            seen.append((watch.ops, watch.kept, watch.sizes))
            del outputs
    (ops, saved, sizes_of_few), (more_ops, more_saved, sizes_of_many) = seen
    each, fixed = _line(saved, more_saved)
    return Trace(
        ops=[_of_image(one, other) for one, other in zip(ops, more_ops, strict=True)],
        saved=each,
        fixed=fixed,
        largest=max(_line(*pair)[0] for pair in zip(sizes_of_few, sizes_of_many, strict=True)),
        weights=sizes[0],
        trained=sizes[1],
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


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations, and the memory that outlives them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.kept, self.sizes = 0, list[int]()  # bytes that are in use now, and of each tensor in turn
        self._known = set[int]()  # addresses of storages that are in use

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
        flops = flop_registry.get(function.overloadpacket, lambda *_, **__: 0)(*args, **(kwargs or {}), out_val=made)
        name, width = _product(name, args)
        dtype = next((str(each.dtype).removeprefix("torch.") for each in given if each.is_floating_point()), "")
        self.ops.append(Op(name, dtype, flops, sum(each.nbytes for each in (*given, *results)), 0, width))
        return made

    def _keep(self, storage: Any) -> None:
        if (address := storage._cdata) not in self._known:
            self._known.add(address)
            size = -(-storage.nbytes() // _BLOCK) * _BLOCK
            self.kept += size
            self.sizes.append(size)
            weakref.finalize(storage, self._free, address, size).atexit = False

    def _free(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.kept -= size


def _product(name: str, args: Any) -> tuple[str, int]:
    """The name by which an operation is timed, and the width of a product, else 0."""
    if name == "convolution":
        (outputs, inputs, *kernel), groups = args[1].shape, args[8]
        if groups > 1:
            return "conv_depthwise" if inputs == 1 else "conv_grouped", min(inputs, outputs // groups)
        return "conv1x1" if max(kernel) == 1 else "conv", min(inputs, outputs)
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        return name, min(args[-1].shape[-2:])
    return name, 0


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


class _FusedAttention(TorchFunctionMode):
    """Attention as the one operation that it is on a GPU; for fake tensors torch takes its parts."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        return _attention(*args, **(kwargs or {}))


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
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (each.to(torch.get_autocast_dtype("cuda")) for each in (query, key, value))
    bias = attn_mask if attn_mask is None or attn_mask.is_floating_point() else None
    if bias is not None:
        bias = bias.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    whole = torch.ops.aten._scaled_dot_product_efficient_attention
    return whole(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


@contextmanager
def _fake_gpu() -> Iterator[None]:
    """Tensors without memory, also on a GPU that isn't there, for which torch would switch autocast off or refuse it."""
    missing = mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False)
    bf16 = mock.patch("torch.cuda.is_bf16_supported", return_value=True)
    with missing, bf16, FakeTensorMode(allow_non_fake_inputs=True):  # tasks have tensors of their own
        yield


def _made_fake(model: nn.Module) -> nn.Module:
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

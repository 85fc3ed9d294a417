"""torch's CUDA kernels on the emulated device: queued on a stream, and computed on the CPU when they run.

`install()` puts a Python kernel in the place of every one that torch has for CUDA, under autograd, autocast and the
splitting of operations into others, which stay torch's own; and so do views, the allocators, streams, events and copies
between host and device. A kernel's task refers to memory by address, as a GPU does: it keeps no tensor.
"""

from __future__ import annotations

import ctypes
import gc
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ADDED = ("convolution", "convolution_backward", "copy_")  # which torch splits by device elsewhere, or not at all
NATIVE = (
    "resize_",
    "set_",
    "record_stream",
    "is_set_to",
    "_efficientzerotensor",
)  # no kernels, as views
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
aten = torch.ops.aten

driver = ctypes.PyDLL(None)  # holds the GIL, which the driver releases where it waits
failures: list[str] = []  # of kernels that have run: a traceback each
_tasks: dict[int, Callable[[], Any]] = {}
_number = 0
_memory: dict[tuple[int, torch.dtype], tuple[int, Tensor]] = {}  # {(device, dtype): (address, all of it)}
_clean = torch._C._ExcludeDispatchKeyGuard  # kernels run where the host waits: inside of its modes and autocast
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
for _name in "PythonTLSSnapshot", "AutogradCPU", "AutogradOther", "ADInplaceOrView", "AutocastCPU":
    _KEYS = _KEYS | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name))


def schedule(kind: str, seed: int = 0) -> None:
    """'latest': tasks run when something has to wait for them; 'eager': at once; 'random': somewhere between."""
    torch.cuda.synchronize()
    driver.emu_schedule(["latest", "eager", "random"].index(kind), ctypes.c_ulong(seed))


def counts(device: int = 0) -> dict[str, int]:
    """Contexts made, waits of the host, errors, kernels, copies, and copies of pageable memory, since the start."""
    found = (ctypes.c_long * 6 * 8).in_dll(driver, "emu_counts")[device]
    return dict(zip(("contexts", "syncs", "errors", "kernels", "copies", "pageable"), found, strict=True))


def first_error() -> str:
    """What the driver refused first, or ''."""
    return (ctypes.c_char * 300).in_dll(driver, "emu_first_error").value.decode()


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run(number: int) -> None:
    collecting = gc.isenabled()
    gc.disable()  # tensors on the device that are freed here would want the allocator's lock
    try:
        with _clean(_KEYS):
            _tasks.pop(number)()
    except BaseException:
        failures.append(traceback.format_exc())
        driver.emu_fail()
    finally:
        if collecting:
            gc.enable()


def _launch(device: int, task: Callable[[], Any]) -> None:
    global _number
    _number += 1
    _tasks[_number] = task
    stream = torch._C._cuda_getCurrentRawStream(device)
    driver.emu_launch(device, ctypes.c_void_p(stream), _run, ctypes.c_void_p(_number))


def _alias(tensor: Tensor) -> Tensor:
    """The same memory as a CPU tensor, which doesn't keep it."""
    at = tensor.data_ptr()
    if not at:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    key = tensor.get_device(), tensor.dtype
    if key not in _memory:
        size = ctypes.c_size_t()
        driver.emu_memory.restype = ctypes.c_void_p
        begin = driver.emu_memory(key[0], ctypes.byref(size))
        whole = torch.frombuffer((ctypes.c_ubyte * size.value).from_address(begin), dtype=torch.uint8)
        _memory[key] = begin, whole.view(tensor.dtype)
    begin, whole = _memory[key]
    return whole.as_strided(tensor.shape, tensor.stride(), (at - begin) // tensor.itemsize)


def _wait(device: int) -> None:
    """The host reads a value: torch's own blocking copy, which its check of synchronizations knows."""
    source = _new((1,), (1,), torch.uint8, device)
    _copy.call_boxed(CUDA, torch.empty(1, dtype=torch.uint8), source)


def _new(size: Any, stride: Any, dtype: torch.dtype, device: int) -> Tensor:
    options = {"dtype": dtype, "layout": torch.strided, "device": torch.device("cuda", device), "pin_memory": False}
    tensor: Tensor = _empty_strided.call_boxed(CUDA, size, stride, **options)
    _poison(tensor)
    return tensor


def _poison(tensor: Tensor) -> None:
    device, at = tensor.get_device(), tensor.data_ptr()
    if at:
        stream = torch._C._cuda_getCurrentRawStream(device)
        driver.emu_poison(
            device, ctypes.c_void_p(stream), ctypes.c_void_p(at), ctypes.c_size_t(tensor.untyped_storage().nbytes())
        )


def _empty(kernel: Any) -> Callable[..., Tensor]:
    def empty(keys: Any, *args: Any, **options: Any) -> Tensor:
        tensor: Tensor = kernel.call_boxed(keys, *args, **options)
        _poison(tensor)
        return tensor

    return empty


def _copied(keys: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between devices it is torch's, which does it in steps if need be; on one device a kernel."""
    if to.device == source.device:
        return _copy_kernel(to, source)
    return _copy.call_boxed(keys, to, source, non_blocking)


class Call:
    """The arguments of a call of an operation, its device, and what its outputs depend on."""

    def __init__(self, op: Any, args: Any, kwargs: Any) -> None:
        self.op = op
        self.device = -1
        self.key: list[Any] = []
        self.host: list[Tensor] = []
        self.waits = False
        self.args = [self.take(each) for each in args]
        self.kwargs = {name: self.take(each) for name, each in kwargs.items()}
        if self.device < 0:
            self.device = kwargs["device"].index if kwargs.get("device") else torch.cuda.current_device()
        if any(each.dim() for each in self.host):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:{self.device} "
                f"and cpu! ({op})"
            )

    def take(self, value: Any) -> Any:
        """An argument for the CPU."""
        if isinstance(value, Tensor):
            self.key += value.shape, value.stride(), value.dtype
            if not value.is_cuda:
                self.host.append(value)
                return value.clone()
            if self.device not in (-1, value.get_device()):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda:{self.device} and {value.device}! ({self.op})"
                )
            self.device = value.get_device()
            return _alias(value)
        if isinstance(value, list | tuple):
            self.key.append(len(value))
            return [self.take(each) for each in value]
        if isinstance(value, torch.Generator):
            return _generator(value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        self.key.append(type(value) if isinstance(value, float) else (type(value), value))
        return value


def _generator(on_device: torch.Generator) -> torch.Generator:
    """For the CPU, of the seed and the offset of one for the device, which moves on as if numbers were drawn."""
    offset = on_device.get_offset()
    on_device.set_offset(offset + 4)
    return torch.Generator().manual_seed((on_device.initial_seed() * 1_000_003 + offset) % (1 << 63))


def _zeros(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
    if isinstance(value, torch.Generator):  # whose numbers are drawn later
        return torch.Generator()
    return [_zeros(each) for each in value] if isinstance(value, list) else value


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _kernel(op: Any, compute: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A kernel that queues an operation; `compute` does it on the CPU."""
    compute = compute or op
    schema = op._schema
    written = [n for n, each in enumerate(schema.arguments) if each.alias_info is not None and each.alias_info.is_write]
    names = [each.name for each in schema.arguments]
    in_place = bool(written) and all(each.alias_info is not None for each in schema.returns)
    out = [names[n] for n in written if schema.arguments[n].kwarg_only]
    seeded = torch.Tag.nondeterministic_seeded in op.tags
    dynamic = torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags
    indexes = op.name().startswith(("aten::index", "aten::_index_put_impl_", "aten::_unsafe_index"))
    has_generator = "generator" in names
    learned: dict[Any, Any] = {}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if indexes:
            args = (args[0], _indices(args[1], args[0]), *args[2:]) if isinstance(args[1], list | tuple) else args
        call = Call(op, args, kwargs)
        device = call.device
        if seeded and has_generator and call.kwargs.get("generator") is None:
            call.kwargs["generator"] = _generator(torch.cuda.default_generators[device])
        now = dynamic and not (indexes and not _masked(args[1]))
        if now or (indexes and isinstance(args[1], list | tuple) and _masked(args[1])):
            _wait(device)
        key = tuple(call.key)
        with _clean(_KEYS):
            if now:
                made = compute(*call.args, **call.kwargs)
                found: Any = [
                    (each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else None
                    for each in _flat(made)
                ]
            elif (found := learned.get(key) if call.key else None) is None:
                found = _learn(compute, call, out, in_place)
                learned[key] = found
        for name, (size, _, _) in zip(out, found if out else (), strict=False):
            if kwargs[name].shape != size:
                kwargs[name].resize_(size)
                call.kwargs[name] = _alias(kwargs[name])
        if in_place:
            _launch(device, lambda: compute(*call.args, **call.kwargs))
            results = [kwargs[each] for each in out] or [args[n] for n in written]
            return None if not schema.returns else results[0] if len(schema.returns) == 1 else tuple(results)
        outputs = [_new(*each, device) if each is not None else None for each in found]
        aliases = [None if each is None else _alias(each) for each in outputs]
        if now:
            results = _flat(made)
            outputs = [result if each is None else each for each, result in zip(outputs, results, strict=True)]
            _launch(device, lambda: _fill(aliases, results))
        else:
            _launch(device, lambda: _fill(aliases, compute(*call.args, **call.kwargs)))
        kinds = [str(each.type) for each in schema.returns]
        return outputs if kinds == ["List[Tensor]"] else outputs[0] if len(kinds) == 1 else tuple(outputs)

    return kernel


def _fill(outputs: list[Tensor | None], results: Any) -> None:
    for output, result in zip(outputs, _flat(results), strict=True):
        if output is not None:
            output.copy_(result)


def _learn(compute: Callable[..., Any], call: Call, out: list[str], in_place: bool) -> list[Any]:
    """(size, stride, dtype) of an operation's outputs, None where there is none: of the same with zeros."""
    args, kwargs = _zeros(call.args), {name: _zeros(each) for name, each in call.kwargs.items()}
    made = compute(*args, **kwargs)
    if in_place and not out:
        return []
    results = [kwargs[each] for each in out] if in_place else _flat(made)
    return [(each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else None for each in results]


def _masked(indices: Any) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _indices(indices: Any, of: Tensor) -> list[Tensor | None]:
    return [each if each is None or each.is_cuda else each.to(of.device) for each in indices]


# Kernels that only CUDA has, and what they are on a CPU.


def _scalar(value: Tensor) -> Any:
    host = torch.empty((), dtype=value.dtype)
    _copy.call_boxed(CUDA, host, value)
    return host.item()


def _batch_norm(
    images: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    found = aten.native_batch_norm(images, weight, bias, mean, var, training, momentum, eps)
    return *found, torch.zeros(0, dtype=torch.uint8)


def _batch_norm_backward(
    images: Tensor, gradient: Tensor, weight: Any, mean: Any, var: Any, saved: Any, inverse: Any, eps: float, _: Any
) -> Any:
    return aten.native_batch_norm_backward(gradient, images, weight, mean, var, saved, inverse, True, eps, [True] * 3)


def _dropout(images: Tensor, p: float, train: bool | None) -> Any:
    raise NotImplementedError


SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
}


def _native(op: Any) -> bool:
    schema = op._schema
    views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    return views or schema.name.removeprefix("aten::") in NATIVE


def install() -> None:
    """Replace torch's kernels for CUDA in this process, once."""
    global _copy, _copy_kernel, _empty_strided, _library
    _copy = torch.library.get_kernel("aten::copy_", "CUDA")
    _copy_kernel = _kernel(aten.copy_.default)
    _empty_strided = torch.library.get_kernel("aten::empty_strided", "CUDA")
    _library = torch.library.Library("aten", "IMPL")
    for name in "empty.memory_format", "empty_strided":
        kernel = _empty(torch.library.get_kernel(f"aten::{name}", "CUDA"))
        _library.impl(name, kernel, "CUDA", with_keyset=True, allow_override=True)
    _library.impl("copy_", _copied, "CUDA", with_keyset=True, allow_override=True)
    _library.impl("_local_scalar_dense", _scalar, "CUDA", allow_override=True)
    _library.impl("_fused_sdp_choice", lambda *_, **__: 0, "CUDA", allow_override=True)
    done = {"empty.memory_format", "empty_strided", "copy_", "_local_scalar_dense", "_fused_sdp_choice"}
    names = [
        each for each in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA") if each.startswith("aten::")
    ]
    for name in [*names, *(f"aten::{each}" for each in ADDED)]:
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        if name.removeprefix("aten::") not in done and not _native(op):
            _library.impl(name.removeprefix("aten::"), _kernel(op, SPECIAL.get(name)), "CUDA", allow_override=True)

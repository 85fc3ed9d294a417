"""torch's CUDA kernels on the emulated device: queued on a stream, and computed on the CPU when they run.

`install()` puts a Python kernel in the place of every one that torch has for CUDA. What is above them (autograd,
autocast, operations made of others) stays torch's own, and so do views, allocators, streams, events, and copies between
devices. A queued kernel knows its memory by address, as a GPU does: it keeps no tensor.
"""

import ctypes
import gc
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NATIVE = ("resize_", "set_", "record_stream", "is_set_to", "_efficientzerotensor")  # no kernels, and neither are views
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
SCHEDULES = "latest", "eager", "ahead", "random"
aten = torch.ops.aten

driver = ctypes.PyDLL(None)  # called with the GIL, which the driver releases where it waits
driver.emu_memory.restype = ctypes.c_void_p
driver.emu_memory.argtypes = ctypes.c_int, ctypes.c_void_p
driver.emu_poison.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
driver.emu_schedule.argtypes = ctypes.c_int, ctypes.c_ulong

failures: list[str] = []  # tracebacks of kernels that have run
_tasks: dict[int, Callable[[], Any]] = {}
_number = 0
_memory: dict[tuple[int, torch.dtype], tuple[int, Tensor]] = {}  # {(device, dtype): (address, all of it)}
_modes = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)  # of the host, wherever that is when a kernel runs
for _name in "PythonTLSSnapshot", "AutogradCPU", "AutogradOther", "ADInplaceOrView", "AutocastCPU":
    _modes = _modes | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name))


def schedule(kind: str, seed: int = 0) -> None:
    """Run what is queued, forget errors, and go on by another schedule: see `emulator.environment`."""
    driver.emu_schedule(SCHEDULES.index(kind), seed)
    failures.clear()


def counts(device: int = 0) -> dict[str, int]:
    """Contexts made, waits of the host, errors, kernels, copies, and copies of pageable memory, since the start."""
    found = (ctypes.c_long * 6 * 8).in_dll(driver, "emu_counts")[device]
    return dict(zip(("contexts", "syncs", "errors", "kernels", "copies", "pageable"), found, strict=True))


def first_error() -> str:
    """What the driver refused first, or ''."""
    return (ctypes.c_char * 300).in_dll(driver, "emu_first_error").value.decode()


# The queue


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run(number: int) -> None:
    collecting = gc.isenabled()
    gc.disable()  # what is finalized may want to wait for this very stream
    try:
        with torch._C._ExcludeDispatchKeyGuard(_modes):
            _tasks.pop(number)()
    except BaseException:
        failures.append(traceback.format_exc())
        print("a kernel failed on the emulated device:", failures[-1], file=sys.stderr)
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


def _wait(device: int) -> None:
    """The host reads a value: by torch's own blocking copy, which its check of synchronizations knows."""
    _copy.call_boxed(CUDA, torch.empty(1, dtype=torch.uint8), _new((1,), (1,), torch.uint8, device))


# Memory


def _alias(tensor: Tensor) -> Tensor:
    """The same memory as a CPU tensor, which doesn't keep it."""
    at = tensor.data_ptr()
    if not at:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    key = tensor.get_device(), tensor.dtype
    if key not in _memory:
        size = ctypes.c_size_t()
        begin = driver.emu_memory(key[0], ctypes.byref(size))
        whole = torch.frombuffer((ctypes.c_ubyte * size.value).from_address(begin), dtype=torch.uint8)
        _memory[key] = begin, whole.view(tensor.dtype)
    begin, whole = _memory[key]
    return whole.as_strided(tensor.shape, tensor.stride(), (at - begin) // tensor.itemsize)


def _poisoned(tensor: Tensor) -> Tensor:
    device, at = tensor.get_device(), tensor.data_ptr()
    if at:
        stream = torch._C._cuda_getCurrentRawStream(device)
        driver.emu_poison(device, stream, at, tensor.untyped_storage().nbytes())
    return tensor


def _new(size: Any, stride: Any, dtype: torch.dtype, device: int) -> Tensor:
    options = {"dtype": dtype, "layout": torch.strided, "device": torch.device("cuda", device), "pin_memory": False}
    return _poisoned(_empty_strided.call_boxed(CUDA, size, stride, **options))


def _empty(kernel: Any) -> Callable[..., Tensor]:
    return lambda keys, *args, **options: _poisoned(kernel.call_boxed(keys, *args, **options))


def _copied(keys: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between devices it is torch's, which does it in steps if need be; on one device a kernel."""
    if to.device == source.device:
        return _copy_kernel(to, source)
    return _copy.call_boxed(keys, to, source, non_blocking)


def _foreach_copied(to: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    for each, source in zip(to, sources, strict=True):
        each.copy_(source, non_blocking)


def _read(tensor: Tensor) -> Any:
    host = torch.empty((), dtype=tensor.dtype)
    _copy.call_boxed(CUDA, host, tensor)
    return host.item()


# Kernels


def _generator(on_device: torch.Generator) -> torch.Generator:
    """For the CPU, of the seed and the offset of one for the device, which moves on as if numbers were drawn."""
    offset = on_device.get_offset()
    on_device.set_offset(offset + 4)
    return torch.Generator().manual_seed((on_device.initial_seed() * 1_000_003 + offset) % (1 << 63))


class Call:
    """A call's arguments for the CPU, its device, and what the layout of its outputs depends on."""

    def __init__(self, op: Any, args: Any, kwargs: Any) -> None:
        self.key: list[Any] = []
        self._devices: set[torch.device] = set()
        self.args = [self._take(each) for each in args]
        self.kwargs = {name: self._take(each) for name, each in kwargs.items()}
        found = self._devices or {kwargs.get("device") or torch.device("cuda")}
        if len(found) > 1:
            words = " and ".join(sorted(map(str, found), reverse=True))
            message = "Expected all tensors to be on the same device, but found at least two devices, "
            raise RuntimeError(f"{message}{words}! ({op})")
        index = found.pop().index
        self.device: int = torch.cuda.current_device() if index is None else index

    def _take(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.key += value.shape, value.stride(), value.dtype
            if value.is_cuda or value.dim():  # a number may come from the host
                self._devices.add(value.device)
            return _alias(value) if value.is_cuda else value.clone()
        if isinstance(value, list | tuple):
            self.key.append(len(value))
            return [self._take(each) for each in value]
        if isinstance(value, torch.Generator):
            return _generator(value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        self.key += type(value), None if isinstance(value, float) else value
        return value


def _like(value: Any, number: int | None) -> Any:
    """Tensors of the same layout with one number everywhere, or copies."""
    if isinstance(value, Tensor):
        sizes = [size if stride else 1 for size, stride in zip(value.shape, value.stride(), strict=True)]  # expanded
        made = torch.empty_strided(sizes, value.stride(), dtype=value.dtype)
        filled = made.copy_(value.as_strided(sizes, value.stride())) if number is None else made.fill_(number)
        return filled.expand(value.shape)
    if isinstance(value, torch.Generator):  # whose numbers are drawn later
        return torch.Generator()
    if isinstance(value, dict):
        return {name: _like(each, number) for name, each in value.items()}
    return [_like(each, number) for each in value] if isinstance(value, list) else value


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _layouts(values: Any) -> list[Any]:
    return [(each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else None for each in _flat(values)]


def _fill(outputs: list[Tensor | None], values: Any) -> None:
    for output, value in zip(outputs, _flat(values), strict=True):
        if output is not None:
            output.copy_(value)


class Kernel:
    """Queues an operation; `compute` does it on the CPU."""

    def __init__(self, op: Any, compute: Callable[..., Any] | None = None) -> None:
        self.op, self.compute, tags = op, compute or op, op.tags
        args, results = op._schema.arguments, op._schema.returns
        written = [n for n, each in enumerate(args) if each.alias_info is not None and each.alias_info.is_write]
        self.written = [n for n in written if not args[n].kwarg_only]
        self.out = [args[n].name for n in written if args[n].kwarg_only]
        self.in_place = bool(written) and all(each.alias_info is not None for each in results)
        self.is_tensor = [str(each.type) in ("Tensor", "Optional[Tensor]") for each in args if not each.kwarg_only]
        self.of_tensors = any("Tensor" in str(each.type) for each in args if not each.kwarg_only)
        self.results = [str(each.type) for each in results]
        has_generator = any(each.name == "generator" for each in args)
        self.draws = torch.Tag.nondeterministic_seeded in tags and (has_generator or compute is not None)
        self.waits = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        self.learned: dict[tuple[Any, ...], Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        waits, compute = self.waits, self.compute
        if "index" in self.op.name() and isinstance(args[1], list | tuple):
            indices = [each if each is None else each.to(args[0].device) for each in args[1]]
            args = (args[0], indices, *args[2:])
            waits = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)
        elif kwargs.get("output_size") is not None:
            waits = False
        call = Call(self.op, args, kwargs)
        device = call.device
        if any(isinstance(each, int | float) for each, tensor in zip(args, self.is_tensor, strict=False) if tensor):
            compute = self.op.overloadpacket  # finds the overload that takes a number
        if self.draws and call.kwargs.get("generator") is None:
            call.kwargs["generator"] = _generator(torch.cuda.default_generators[device])
        if waits:
            _wait(device)
        with torch._C._ExcludeDispatchKeyGuard(_modes):
            values = compute(*call.args, **call.kwargs) if waits and not self.in_place else None
            layouts = self._learn(compute, call) if values is None else _layouts(values)
        for name, (size, *_) in zip(self.out, layouts, strict=False):
            if kwargs[name].shape != size:
                call.kwargs[name] = _alias(kwargs[name].resize_(size))
        if self.in_place:
            _launch(device, lambda: compute(*call.args, **call.kwargs))
            results = [kwargs[name] for name in self.out] or [args[n] for n in self.written]
        else:
            results = [None if each is None else _new(*each, device) for each in layouts]
            outputs = [None if each is None else _alias(each) for each in results]
            if values is None:
                _launch(device, lambda: _fill(outputs, compute(*call.args, **call.kwargs)))
            else:
                _launch(device, lambda: _fill(outputs, values))
                results = [value if each is None else each for each, value in zip(results, _flat(values), strict=True)]
        if len(self.results) == 1 and self.results != ["List[Tensor]"]:
            return results[0]
        return results if self.results else None

    def _learn(self, compute: Callable[..., Any], call: Call) -> list[Any]:
        """The outputs' layouts, by the same call with zeros, or ones; if neither will do, with the values."""
        key = tuple(call.key)
        if key in self.learned:
            return self.learned[key]
        for number in (0, 1, None):
            if number is None:
                torch.cuda.current_stream(call.device).synchronize()
            args, kwargs = _like(call.args, number), _like(call.kwargs, number)
            try:
                made = compute(*args, **kwargs)
                break
            except RuntimeError:
                if number is None:
                    raise
        found = _layouts([kwargs[name] for name in self.out] if self.in_place else made)
        if self.of_tensors:
            self.learned[key] = found
        return found


# What only CUDA has, or has for more types, on a CPU.


def _batch_norm(
    images: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    found = aten.native_batch_norm(images, weight, bias, mean, var, training, momentum, eps)
    return *found, torch.zeros(0, dtype=torch.uint8)


def _batch_norm_backward(
    images: Tensor, gradient: Tensor, weight: Any, mean: Any, var: Any, saved: Any, inverse: Any, eps: float, _: Any
) -> Any:
    return aten.native_batch_norm_backward(gradient, images, weight, mean, var, saved, inverse, True, eps, [True] * 3)


def _dropout(values: Tensor, p: float, train: bool | None, *, generator: torch.Generator) -> Any:
    kept = torch.empty_like(values, dtype=torch.bool).bernoulli_(1 - p if train else 1, generator=generator)
    return values * kept / (1 - p if train else 1), kept


def _histc(values: Tensor, *args: Any) -> Tensor:
    return values.double().histc(*args).to(values.dtype)


SPECIAL: dict[str, Callable[..., Any]] = {
    "cudnn_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    "native_dropout": _dropout,
    "histc": _histc,
}


def install() -> None:
    """Replace torch's kernels for CUDA in this process, once."""
    global _copy, _copy_kernel, _empty_strided, _library
    torch.cuda._device_count_nvml = lambda: -1  # else NVML tells of real GPUs, or CUDA_VISIBLE_DEVICES of none
    _copy, _empty_strided = (torch.library.get_kernel(f"aten::{name}", "CUDA") for name in ("copy_", "empty_strided"))
    _copy_kernel = Kernel(aten.copy_.default)
    _library = torch.library.Library("aten", "IMPL")
    own: dict[str, Any] = {
        "_local_scalar_dense": _read,
        "_fused_sdp_choice": lambda *_, **__: 0,  # attention as products of matrices
        "_foreach_copy_": _foreach_copied,
        "convolution": Kernel(aten.convolution.default),  # else torch asks for cuDNN's
        "convolution_backward": Kernel(aten.convolution_backward.default),
    }
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        namespace, _, name = name.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten" and packet not in NATIVE and name not in own:
            op = getattr(getattr(aten, packet), overload or "default")
            if not any(each.alias_info is not None and not each.alias_info.is_write for each in op._schema.returns):
                own[name] = Kernel(op, SPECIAL.get(name))
    for name in "empty.memory_format", "empty_strided", "copy_":
        kernel = _copied if name == "copy_" else _empty(torch.library.get_kernel(f"aten::{name}", "CUDA"))
        own.pop(name, None)
        _library.impl(name, kernel, "CUDA", with_keyset=True, allow_override=True)
    for name, kernel in own.items():
        _library.impl(name, kernel.__call__ if isinstance(kernel, Kernel) else kernel, "CUDA", allow_override=True)

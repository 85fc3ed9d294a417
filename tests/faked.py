"""Training and evaluation on torch's fake tensors on `cuda:0`: which devices, waits, types and layouts there are.

Fake tensors have no values: whoever reads one is seen. It all runs on the emulator, on which torch's streams and
events work, and so does autograd; the parts are assembled as `build_trainer` does it.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from composing import compose_once
from tabled import Tabled
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

import effloop
from effloop.assemble import learner, loader, trainer
from effloop.assemble.environment import build_environment
from effloop.assemble.model import build_model
from effloop.batch import Batch, ImageSize
from effloop.data.augment.base import Device, RecipeConfig
from effloop.data.augment.native.augment import NativeAugment, all_operations
from effloop.data.engine import Engine
from effloop.data.loader import Loader
from effloop.data.plan import Plan
from effloop.data.source import Kind
from effloop.plan.trace import made_fake
from effloop.record import Metrics
from effloop.train.evaluation import Scorer, evaluate
from effloop.train.trainer import Trainer

PACKAGE = str(Path(effloop.__file__).parent) + "/"
GPU, BATCH, CLASSES = torch.device("cuda:0"), 4, 3
KEYS = np.arange(16, dtype=np.uint64) << np.uint64(58)

OVERFLOW = "precision/__init__.py:Precision.step"  # float16: whether scaled gradients overflowed, once an update
MAY_WAIT = {  # the places that wait for the device; wherever else it is waited for is a fault
    OVERFLOW,
    "train/nan.py:StopOrSkip._may_update",  # nan=skip: whether gradients are finite, before each update
    "train/nan.py:StopOrSkip.check",  # whether weights are, before a checkpoint
    "record/base.py:Metrics.read",  # scores
    "train/evaluation.py:Scorer._move",  # the outputs that are kept for scores and details
}

ZERO = {OVERFLOW, "train/nan.py:StopOrSkip.check"}
"""Those that read a 0: nothing has overflowed. All other values are 1."""


class Watch(TorchDispatchMode):
    """Raises where the host waits for the device: it reads a value, copies from it, or to it from pageable memory."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function._schema.name.removeprefix("aten::"), kwargs or {}
        if name == "_local_scalar_dense":
            (tensor,) = args
            if tensor.is_cuda:
                self.wait("reads a value")
            zero = here() in ZERO and (tensor.is_cuda or tensor.dtype is torch.float64)  # not an optimizer's own count
            return not zero if tensor.dtype is torch.bool else int(not zero)
        if name == "lift_fresh" and args[0].is_cuda:
            self.wait("makes a tensor of numbers")
        if name == "is_pinned":
            return hasattr(args[0], "pinned")
        if name == "_pin_memory":  # which fake tensors can't
            return pinned(torch.empty_like(args[0], device="cpu"))
        if name.strip("_").startswith("index") and isinstance(args[1], list | tuple) and _masks(args[1]):
            if not args[0].is_cuda:
                return args[0]
            if "put" not in name or args[2].numel() != 1:  # of one value it is `masked_fill`
                self.wait("has a mask as an index")
        result = function(*args, **kwargs)
        for to, source in _copies(name, args, result):
            if source.is_cuda != to.is_cuda:
                host = to if source.is_cuda else source
                late = kwargs.get("non_blocking") or args[2:3] == (True,)
                if not late or not hasattr(host, "pinned"):
                    self.wait(f"copies from {source.device} to {to.device}")
        return pinned(result) if kwargs.get("pin_memory") else result

    def wait(self, what: str) -> None:
        place = here()
        self.waits[place] += 1
        if place not in MAY_WAIT:
            raise AssertionError(f"{place} {what}")


def pinned(tensor: Tensor) -> Tensor:
    """Marked as page-locked memory."""
    tensor.pinned = True  # type: ignore[attr-defined]
    return tensor


def _masks(indices: Sequence[Tensor | None]) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _copies(name: str, args: Any, result: Any) -> list[tuple[Tensor, Tensor]]:
    if name == "_foreach_copy_":
        return [*zip(*args[:2], strict=True)]
    return [(result, args[0])] if name == "_to_copy" else [args[:2]] if name == "copy_" else []


def here(frame: Any = None) -> str:
    """The innermost place in the package, `file:function`, of those that called or of a traceback's frame."""
    frame = frame or sys._getframe(1)
    while frame and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if not frame:
        return "outside"
    return f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_code.co_qualname.partition('.<locals>')[0]}"


def _numpy(tensor: FakeTensor) -> Any:
    """`numpy()`, which fake tensors haven't."""
    if tensor.is_cuda:
        raise TypeError("can't convert a tensor of the GPU to numpy")
    with unset_fake_temporarily():
        return torch.ones(tensor.shape, dtype=tensor.dtype).numpy()


class Mode(FakeTensorMode):
    """What the host has is real. Copying a fake tensor, as for an average, copies no mode: torch crashed then."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __deepcopy__(self, memo: Any) -> Mode:
        return self


class Masked(Tabled):
    """Samples with masks of three classes."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(keys, np.zeros((len(keys), CLASSES), np.uint8))
        self.kind, self._targets = Kind.masks, self._targets[:, :0]


def source_of(task: str, count: int) -> Tabled:
    keys, labels = [str(number) for number in range(count)], np.arange(count) % CLASSES
    if task == "segmentation":
        return Masked(keys)
    flags = np.eye(CLASSES, dtype=np.float32 if task == "regression" else np.uint8)[labels]
    return Tabled(keys, labels if task == "classification" else flags)


class Unfilled(Engine):
    """Batches in pinned memory whose pixels nobody decodes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def stream(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        for request in self.plan.requests(epoch, samples_seen):
            with unset_fake_temporarily():
                memory = torch.zeros(self.plan.shape(BATCH), dtype=torch.uint8)
                batch = self.plan.empty_batch(request, memory)
                pinned(batch.images)
            yield batch


def unfilled(environment: Any, *, train: bool) -> Loader:
    """One update's batches to train on, or one short batch."""
    config, task = environment.config, environment.config.task.name
    source = source_of(task, BATCH * config.accumulate if train else BATCH - 1)
    plan = loader._plan(config, source, environment.parallel, train=train)
    made = loader._loader_of(config, environment.task, plan, GPU, train=train)
    made.engine = Unfilled(plan)
    return made


def assembled(words: Sequence[str]) -> Trainer:
    """The trainer of a config, on fake tensors."""
    plain = ("device=cuda:0", "record=none", "checkpoint=none", "num_workers=0", "engine=inline")
    config = effloop.compose([*plain, f"batch_size={BATCH}", *words])
    environment = build_environment(config)
    train, val = (unfilled(environment, train=each) for each in (True, False))

    def built(config: Any, num_outputs: int, device: torch.device, given: Any = None) -> nn.Module:
        with unset_fake_temporarily():  # constructors read values
            model = build_model(config, num_outputs, torch.device("cpu"), given)
        return made_fake(model)

    data = loader.Data(train, train, train, val, {"train": {}, "val": {}}, [], {})
    environment = environment.fitted(train.source)
    quick = mock.patch.object(trainer.configs, "to_dict", return_value={})  # for files that aren't written
    with mock.patch.object(learner, "build_model", built), quick:
        found = learner.build_learner(environment, data, learner.Start(), None)
        return trainer._trainer(environment, data, found, learner.Start(), Path("run"), {})


class Seen:
    """Watches a trainer's modules and optimizer, and lists in `faults` what isn't as it should be."""

    def __init__(self, made: Trainer, *, channels_last: bool) -> None:
        self.faults: dict[str, None] = {}
        self.made, self.format = made, torch.channels_last if channels_last else torch.contiguous_format
        for name, each in made.model.named_modules():
            if isinstance(each, nn.Conv2d | nn.Linear):
                each.register_forward_hook(lambda module, given, found, name=name: self.layer(name, module, found))
        made.train_step.register_forward_pre_hook(lambda module, given: self.images(given[0]))
        made.train_step.register_forward_hook(lambda module, given, found: self.expect("loss", found[0], torch.float32))
        made.optimizer.register_step_pre_hook(lambda *_: self.gradients())
        made.optimizer.register_step_post_hook(lambda *_: self.states())

    def expect(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if tensor.dtype != dtype or tensor.device != GPU:
            self.faults[f"{name} is {tensor.dtype} on {tensor.device}, not {dtype}"] = None

    def images(self, tensor: Tensor) -> None:
        """Of one channel both layouts are contiguous, and convolutions go by the strides."""
        self.expect("images", tensor, torch.float32)
        if tensor.stride() != torch.empty(tensor.shape, memory_format=self.format).stride():
            self.faults[f"images have strides {tensor.stride()}"] = None

    def layer(self, name: str, module: nn.Module, found: Tensor) -> None:
        self.expect(name, found, self.made.precision.dtype or torch.float32)
        if isinstance(module, nn.Conv2d) and self.format is torch.channels_last:  # some networks change to it anyway
            self.layout(name, found)

    def layout(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_contiguous(memory_format=self.format):
            self.faults[f"{name} has strides {tensor.stride()}"] = None

    def gradients(self) -> None:
        for name, each in self.made.model.named_parameters():
            if each.requires_grad and each.grad is None:
                self.faults[f"{name} has no gradient"] = None
            for what, tensor in ("weight", each), ("gradient", each.grad):
                if tensor is not None:
                    self.expect(f"{what} of {name}", tensor, torch.float32)
                    if tensor.ndim == 4:
                        self.layout(f"{what} of {name}", tensor)

    def states(self) -> None:
        for state in self.made.optimizer.state.values():
            for name, each in state.items():
                if name != "step" and isinstance(each, Tensor):
                    self.expect(f"optimizer's {name}", each, torch.float32)
        for name, each in self.made.average.model.state_dict().items():
            self.expect(f"average of {name}", each, torch.float32 if each.is_floating_point() else each.dtype)


def faults(words: Sequence[str]) -> list[str]:
    """What is wrong with an update and an evaluation of a config."""
    watch = Watch()
    try:
        with Mode():
            made = assembled(words)
            seen = Seen(made, channels_last="channels_last=false" not in words)
            with watch:
                made.train_epoch(made.train.epoch(0))
                made.nan.check()
                made.average_buffers()
                scorers = [Scorer(made.task, Metrics(made.task.num_sums, GPU), keeps=True) for _ in range(2)]
                model = made.task.with_output_transform(made.average.model)
                evaluate(model, made.val.epoch(0), scorers, made.precision, ["flip"], tune=True)
                for each in scorers:
                    each.collected()  # as `eval` does
            for metrics in (made.metrics, *(each.metrics for each in scorers)):
                seen.expect("sums", metrics.sums, torch.float64)
    except Exception as error:  # of any kind
        trace = error.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        place = "" if isinstance(error, AssertionError) else f"{here(trace.tb_frame) if trace else ''} "
        return [f"{place}{type(error).__name__}: {error}"[:500]]
    if made.progress.step != 1:
        seen.faults[f"{made.progress.step} updates"] = None
    if (reads := watch.waits[OVERFLOW]) != made.precision.scaler.is_enabled():
        seen.faults[f"{reads} reads of an update's overflow"] = None
    return [*seen.faults]


def breaks(words: Sequence[str]) -> list[str]:
    """Where the graph of a training step breaks."""
    with Mode():
        made = assembled(words)
        with Watch():
            (batch,) = made.train.epoch(0)
        found = torch._dynamo.explain(made.train_step)(batch.images, batch.targets, batch.valid)
    torch._dynamo.reset()
    return [f"{each.user_stack[-1]} {each.reason}" for each in found.break_reasons]


VALUES: dict[str, list[dict[str, Any]]] = {
    "RandomRotation": [{"degrees": 30}, {"degrees": 30, "interpolation": "bilinear", "fill": [1, 2, 3]}],
    "RandomAffine": [{"degrees": 9, "translate": [0.1, 0.1], "scale": [0.5, 2], "shear": 5}],
    "ColorJitter": [{"brightness": 0.2, "contrast": 0.2, "saturation": 0.2, "hue": 0.1}],
    "RandomSolarize": [{"threshold": 128}],
    "RandomPosterize": [{"bits": 3}],
    "RandomAdjustSharpness": [{"sharpness_factor": 2}],
    "GaussianBlur": [{"kernel_size": 3}],
    "RandomErasing": [{"p": 1}, {"value": "random"}, {"value": [1, 2, 3]}],
    "RandAugment": [{}, {"num_ops": 14, "interpolation": "bilinear"}],
    "TrivialAugmentWide": [{}, {"fill": [1, 2, 3]}],
    "TimmAutoAugment": [{"config": "rand-m9-n9-mstd0.5-inc1"}, {"config": "augmix"}],
}


def on_device(channels: int) -> list[str]:
    """What is wrong with any operation on a batch of the GPU, with masks and without."""
    found = []
    for name in all_operations():
        for values in VALUES.get(name, [{}]):
            ops = {
                "first": {"op": "Resize", "size": [48, 48]},
                "second": {"op": name, **values},
                "third": {"op": "CenterCrop"},
            }
            config = RecipeConfig(name="native", ops=ops, device=Device.gpu)
            augment = NativeAugment(config, size=ImageSize(40, 40), train=True, channels=channels)
            with Mode(), Watch():
                images = torch.empty(16, 48, 48, channels, dtype=torch.uint8, device=GPU).permute(0, 3, 1, 2)
                masks = torch.empty(16, 48, 48, dtype=torch.uint8, device=GPU)
                made = [*augment.on_device(images, KEYS, masks), augment.on_device(images, KEYS)[0]]
            for each, shape in zip(made, [(16, channels, 40, 40), (16, 40, 40), (16, channels, 40, 40)], strict=True):
                last = each.ndim == 3 or each.is_contiguous(memory_format=torch.channels_last)
                if (each.device, each.dtype, each.shape, last) != (GPU, torch.uint8, shape, True):
                    found.append(
                        f"{name} {values}: {each.shape} {each.dtype} on {each.device}, strides {each.stride()}"
                    )
    return found


def prepare() -> None:
    """Once in a process."""
    warnings.simplefilter("ignore")
    compose_once()
    FakeTensor.numpy = _numpy  # type: ignore[method-assign,assignment]
    # Optimizers take their foreach kernels for them as for other tensors.
    sys.modules["torch.optim.optimizer"]._foreach_supported_types.append(FakeTensor)

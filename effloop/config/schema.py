"""The whole config as dataclasses, and the checks of its values."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import MISSING

from effloop.batch import ImageSize
from effloop.checkpoint import CheckpointConfig
from effloop.data.augment import AugmentConfig
from effloop.data.bad import OnError
from effloop.data.decode import DecodeConfig
from effloop.data.engine import EngineConfig
from effloop.data.source import DataConfig
from effloop.errors import ConfigError, check_value
from effloop.model import ModelConfig
from effloop.optim import OptimConfig, ScheduleConfig
from effloop.parallel import ParallelConfig
from effloop.precision import PrecisionConfig
from effloop.profile import ProfileConfig
from effloop.record import RecordConfig
from effloop.task import TaskConfig
from effloop.train.nan import POLICIES as NAN
from effloop.train.stopping import StopConfig


def run_folder(out: str, name: str) -> str:
    """The path of a run's folder, or of a sweep's: `name` is relative and stays below the folder `out`."""
    path = Path(name)
    if not out:
        raise ConfigError("out: '' is not allowed; set a folder, e.g. out=outputs")
    if path.is_absolute() and path.name:
        raise ConfigError(f"run: '{name}' is a path, not a name; set out={path.parent} run={path.name}")
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"run: '{name}' is not allowed; set a name without '..'; out=FOLDER sets where it is")
    return os.path.join(os.path.expanduser(out), name)


@dataclass
class SweepConfig:
    """Options of a sweep; a single run ignores them.

    Attributes:
        resume: continue the sweep in its folder: finished jobs are kept, unfinished ones are resumed.
        prune: end a run early if its validation score is worse than the median of the others' at the same epoch.
    """

    resume: bool = False
    prune: bool = False


@dataclass
class Config:
    """The root: one field per config group, and short names for values that are often swept.

    Attributes:
        batch_size: images per rank and step; the global batch size is printed.
        global_batch: images per update of all ranks together: they are divided into equal batches, as large as possible
            up to `batch_size`, and `accumulate` follows; null is `batch_size` x ranks x `accumulate`.
        num_workers: threads or processes that load, per split in use; `auto` is what `tune` found on this machine for
            this data and pipeline, else the cores this rank may use; 0 loads in the training thread.
        threads: threads that one operation of torch computes on, on the CPU, in each rank; `auto` is OMP_NUM_THREADS,
            or else the cores this rank may use. Sums are divided among them: their number changes the last digits.
        epochs: passes over the training split.
        eval_every: epochs from one evaluation to the next; the last epoch is always evaluated. Only epochs that are
            evaluated can be the best.
        lr: peak learning rate of the schedule; null takes `optim.lr`.
        seed: of the data order, augmentation and the initial weights.
        amp: true is short for precision=amp, false for precision=fp32; null: `precision` decides.
        compile: compile the model with torch.compile; `auto` measures whether that is faster.
        channels_last: memory layout of images and weights; `auto` measures which is faster.
        cudnn_benchmark: let cuDNN time its algorithms for each shape and keep the fastest; null is true, unless
            `deterministic`; `auto` measures whether that is faster.
        deterministic: only algorithms that give the same bits every time, which some GPU operations lack.
        reuse_memory: keep freed memory for the next step and the next image instead of returning it to the system;
            from the first loader or run that sets it until the process ends. Worker processes always do.
        on_error: what happens when an image or its mask can't be read or decoded: `fail` ends the run; `skip` trains on
            another one in its place, which (seed, epoch, id) choose, and leaves it out of evaluations. The run folder
            has the list: `skipped.jsonl`.
        max_errors: with `on_error=skip`, how many different images of a split may be bad before the run ends: below 1
            their share of the split, but one at least; from 1 on their number.
        accumulate: batches per optimizer update.
        max_grad_norm: L2 norm that an update's gradients are clipped to; null is no limit.
        max_grad_value: absolute value that each is clipped to instead.
        max_grad_ratio: adaptive clipping instead, to this share of the weights' norm: of each unit, such as a filter of
            a convolution, of all layers but the last.
        nan: what happens where a loss or a gradient isn't finite: `stop` ends the run; `skip` leaves the update out,
            and ends the run after 10 in a row, or where they are more than a tenth.
        image_size: height and width of the model's input, in pixels: one number for both, or [height, width].
        eval_image_size: the size for evaluation, where `image_size` is for training alone (FixRes): image_size=160
            eval_image_size=224 is short for progressive=[160] image_size=224.
        progressive: image sizes to train at, each as `image_size`, for equally many epochs each, in this order; empty
            is `image_size` throughout. Evaluation is always at `image_size`.
        device: auto, cpu, cuda or cuda:N.
        resume: a run folder or checkpoint file to continue from, in a new run folder; `auto` begins the run of this
            name, or goes on in its folder.
        out: the folder that runs and sweeps are written to.
        run: name of the run folder below it.
        objective: what the runs of a sweep are compared by, and a search optimizes; null is the task's first score.
        probe: times that an epoch goes over the images to train the last layer alone, on what the layers below give
            for them, which is computed once (a linear probe); 0 trains the whole model.
        stop: when the run ends before its last epoch.
        sweep: options of a sweep.
    """

    data: DataConfig = MISSING
    decode: DecodeConfig = MISSING
    augment: AugmentConfig = MISSING
    engine: EngineConfig = MISSING
    model: ModelConfig = MISSING
    optim: OptimConfig = MISSING
    schedule: ScheduleConfig = MISSING
    parallel: ParallelConfig = MISSING
    precision: PrecisionConfig | None = None
    task: TaskConfig = MISSING
    record: RecordConfig = MISSING
    checkpoint: CheckpointConfig = MISSING
    profile: ProfileConfig = MISSING
    batch_size: int = 32
    global_batch: int | None = None
    num_workers: int | str = "auto"
    threads: int | str = "auto"
    epochs: int = 1
    eval_every: int = 1
    lr: float | None = None
    seed: int = 0
    amp: bool | None = None
    compile: bool | str = False
    channels_last: bool | str = True
    cudnn_benchmark: bool | str | None = None
    deterministic: bool = False
    reuse_memory: bool = True
    on_error: OnError = OnError.fail
    max_errors: float = 0.01
    accumulate: int = 1
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    max_grad_ratio: float | None = None
    nan: str = "stop"
    image_size: Any = 64
    eval_image_size: Any = None
    progressive: list[Any] = field(default_factory=list)
    device: str = "auto"
    resume: str | None = None
    out: str = "outputs"
    run: str = "unnamed"
    objective: str | None = None
    probe: int = 0
    stop: StopConfig = field(default_factory=StopConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    GROUPS: ClassVar[tuple[str, ...]] = (
        *("data", "decode", "augment", "engine", "model", "optim", "schedule", "parallel", "precision", "task"),
        *("record", "checkpoint", "profile"),
    )

    def __post_init__(self) -> None:
        number, auto = "a finite number above 0", "auto or a whole number above 0"
        share = "a share of the images above 0 and below 1, or a number of them; on_error=fail allows none"
        checks: list[tuple[str, bool, str]] = [
            *((key, getattr(self, key) >= 1, "a whole number above 0, e.g. 1") for key in _COUNTS),
            ("global_batch", self.global_batch is None or self.global_batch > 0, "a whole number above 0, or null"),
            ("probe", self.probe >= 0, "a number of passes, or 0"),
            ("lr", self.lr is None or 0 < self.lr < math.inf, number),
            *((key, (limit := getattr(self, key)) is None or 0 < limit < math.inf, number) for key in _CLIPPING),
            ("max_errors", self.max_errors > 0, share),
            ("num_workers", _is_auto(self.num_workers, 0), "auto, 0 or a whole number above it"),
            ("threads", _is_auto(self.threads, 1), auto),
            ("seed", 0 <= self.seed < 2**63, "a whole number from 0 to 2**63 - 1"),
            ("nan", self.nan in NAN, " or ".join(NAN)),
            *((key, getattr(self, key) in (True, False, None, "auto"), "true, false or auto") for key in _SPEEDS),
        ]
        for key, is_allowed, allowed in checks:
            value = getattr(self, key)
            check_value(key, repr(value) if isinstance(value, str) else value, is_allowed, allowed)
        run_folder(self.out, self.run)
        if len(limits := [f"{key}={getattr(self, key):g}" for key in _CLIPPING if getattr(self, key) is not None]) > 1:
            raise ConfigError(f"{limits[0]} contradicts {limits[1]}: gradients are clipped one way; drop one of them")
        if self.deterministic and self.cudnn_benchmark:
            raise ConfigError(
                f"deterministic: true contradicts cudnn_benchmark={word(self.cudnn_benchmark)}, whose choices differ "
                "from run to run; drop one of them"
            )
        evaluated = [] if self.eval_image_size is None else [self.eval_image_size]
        sizes = {"image_size": [self.image_size], "eval_image_size": evaluated, "progressive": self.progressive}
        for key in sizes:
            for size in sizes[key]:
                try:
                    ImageSize.of(size)
                except ValueError:
                    raise ConfigError(
                        f"{key}: {size} is not allowed; set a whole number above 0, or [height,width]"
                    ) from None
        if len(self.progressive) > self.epochs:
            raise ConfigError(
                f"progressive: {len(self.progressive)} sizes for epochs={self.epochs}; set at least as many epochs"
            )

    @property
    def size(self) -> ImageSize:
        """`image_size` as height and width."""
        return ImageSize.of(self.image_size)

    @property
    def train_sizes(self) -> list[ImageSize]:
        """The sizes that are trained at, in order: those of `progressive`, or `image_size` alone."""
        return [ImageSize.of(size) for size in self.progressive or [self.image_size]]


_CLIPPING = ("max_grad_norm", "max_grad_value", "max_grad_ratio")
_COUNTS = ("batch_size", "epochs", "eval_every", "accumulate")
_SPEEDS = ("compile", "channels_last", "cudnn_benchmark")


def _is_auto(value: int | str, least: int) -> bool:
    return value == "auto" or (isinstance(value, int) and value >= least)


def word(value: bool | str) -> str:
    """A value as users type it."""
    return str(value).lower()

"""DistributedDataParallel: one process per device, which average their gradients."""

from __future__ import annotations

import atexit
import inspect
import io
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

from effloop.batch import Batch
from effloop.errors import PROGRAM, ConfigError, EffLoopError, check_value
from effloop.lazy import Store, Tensor, dist, nn, no_grad, torch
from effloop.parallel.base import TORCHRUN, Parallel, ParallelConfig, RankEnv, T, detect_launcher, parallels
from effloop.parallel.failures import reporter
from effloop.parallel.rendezvous import START_TIMEOUT_S, describe_mismatch, join
from effloop.parallel.watchdog import Watchdog, end_all
from effloop.system import gpu


@dataclass
class DdpConfig(ParallelConfig):
    """Fields of `parallel=ddp`.

    Attributes:
        processes: ranks to start on this machine; null is one for each GPU, and 2 on a CPU. Ignored if torchrun or
            Slurm starts the ranks.
        max_restarts: how often the ranks are restarted from the last checkpoint when one of them dies. Ignored under
            torchrun, which has its own --max-restarts.
        timeout_s: a rank that others have waited for this long is considered hung, which ends the run. Longer than the
            slowest step, including the first one of a compiled model, and than what rank 0 does alone, such as writing
            a checkpoint.
        start_timeout_s: for all ranks to connect when they start; a cluster's machine may take minutes to load torch.
        sync_batchnorm: compute BatchNorm's statistics over all ranks' images, with an all-reduce per layer.
    """

    of_ranks = True

    processes: int | None = None
    max_restarts: int = 0
    timeout_s: float = 600.0
    start_timeout_s: float = START_TIMEOUT_S
    sync_batchnorm: bool = False

    @property
    def syncs_batch_norm(self) -> bool:
        return self.sync_batchnorm

    def __post_init__(self) -> None:
        processes, restarts = self.processes, self.max_restarts
        good = processes is None or processes > 0
        check_value("parallel.processes", processes, good, "a whole number above 0, or null")
        check_value("parallel.max_restarts", restarts, restarts >= 0, "0 or a whole number above it")
        for key in ("timeout_s", "start_timeout_s"):
            seconds = getattr(self, key)
            check_value(f"parallel.{key}", seconds, 1 <= seconds < math.inf, "seconds, 1 or more")


_RELEASE_S = 1.0
_FLAGS = 8  # bits of `agree`
_group_numbers = itertools.count(1)
"""Numbers of the groups that this process opens: each has its own prefix in the store."""


@parallels.register("ddp", DdpConfig)
class Ddp(Parallel):
    """A process for each GPU, or several on a CPU, which average their gradients.

    Raises:
        ConfigError: this process wasn't started as a rank, has no GPU of its own, or can't reach the others.
    """

    def __init__(self, config: DdpConfig, device: torch.device) -> None:
        env = detect_launcher()
        if env is None:
            raise ConfigError(
                f"parallel: ddp needs a process for each rank, but this is a single one; start with {PROGRAM}, "
                f"or your own script with {TORCHRUN.replace('-m effloop ...', 'SCRIPT')}"
            )
        self.rank, self.world_size = env.rank, env.world_size
        self.local_rank, self.local_world_size = env.local_rank, env.local_world_size
        self.device = _own_device(device, env)
        self._sync_batchnorm = config.sync_batchnorm
        self._ranks = join(env)
        store = dist.PrefixStore(f"group/{next(_group_numbers)}", self._ranks.store)  # type: ignore[attr-defined]
        end = partial(end_all, partial(reporter.report, self.rank, kind="hang"))
        self._watchdog = Watchdog(store, self.rank, self.world_size, config.timeout_s, end)
        self._watchdog.start()  # before the group is opened, as a rank may hang there, too
        if not os.environ.get("GLOO_SOCKET_IFNAME") and (interface := self._ranks.interface):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        with self._watchdog.waiting("to open their group"):
            _open_group(env, store, self.device, config.timeout_s)
        # Stop and save requests: gloo adds and takes maxima but has no bitwise-or, so each bit is a number of its own.
        # They are on the host, whatever the device: gloo's threads exchange them while the loop runs.
        self._flags = torch.zeros(_FLAGS, dtype=torch.uint8)
        self._exchange: dist.Work | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        if not self._sync_batchnorm:
            return model
        from effloop.parallel.batchnorm import SyncBatchNorm

        synced = cast("nn.Module", nn.SyncBatchNorm.convert_sync_batchnorm(model))  # type: ignore[no-untyped-call]
        for module in synced.modules() if self.device.type != "cuda" else ():
            if isinstance(module, nn.SyncBatchNorm):
                module.__class__ = SyncBatchNorm  # type: ignore[assignment]
        return synced

    def wrap_step(self, step: nn.Module, *, find_unused: bool) -> nn.Module:
        if not any(parameter.requires_grad for parameter in step.parameters()):
            return step
        ddp = nn.parallel.DistributedDataParallel
        known = inspect.signature(ddp).parameters
        # Each rank keeps its own statistics until `average_buffers`. The second name is of torch before 2.14.
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {buffers: False}
        with self._watchdog.waiting("to begin with the same weights"):
            return ddp(
                step,
                device_ids=[self.device] if self.device.type == "cuda" else None,
                **options,
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused,
            )

    @property
    def sharing(self) -> int:
        return self._ranks.sharing

    def gradients(self, step: nn.Module, *, sync: bool) -> AbstractContextManager[None]:
        if sync or not isinstance(step, nn.parallel.DistributedDataParallel):
            return nullcontext()
        return cast("AbstractContextManager[None]", step.no_sync())

    def sum(self, values: Tensor) -> Tensor:
        values = values.clone()
        self._all_reduce(values, "for sums over all ranks, such as loss and scores")
        return values

    @no_grad
    def average_buffers(self, model: nn.Module) -> None:
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if not buffers:
            return
        flat = torch.cat([buffer.flatten().double() for buffer in buffers])  # float32 would round equal values
        self._all_reduce(flat, "for the mean of BatchNorm's statistics")
        flat /= self.world_size
        for buffer, mean in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))

    def gather(self, value: T) -> list[T]:
        pieces = self._gather(value, "for a value of each rank, such as a checkpoint's random state")
        return [_loaded(piece) for piece in pieces]

    def _gather(self, value: Any, why: str) -> list[bytes]:
        file = io.BytesIO()
        torch.save(value, file)  # and not pickled, as `all_gather_object` does: loading that runs code
        own = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)  # on the host, for gloo, whatever the device
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with self._watchdog.waiting(why):
            dist.all_gather(sizes, torch.tensor([len(own)]))
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(own)] = own
            gathered = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(gathered, padded)
        return [piece[: int(size)].numpy().tobytes() for piece, size in zip(gathered, sizes, strict=True)]

    def on_rank0(self, call: Callable[[], T]) -> T:
        result: Any = None
        error: EffLoopError | None = None
        if self.rank == 0:
            try:
                result = call()
            except EffLoopError as failure:
                error = failure
        outcome = {"value": result, "error": error and [type(error).__name__, str(error)]}
        outcome = json.loads(_loaded(self._gather(json.dumps(outcome), "for what rank 0 does alone")[0]))
        if error:
            raise error
        if outcome["error"]:
            kinds = {kind.__name__: kind for kind in EffLoopError.__subclasses__()}
            name, line = outcome["error"]
            raise kinds.get(name, EffLoopError)(line)
        return result if self.rank == 0 else cast("T", outcome["value"])

    def assert_equal(self, what: str, value: str) -> None:
        pieces = self._gather(value, f"to compare {what}")
        if len({*pieces}) > 1 and len({*(values := [_loaded(piece) for piece in pieces])}) > 1:
            raise ConfigError(describe_mismatch(what, values, self._ranks.peers))

    def agree(self, bits: int) -> int:
        if self._exchange is not None:
            self._exchange.wait()  # only for ranks that are a whole update behind
        agreed: int = sum(bit << number for number, bit in enumerate(self._flags.tolist()))
        self._flags = torch.tensor([bits >> number & 1 for number in range(_FLAGS)], dtype=torch.uint8)
        self._exchange = dist.all_reduce(self._flags, dist.ReduceOp.MAX, async_op=True)
        return agreed

    def monitored(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return self._watchdog.batches(batches)

    def close(self) -> None:
        """Wait for the other ranks, which may still need this one, stop the watchdog, and leave the group."""
        if not dist.is_initialized():
            self._watchdog.close()
            return
        with suppress(RuntimeError):  # another rank has failed, and reports it itself
            if self._exchange is not None:
                self._exchange.wait()
            last = torch.zeros(1)
            with self._watchdog.waiting("to end together"):
                dist.all_reduce(last)
            self._watchdog.close()
            _wait_until_released(last)
            dist.all_reduce(last)  # now no watchdog uses the store, which may end with its rank
            _wait_until_released(last)
        self._watchdog.close()
        dist.destroy_process_group()

    def _all_reduce(self, values: Tensor, why: str) -> None:
        with self._watchdog.waiting(why):
            dist.all_reduce(values)
            if values.is_cuda:  # else the host would wait at its next synchronization, as if it were working
                gpu.wait(gpu.current_stream(values.device))


def _loaded(piece: bytes) -> Any:
    """What a rank has given to `_gather`."""
    return torch.load(io.BytesIO(piece), map_location="cpu", weights_only=True)


def _own_device(device: torch.device, env: RankEnv) -> torch.device:
    """This rank's device; for `cuda` the GPU of its local rank, or the only one that is visible."""
    if device.type != "cuda":
        return device
    if str(device) != device.type:
        raise ConfigError(
            f"device: '{device}' is one GPU, parallel=ddp takes one for each rank; set device=cuda, "
            "and CUDA_VISIBLE_DEVICES to choose among them"
        )
    index = 0 if gpu.count() == 1 else env.local_rank  # srun --gpus-per-task=1 shows each rank another GPU as cuda:0
    store = join(env).store  # the group isn't open yet
    store.set(f"gpu/{env.rank}", gpu.uuid(index))
    gpus = [each.decode() for each in store.multi_get([f"gpu/{rank}" for rank in range(env.world_size)])]
    if not all(gpus) or len(set(gpus)) < len(gpus):
        raise ConfigError(
            f"parallel: {len(gpus)} ranks, but {len(set(gpus) - {''})} visible GPUs; "
            "start one for each GPU or set device=cpu"
        )
    return torch.device("cuda", index)


def _open_group(env: RankEnv, store: Store, device: torch.device, timeout_s: float) -> None:
    """Join torch's default process group: gloo for tensors on the host, NCCL for those on a GPU."""
    gpu.use(device)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if dist.is_initialized():  # by a trainer before this one, or by the script
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout_s + 60),  # later than the watchdog, which names the rank
        device_id=device if device.type == "cuda" else None,  # NCCL connects now, not within the first step
    )
    if device.type != "cuda":
        atexit.register(_leave_group)


def _wait_until_released(values: Tensor) -> None:
    """Wait until gloo's thread, which may be behind, holds this tensor no more: for that it needs Python's lock.

    Python ends a thread that asks for it while the process ends, and C++ then aborts: of 20 runs under torchrun, 4.
    """
    until = time.monotonic() + _RELEASE_S
    while getattr(values, "_use_count", lambda: 1)() > 1 and time.monotonic() < until:
        time.sleep(0.001)


def _leave_group() -> None:
    """Leave the process group of a script that doesn't: with gloo's threads a process may abort at its end."""
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.05)  # as in `_wait_until_released`, whose tensor isn't known here

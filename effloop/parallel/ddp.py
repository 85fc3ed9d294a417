"""A process for each device, which average their gradients."""

from __future__ import annotations

import inspect
import io
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from effloop.batch import Batch
from effloop.errors import ConfigError, EffLoopError
from effloop.parallel import batchnorm
from effloop.parallel.base import Parallel, ParallelConfig, T, parallels
from effloop.parallel.failures import reporter
from effloop.parallel.rank_env import TORCHRUN, RankEnv, detect_launcher
from effloop.parallel.rendezvous import describe_mismatch, join
from effloop.parallel.watchdog import Watchdog, end_all


@dataclass
class DdpConfig(ParallelConfig):
    """Fields of `parallel=ddp`.

    Attributes:
        processes: ranks that are started on this machine; null is one for each GPU, and 2 on a CPU. Where torchrun or
            Slurm has started them, it has decided that.
        max_restarts: how often the ranks are started again when one of them died, from the last checkpoint. Under
            torchrun its own --max-restarts counts.
        timeout_s: a rank that others have waited for so long is taken to hang, which ends the run. Longer than the
            slowest step, the first one of a compiled model included, and than what rank 0 does alone, such as writing
            a checkpoint.
        sync_batchnorm: BatchNorm's statistics are those of all ranks' images, at the cost of an all-reduce a layer.
    """

    of_ranks = True

    processes: int | None = None
    max_restarts: int = 0
    timeout_s: float = 600.0
    sync_batchnorm: bool = False

    @property
    def syncs_batch_norm(self) -> bool:
        return self.sync_batchnorm

    def __post_init__(self) -> None:
        if self.processes is not None and self.processes < 1:
            raise ConfigError(
                f"parallel.processes: {self.processes} is not allowed; set a whole number above 0, or null"
            )
        if self.max_restarts < 0:
            raise ConfigError(
                f"parallel.max_restarts: {self.max_restarts} is not allowed; set 0 or a whole number above it"
            )
        if not 1 <= self.timeout_s < math.inf:
            raise ConfigError(f"parallel.timeout_s: {self.timeout_s:g} is not allowed; set seconds, 1 or more")


_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")  # its name now, and before torch 2.15
    if name in inspect.signature(DistributedDataParallel).parameters
)
_group_numbers = itertools.count(1)
"""Of the groups that this process opens: each has keys of its own in the store."""


@parallels.register("ddp", DdpConfig)
class Ddp(Parallel):
    """A process for each GPU, or several on a CPU, which average their gradients.

    Raises:
        ConfigError: nothing has started this process as one of several; or it can't have its GPU, or join.
    """

    def __init__(self, config: DdpConfig, device: torch.device) -> None:
        env = detect_launcher()
        if env is None:
            raise ConfigError(
                f"parallel: ddp needs a process for each rank, and this is a single one; start with python -m effloop, "
                f"or your own script with {TORCHRUN.replace('-m effloop ...', 'SCRIPT')}"
            )
        self.rank, self.world_size = env.rank, env.world_size
        self.local_rank, self.local_world_size = env.local_rank, env.local_world_size
        self.device = _own_device(device, env)
        self._sync_batchnorm = config.sync_batchnorm
        self._ranks = join(env)
        store = PrefixStore(f"group/{next(_group_numbers)}", self._ranks.store)
        end = partial(end_all, partial(reporter.report, self.rank, kind="hang"))
        self._watchdog = Watchdog(store, self.rank, self.world_size, config.timeout_s, end)
        self._watchdog.start()  # first: a rank may stop here, too
        with self._watchdog.waiting("to open their group"):
            _open_group(env, store, self.device, config.timeout_s)

    def wrap(self, step: nn.Module, *, find_unused: bool) -> nn.Module:
        if self._sync_batchnorm and self.device.type == "cuda":
            step = nn.SyncBatchNorm.convert_sync_batchnorm(step)  # type: ignore[no-untyped-call]
        elif self._sync_batchnorm:
            step = batchnorm.synchronised(step)
        if not any(parameter.requires_grad for parameter in step.parameters()):
            return step
        options: dict[str, Any] = {_BUFFERS: False}  # each rank keeps its statistics, until `average_buffers`
        with self._watchdog.waiting("to begin with the same weights"):
            return DistributedDataParallel(
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
        if sync or not isinstance(step, DistributedDataParallel):
            return nullcontext()
        return cast("AbstractContextManager[None]", step.no_sync())

    def sum(self, values: Tensor) -> Tensor:
        values = values.clone()
        self._all_reduce(values, "for sums over all ranks, such as loss and scores")
        return values

    @torch.no_grad()
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
        """As the parent says. A value travels as `torch.save` writes it and is read without running code."""
        return self._gather(value, "for a value of each rank, such as a checkpoint's random state")

    def _gather(self, value: T, why: str) -> list[T]:
        file = io.BytesIO()
        torch.save(value, file)
        own = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)  # on the host, whatever the device: it is gloo's
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with self._watchdog.waiting(why):
            dist.all_gather(sizes, torch.tensor([len(own)]))
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(own)] = own
            gathered = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(gathered, padded)
        pieces = (piece[: int(size)].numpy().tobytes() for piece, size in zip(gathered, sizes, strict=True))
        return [torch.load(io.BytesIO(piece), map_location="cpu", weights_only=True) for piece in pieces]

    def on_rank0(self, call: Callable[[], T]) -> T:
        result: Any = None
        error: EffLoopError | None = None
        if self.rank == 0:
            try:
                result = call()
            except EffLoopError as failure:
                error = failure
        said = {"value": result, "error": error and [type(error).__name__, str(error)]}
        said = json.loads(self._gather(json.dumps(said), "for what rank 0 does alone")[0])
        if error:
            raise error
        if said["error"]:
            kinds = {kind.__name__: kind for kind in EffLoopError.__subclasses__()}
            name, line = said["error"]
            raise kinds.get(name, EffLoopError)(line)
        return result if self.rank == 0 else cast("T", said["value"])

    def assert_equal(self, what: str, value: str) -> None:
        values = self._gather(value, f"to compare {what}")
        if any(other != values[0] for other in values):
            raise ConfigError(describe_mismatch(what, values, self._ranks.peers))

    def monitored(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return self._watchdog.batches(batches)

    def close(self) -> None:
        """Wait for the other ranks, whom this one's end would disturb, stop the watchdog, and leave the group."""
        if not dist.is_initialized():
            self._watchdog.close()
            return
        with suppress(RuntimeError):  # another one has failed, and says so itself
            self._all_reduce(torch.zeros(1), "to end together")
            self._watchdog.close()
            dist.all_reduce(torch.zeros(1))  # no watchdog asks the store any more, which may end with a rank
        self._watchdog.close()
        dist.destroy_process_group()

    def _all_reduce(self, values: Tensor, why: str) -> None:
        with self._watchdog.waiting(why):
            dist.all_reduce(values)
            if values.is_cuda:  # else the wait is wherever the host next asks the GPU, and can't be told from work
                torch.cuda.current_stream(values.device).synchronize()


def _own_device(device: torch.device, env: RankEnv) -> torch.device:
    """This rank's GPU, where GPUs are asked for: the one of its number, or the only one that it is shown."""
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if str(device) != device.type:
        raise ConfigError(
            f"device: '{device}' is one GPU, parallel=ddp takes one for each rank; set device=cuda, "
            "and CUDA_VISIBLE_DEVICES to choose among them"
        )
    index = 0 if count == 1 else env.local_rank  # srun --gpus-per-task=1 shows each rank another one as cuda:0
    own = str(torch.cuda.get_device_properties(index).uuid) if index < count else ""
    gpus = _gather_from_store(env, "gpu", own)
    if not all(gpus) or len(set(gpus)) < len(gpus):
        raise ConfigError(
            f"parallel: {len(gpus)} ranks, which are shown {len(set(gpus) - {''})} GPUs; "
            "start one for each GPU or set device=cpu"
        )
    return torch.device("cuda", index)


def _gather_from_store(env: RankEnv, what: str, value: str) -> list[str]:
    """Every rank's value, in the order of the ranks, before there is a group."""
    store = join(env).store
    store.set(f"{what}/{env.rank}", value)
    return [store.get(f"{what}/{rank}").decode() for rank in range(env.world_size)]


def _open_group(env: RankEnv, store: Store, device: torch.device, timeout_s: float) -> None:
    """Join torch's default group: gloo for what is on the host, and NCCL for what is on a GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if dist.is_initialized():  # by a trainer before this one, or by the script
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout_s + 60),  # the watchdog comes first, and names the rank
    )

"""The base class of parallel strategies, which is one process on one device; and which rank this process is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

from effloop.batch import Batch
from effloop.errors import ConfigError
from effloop.lazy import Tensor, dist, nn, torch
from effloop.registry import PartConfig, Registry
from effloop.system import gpu

T = TypeVar("T")

parallels: Registry[Parallel] = Registry(
    "parallel", {each: f"effloop.parallel.{each}" for each in ("ddp", "dp", "fsdp")}
)


@dataclass
class ParallelConfig(PartConfig):
    """The base class of strategies' fields.

    Attributes:
        virtual: for `none` and `ddp`: parts of an update, each with `batch_size` images, BatchNorm's statistics and
            random numbers of its own. Weights and scores are the same to the bit on any number of ranks that divides
            it; null is a part for each rank.
        of_ranks: whether it runs in several processes, which have to be started first.
        replicates: whether it copies the model in every step, which isn't possible for a compiled one.
    """

    of_ranks: ClassVar[bool] = False
    replicates: ClassVar[bool] = False

    virtual: int | None = None

    def check(self, config: Any) -> None:
        """Raise a ConfigError for other keys of a `Config` that can't be used with this strategy."""
        if self.replicates and config.compile:
            raise ConfigError(
                f"compile: {str(config.compile).lower()} contradicts parallel={self.name}, which copies the model in "
                "every step; set parallel=ddp or compile=false"
            )

    @property
    def syncs_batch_norm(self) -> bool:
        """Whether BatchNorm's statistics are computed over the images of all ranks."""
        return False


@parallels.register("none", ParallelConfig)
class Parallel:
    """One process on one device.

    Strategies are subclasses: which rank this process is, and the operations that ranks do together.

    Attributes:
        rank, world_size: this rank's number, counted from 0, and the number of ranks.
        local_world_size: number of ranks on this machine.
        device: this rank's device.
        summed: number of ranks whose gradients are added; 1 where they are averaged.
    """

    rank = 0
    world_size = 1
    local_world_size = 1
    summed = 1

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        del config
        self.device = gpu.use(device)

    @property
    def sharing(self) -> int:
        """Number of ranks that share this rank's cores, itself included: all local ones, unless they are bound."""
        return self.local_world_size

    @property
    def num_parts(self) -> int:
        """Number of parts of a global batch: one for each rank, or `parallel.virtual`."""
        return self.world_size

    @property
    def parts(self) -> range:
        """This rank's parts of a global batch."""
        each = self.num_parts // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Prepare a model that has its initial weights; optimizer, EMA, training step and checkpoints get the result.

        A strategy may replace modules and parameters here. Names have to stay as they are, and so has what `state_dict`
        returns, on every rank.
        """
        return model

    def shard(
        self, model: nn.Module, blocks: Callable[[nn.Module], list[nn.Module]], dtype: torch.dtype | None
    ) -> None:
        """Split the parameters of the model that `wrap` has returned, or of its average, among the ranks, in place.

        Args:
            model: what is split.
            blocks: gives its blocks, each of which is needed as a whole while it computes.
            dtype: what a mixed precision computes in; None is float32.
        """

    def local(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """What this rank has of tensors that may be split among ranks."""
        return [*tensors]

    def all_ranks(self, flag: Tensor) -> Tensor:
        """Whether a flag of the gradients that this rank has, () bool, is true on all ranks, without a sync."""
        return flag

    def whole(self, state: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The state of a run as rank 0 saves it; what stays split is written into `folder` beside it, by all ranks."""
        del folder
        return state

    def own(self, values: Mapping[Any, Any], like: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Of whole tensors what this rank has of them, split as those of the same key in `like` are."""
        del like
        return values

    def wrap_step(self, step: nn.Module, *, find_unused: bool) -> nn.Module:
        """Wrap a training step around the model that `wrap` has returned.

        Args:
            step: (images, targets, valid) -> (loss (), sums (M,)), as `Step` does.
            find_unused: whether some parameters get no gradient.
        """
        del find_unused
        return step

    def gradients(self, step: nn.Module, *, sync: bool) -> AbstractContextManager[None]:
        """Context of forward and backward; with `sync` False gradients aren't averaged over ranks."""
        del step, sync
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum of `values` over all ranks, on every rank; `values` isn't changed."""
        return values

    def rows(self, values: Tensor) -> Tensor:
        """(P, ...) of this rank's parts -> (N, ...) on every rank; the sum over N is that over all parts."""
        return self.sum(values)

    def part_buffers(self, model: nn.Module) -> list[dict[str, Tensor]]:
        """A model's buffers by name, of each of this rank's parts; they may be written to."""
        return [dict(model.named_buffers())]

    def average_buffers(self, model: nn.Module) -> None:
        """Replace floating-point buffers, such as BatchNorm's statistics, by their mean over all parts."""

    def resumed(self, update: int) -> None:
        """After the model's state was loaded, of a run that has done so many updates."""

    def gather(self, value: T) -> list[T]:
        """Every rank's value (tensors and plain values), by rank, on every rank."""
        return [value]

    def on_rank0(self, call: Callable[[], T]) -> T:
        """Call a function on rank 0 only, and return its result (plain values) on every rank.

        Raises:
            EffLoopError: `call` raised it; it is raised on every rank.
        """
        return call()

    def assert_equal(self, what: str, value: str) -> None:
        """Check that all ranks have the same value.

        Raises:
            ConfigError: they differ; the line has `what`, and the values by rank and machine.
        """

    def agree(self, bits: int) -> int:
        """The bitwise-or of all ranks' `bits` (0 to 255) in the call before this one; of a single rank at once.

        All ranks call it equally often, such as once an update. It waits for no rank and no device: the flags travel
        while the ranks compute what comes next.
        """
        return bits

    def monitored(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches, counted for the watchdog, which finds ranks that hang."""
        return iter(batches)

    def close(self) -> None:
        """Leave the group of ranks."""


@dataclass(frozen=True)
class OwnSlice:
    """A rank's slice of the data, without its strategy; attributes as those of `Parallel`."""

    rank: int
    world_size: int
    sharing: int
    device: torch.device

    @property
    def parts(self) -> range:
        return range(self.rank, self.rank + 1)


Slice: TypeAlias = Parallel | OwnSlice  # what loading asks for


def own_slice(device: torch.device) -> OwnSlice:
    """The slice of this process: of its process group, if it has joined one, else as torchrun or Slurm started it.

    Args:
        device: what was asked for; `cuda` becomes the rank's own GPU.

    Raises:
        ConfigError: the launcher's environment variables contradict each other, or one is missing.
    """
    env = detect_launcher()
    rank, world_size = (env.rank, env.world_size) if env else (0, 1)
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    if device.type == "cuda" and device.index is None and world_size > 1:
        local_rank = env.local_rank if env else gpu.use(device).index
        device = torch.device("cuda", local_rank % gpu.count())  # Slurm may show each rank only its own
    return OwnSlice(rank, world_size, env.local_world_size if env else world_size, gpu.use(device))


# The rank of a process that torchrun or Slurm has started, from environment variables.

TORCHRUN = "torchrun --nproc-per-node N -m effloop ..."
_PORTS = range(15000, 32768)  # below Linux's ephemeral ports; jobs of a node are 101 apart, for their steps
_SHELLS = ("bash", "fish", "sh", "tcsh", "zsh")


@dataclass(frozen=True)
class RankEnv:
    """A rank as set by its launcher, torchrun or slurm; `local_…` are of this machine, address and port of rank 0's."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    by: str

    def publish(self) -> None:
        """Set the environment variables that torch reads."""
        for name in ("rank", "world_size", "local_rank", "local_world_size"):
            os.environ[name.upper()] = str(getattr(self, name))
        os.environ.update(MASTER_ADDR=self.address, MASTER_PORT=str(self.port))


def detect_launcher(env: Mapping[str, str] | None = None) -> RankEnv | None:
    """This process's rank, from the environment variables of its launcher; None if there is no launcher.

    Raises:
        ConfigError: the variables contradict each other, or one is missing.
    """
    env = os.environ if env is None else env
    if "WORLD_SIZE" in env:
        return _by_torchrun(env)
    typed = "SLURM_PTY_PORT" in env and env.get("SLURM_JOB_NAME") in _SHELLS  # in the shell of `srun -n4 --pty bash`
    if "SLURM_STEP_ID" in env and not typed and _number(env, "SLURM_STEP_NUM_TASKS", 1, 10**6, default=1) > 1:
        return _by_slurm(env)
    if env.get("RANK"):
        raise ConfigError(
            f"RANK is {env['RANK']} in the environment, but WORLD_SIZE, the number of ranks, is not set; "
            f"start with {TORCHRUN}, or unset RANK"
        )
    return None


def _by_torchrun(env: Mapping[str, str]) -> RankEnv:
    missing = [key for key in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not env.get(key)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {env['WORLD_SIZE']} in the environment, but {', '.join(missing)} not set; "
            f"start with {TORCHRUN}, or unset WORLD_SIZE"
        )
    world_size = _number(env, "WORLD_SIZE", 1, 10**6)
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", 1, world_size, default=world_size)
    return RankEnv(
        rank=_number(env, "RANK", 0, world_size - 1),
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK", 0, local_world_size - 1),
        local_world_size=local_world_size,
        address=env["MASTER_ADDR"],
        port=_number(env, "MASTER_PORT", 1, 65535),
        by="torchrun",
    )


def _by_slurm(env: Mapping[str, str]) -> RankEnv:
    world_size = _number(env, "SLURM_STEP_NUM_TASKS", 1, 10**6)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    node = _number(env, "SLURM_NODEID", 0, 10**6, default=0)
    tasks = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local_world_size = tasks[node] if node < len(tasks) else world_size
    if not nodes and not env.get("MASTER_ADDR"):
        raise ConfigError(
            "SLURM_STEP_NODELIST, the hosts of the ranks, is not set; start with srun, or set MASTER_ADDR"
        )
    job, step = (_number(env, f"SLURM_{name}_ID", 0, 2**63, default=0) for name in ("JOB", "STEP"))
    return RankEnv(
        rank=_number(env, "SLURM_PROCID", 0, world_size - 1),
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID", 0, local_world_size - 1),
        local_world_size=local_world_size,
        address=env.get("MASTER_ADDR") or first_host(nodes),
        port=_number(env, "MASTER_PORT", 1, 65535, default=_PORTS[(101 * job + step) % len(_PORTS)]),
        by="slurm",
    )


def _number(env: Mapping[str, str], key: str, least: int, most: int, default: int | None = None) -> int:
    text = env.get(key, "")
    if not text and default is not None:
        return default
    if not re.fullmatch(r"\d+", text) or not least <= int(text) <= most:
        got = f"'{text}'" if key in env else "not set"
        raise ConfigError(
            f"{key}: {got} in the environment; it has to be a whole number from {least} to {most}, "
            f"as {TORCHRUN} or srun set it"
        )
    return int(text)


def first_host(nodes: str) -> str:
    """The first host in a node list of Slurm: `gpu[03-05,7],x` -> `gpu03`; a ConfigError if it isn't such a list."""
    match = re.match(r"([^\[\],]*)(?:\[(\d+)[^\]]*\]([^\[\],]*))?(?=[,\[]|$)", nodes)
    if not match or not match[0]:
        raise ConfigError(f"SLURM_STEP_NODELIST: '{nodes}' names no machine; set MASTER_ADDR to the first one")
    rest = nodes[match.end() :]
    head = f"{match[1]}{match[2] or ''}{match[3] or ''}"
    return head + (first_host(rest) if rest.startswith("[") else "")


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node, in Slurm's syntax: `2(x3),1` -> [2, 2, 2, 1]; empty if it is invalid."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            return []
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks

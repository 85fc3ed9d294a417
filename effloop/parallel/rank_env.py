"""The rank of a process that torchrun or Slurm has started, from environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from effloop.errors import ConfigError

TORCHRUN = "torchrun --nproc-per-node N -m effloop ..."
_PORTS = range(15000, 32768)  # below Linux's ephemeral ports


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
    if "SLURM_STEP_ID" in env and _number(env, "SLURM_STEP_NUM_TASKS", 1, 10**6, default=1) > 1:
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
    job = _number(env, "SLURM_JOB_ID", 0, 2**63, default=0) + _number(env, "SLURM_STEP_ID", 0, 2**63, default=0)
    return RankEnv(
        rank=_number(env, "SLURM_PROCID", 0, world_size - 1),
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID", 0, local_world_size - 1),
        local_world_size=local_world_size,
        address=env.get("MASTER_ADDR") or first_host(nodes),
        port=_number(env, "MASTER_PORT", 1, 65535, default=_PORTS[job % len(_PORTS)]),
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

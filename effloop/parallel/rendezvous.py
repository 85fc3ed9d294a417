"""Rendezvous: the ranks of a run connect to a store and exchange who they are."""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import partial
from typing import ClassVar, cast

from effloop.errors import ConfigError, RankError, reason
from effloop.lazy import Store, dist, torch
from effloop.parallel.base import RankEnv, T

START_TIMEOUT_S = 300.0  # for all ranks to connect; a machine of a cluster may take minutes to load torch
_POLL_S, _MOST_POLL_S = 0.02, 0.5
_LATER_S = 5.0
_HERE, _SIOCGIFADDR = "127.0.0.1", 0x8915  # <linux/sockios.h>


@dataclass(frozen=True)
class Peer:
    """What a rank publishes about itself."""

    host: str  # its machine and process
    pid: int
    facts: Mapping[str, str]  # {name: value} for values that have to be equal on all ranks
    cores: int = 0  # bit N is set if it may run on core N of its machine; 0 if the system doesn't tell
    address: str = ""  # of its machine, as seen from the store; empty for rank 0, if that serves it

    @classmethod
    def own(cls, facts: Mapping[str, str], address: str = "") -> Peer:
        """This process."""
        cores = sum(1 << core for core in os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        return cls(socket.gethostname(), os.getpid(), facts, cores, address)


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a run, after rendezvous."""

    env: RankEnv  # of this rank
    base: Store  # a store that lasts as long as the ranks' launcher, including restarts
    store: Store  # for this start of the ranks only
    peers: list[Peer]  # by rank
    current: ClassVar[RankGroup | None] = None
    """The group that this process has joined."""

    @property
    def sharing(self) -> int:
        """As `Parallel.sharing`."""
        own = self.peers[self.env.rank]
        if not own.cores:
            return self.env.local_world_size
        near = [peer for peer in self.peers if peer.host == own.host and peer.cores & own.cores]
        return min(len(near), self.env.local_world_size)  # several machines may have the same name

    @property
    def interface(self) -> str | None:
        """The network interface of this machine that leads to the others, such as `eth0`; None if it isn't known.

        gloo would take that of the machine's own name, which many systems resolve to 127.0.1.1, or not at all.
        """
        addresses = [peer.address for peer in self.peers if peer.address and peer.address != "::1"]
        far = next((address for address in addresses if not address.startswith("127.")), _HERE)
        with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            from fcntl import ioctl

            probe.connect((far, 1))  # sends nothing
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # it has no IPv4 address
                    found = ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24]
                    if socket.inet_ntoa(found) == probe.getsockname()[0]:
                        return name
        return None

    @property
    def others(self) -> str:
        """The other ranks, for messages."""
        peers = [f"rank {rank} on {peer.host}" for rank, peer in enumerate(self.peers) if rank != self.env.rank]
        return ", ".join(peers) if len(peers) <= 3 else f"the other {len(peers)} ranks"


def join(env: RankEnv, facts: Mapping[str, str] | None = None, timeout_s: float = START_TIMEOUT_S) -> RankGroup:
    """Wait for the other ranks; a second call in a process returns the same group.

    Args:
        env: of this rank.
        facts: {name: value} that have to be equal on all ranks, beside the versions of torch and Python.
        timeout_s: for all ranks to connect.

    Raises:
        ConfigError: facts differ (raised on every rank), the port is taken, or rank 0 can't be reached.
        RankError: a rank hasn't connected in time.
    """
    group = RankGroup.current
    if group is None or group.env != env:
        address = _reach(env, timeout_s)
        base = open_store(env, timeout_s)
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        own = {**versions, "WORLD_SIZE": str(env.world_size), **(facts or {})}
        number, peers = _handshake(base, env, Peer.own(own, address), timeout_s)
        group = RankGroup.current = RankGroup(env, base, dist.PrefixStore(f"effloop/{number}", base), peers)  # type: ignore[attr-defined]
    for fact, value in group.peers[0].facts.items():
        if any(peer.facts.get(fact) != value for peer in group.peers):
            raise ConfigError(describe_mismatch(fact, [peer.facts.get(fact, "") for peer in group.peers], group.peers))
    return group


def describe_mismatch(what: str, values: list[str], peers: list[Peer]) -> str:
    """One line for values that should be equal on all ranks: up to 3 values, with up to 3 ranks each."""
    by_value: dict[str, list[str]] = {}
    for rank, (value, peer) in enumerate(zip(values, peers, strict=True)):
        by_value.setdefault(value, []).append(f"{rank} on {peer.host}")
    parts = [f"'{value}' (rank {', '.join(ranks[:3])}{', …' * (len(ranks) > 3)})" for value, ranks in by_value.items()]
    more = f"; and {len(parts) - 3} other values" * (len(parts) > 3)
    return f"{what}: not the same on all ranks: {'; '.join(parts[:3])}{more}; make them equal"


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call, or a TimeoutError: torch waits without end for a store whose machine is gone."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer.result(seconds)


def _reach(env: RankEnv, timeout_s: float) -> str:
    """Wait until somebody listens at the store's address; returns this machine's own address towards it.

    Raises:
        ConfigError: nobody does in time.
    """
    if not env.rank and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # it will listen itself
        return ""
    why = ""
    with suppress(RankError):
        for _ in _polls(timeout_s, str):
            try:
                with socket.create_connection((env.address, env.port), timeout_s) as connection:
                    return str(connection.getsockname()[0])
            except OSError as error:
                why = error.strerror or str(error)
    raise ConfigError(
        f"MASTER_ADDR: rank {env.rank} on {socket.gethostname()} can't connect to rank 0 at {env.address}:{env.port} "
        f"({why}); check that it is the address of the machine of rank 0, that rank 0 runs, and that the port is open"
    )


def open_store(env: RankEnv, timeout_s: float = START_TIMEOUT_S) -> Store:
    """The store that all ranks share; rank 0 serves it unless the launcher does.

    Raises:
        ConfigError: the port is taken, or no rank 0 answers there.
        RankError: this is rank 0, and others haven't connected in time.
    """
    env.publish()
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))  # type: ignore[attr-defined]
    except (RuntimeError, OSError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise ConfigError(
                f"MASTER_PORT: {env.port} is in use on {socket.gethostname()}; end the process that listens there "
                f"(ss -ltnp 'sport = {env.port}' shows it), or take another port (MASTER_PORT, torchrun --master-port)"
            ) from None
        line = reason(error)[:200]
        if joined := re.search(r"(\d+)/\d+ clients joined", line):  # rank 0 serves it, and waits
            raise RankError(
                f"only {joined[1]} of {env.world_size} ranks have connected within {timeout_s:g} s; look whether the "
                "others run, or raise parallel.start_timeout_s"
            ) from None
        raise ConfigError(
            f"MASTER_ADDR: no store of ranks answers at {env.address}:{env.port}: {line}; check that rank 0 runs there"
        ) from None
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]  # for one start; the restart state
        store = store.underlying_store
    return cast("Store", store)


def _handshake(base: Store, env: RankEnv, peer: Peer, timeout_s: float) -> tuple[int, list[Peer]]:
    """Agree on the number of this start of the ranks, and on the list of peers.

    The store may hold entries of earlier starts, and only the launcher knows which start this is, on several
    machines not even that. So each rank writes a random token; rank 0 answers each token that it finds, and takes a
    list of ranks that have all confirmed its answer. What is asked for again and again is a few bytes: the list, which
    grows with the ranks, each of them reads once.
    """
    token = secrets.token_hex(8)
    base.set(f"effloop/hello/{env.rank}", json.dumps({"token": token, **asdict(peer)}))
    if env.rank == 0:
        number = int(base.add("effloop/starts", 1))
        keys, answered = [f"effloop/hello/{rank}" for rank in range(env.world_size)], {token}
        for _ in _polls(timeout_s, partial(_missing, base, env.world_size, number)):
            hellos = [json.loads(hello) for hello in base.multi_get(keys)] if base.check(keys) else []
            tokens = {hello["token"] for hello in hellos}
            for each in tokens - answered:
                base.set(f"effloop/number/{each}", str(number))
            answered |= tokens
            if tokens and base.check([f"effloop/ack/{number}/{each}" for each in tokens - {token}]):
                break
        base.set(f"effloop/{number}/ranks", json.dumps(hellos))
    else:
        late = timeout_s + _LATER_S  # rank 0 knows better which rank is missing
        for _ in _polls(late, lambda: f"rank 0, at {env.address}:{env.port}"):
            if base.check([f"effloop/number/{token}"]):
                break
        number = int(base.get(f"effloop/number/{token}"))
        base.set(f"effloop/ack/{number}/{token}", "")
    ranks = json.loads(base.get(f"effloop/{number}/ranks"))
    names = [each.name for each in fields(Peer)]  # another version of EffLoop may have others
    return number, [Peer(**{name: rank[name] for name in names if name in rank}) for rank in ranks]


def _polls(timeout_s: float, missing: Callable[[], str]) -> Iterator[None]:
    began, pause = time.monotonic(), _POLL_S
    while time.monotonic() < began + timeout_s:
        yield
        time.sleep(pause)
        pause = min(1.2 * pause, _MOST_POLL_S)  # a start that takes minutes isn't made longer by the ranks that wait
    raise RankError(
        f"{missing()} has not connected within {timeout_s:g} s; look whether it runs, or raise parallel.start_timeout_s"
    )


def _missing(base: Store, world_size: int, number: int) -> str:
    """The ranks that have not connected; or those, with host and PID, that only have in an earlier start."""
    keys = {rank: f"effloop/hello/{rank}" for rank in range(1, world_size)}
    found = [f"rank {rank}" for rank, key in keys.items() if not base.check([key])]
    for rank, key in keys.items() if not found else ():
        hello = json.loads(base.get(key))
        if not base.check([f"effloop/ack/{number}/{hello['token']}"]):
            found.append(f"rank {rank} on {hello['host']} (pid {hello['pid']})")
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{', '.join(found[:3])}{more} of {world_size} ranks"

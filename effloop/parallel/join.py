"""How the ranks of a run find each other."""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from effloop.errors import ConfigError
from effloop.parallel.found import Place
from effloop.parallel.ports import holder

_PATIENCE = timedelta(seconds=300)
"""For all ranks to come; a machine of a cluster may take minutes to load torch."""
_LOOK_UP_S = 0.02


@dataclass(frozen=True)
class Peer:
    """A rank, as others speak of it.

    Attributes:
        host, pid: its machine and process.
        facts: what has to be the same on all ranks: {what: value}.
        cores: bit N is set where it may run on core N of its machine; 0 where the system doesn't say.
    """

    host: str
    pid: int
    facts: Mapping[str, str]
    cores: int = 0

    @classmethod
    def own(cls, facts: Mapping[str, str]) -> Peer:
        """This process."""
        cores = sum(1 << core for core in os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        return cls(socket.gethostname(), os.getpid(), facts, cores)


@dataclass(frozen=True)
class Joined:
    """All ranks, met.

    Attributes:
        place: of this one.
        base: a store that lasts as long as what has started the ranks, restarts included.
        store: of this start of them alone.
        peers: by rank.
    """

    place: Place
    base: Store
    store: Store
    peers: list[Peer]

    @property
    def sharing(self) -> int:
        """How many ranks share this one's cores, itself included: all on this machine, but where each is bound."""
        own = self.peers[self.place.rank]
        if not own.cores:
            return self.place.local_world_size
        near = [peer for peer in self.peers if peer.host == own.host and peer.cores & own.cores]
        return min(len(near), self.place.local_world_size)  # two machines may have one name

    @property
    def others(self) -> str:
        """The other ranks, for people."""
        peers = [f"rank {rank} on {peer.host}" for rank, peer in enumerate(self.peers) if rank != self.place.rank]
        return ", ".join(peers) if len(peers) <= 3 else f"the other {len(peers)} ranks"


_joined: list[Joined] = []
"""At most one: a process has one place."""


def join(place: Place, facts: Mapping[str, str] | None = None) -> Joined:
    """Meet the other ranks; a second time in a process the same.

    Args:
        place: of this rank.
        facts: what has to be the same on all ranks, beside the versions of torch and Python.

    Raises:
        ConfigError: on every rank, where facts differ; or the place to meet is taken or not reached.
    """
    if not _joined or _joined[0].place != place:
        base = connect(place)
        own = {"torch": torch.__version__, "python": platform.python_version(), **(facts or {})}
        number, peers = _call_the_roll(base, place, Peer.own(own))
        _joined[:] = [Joined(place, base, PrefixStore(f"effloop/{number}", base), peers)]
    for fact, value in _joined[0].peers[0].facts.items():
        if any(peer.facts.get(fact) != value for peer in _joined[0].peers):
            raise ConfigError(
                differing(fact, [peer.facts.get(fact, "") for peer in _joined[0].peers], _joined[0].peers)
            )
    return _joined[0]


def joined() -> Joined | None:
    """What `join` gave in this process, if it was called."""
    return _joined[0] if _joined else None


def differing(what: str, values: list[str], peers: list[Peer]) -> str:
    """One line for values that should be the same on all ranks: each with some of the ranks that have it."""
    by_value: dict[str, list[str]] = {}
    for rank, (value, peer) in enumerate(zip(values, peers, strict=True)):
        by_value.setdefault(value, []).append(f"{rank} on {peer.host}")
    some = [f"'{value}' (rank {', '.join(ranks[:3])}{', …' * (len(ranks) > 3)})" for value, ranks in by_value.items()]
    return f"{what}: not the same on all ranks: {'; '.join(some)}; make them alike"


def connect(place: Place) -> Store:
    """The store that all ranks share, which rank 0 serves where what has started the ranks doesn't.

    Raises:
        ConfigError: the port is taken, or nobody answers there.
    """
    place.publish()
    where = f"{place.address}:{place.port}"
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=_PATIENCE)))
    except (RuntimeError, OSError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            pid = holder(place.port)
            by = f"by process {pid}" if pid else "by a process that can't be seen"
            raise ConfigError(
                f"MASTER_PORT: {place.port} is in use on {socket.gethostname()} {by}; "
                "end it, or take another port (MASTER_PORT, torchrun --master-port)"
            ) from None
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"MASTER_ADDR: the ranks can't meet at {where}: {reason}; "
            "check that rank 0 runs there, and that the port is open"
        ) from None
    while isinstance(store, PrefixStore):  # of one start; notes for the next one have to outlast it
        store = store.underlying_store
    return cast("Store", store)


def _call_the_roll(base: Store, place: Place, peer: Peer) -> tuple[int, list[Peer]]:
    """The number of this start of the ranks, the same on all, and who they are.

    The store may hold the words of ranks that have ended, and only what has started them knows which start this
    is; on several machines not even that. So a rank's word is a random one, and a list of all words counts
    only if it has one's own in it.
    """
    own = {"word": secrets.token_hex(8), **asdict(peer)}
    base.set(f"effloop/word/{place.rank}", json.dumps(own))
    number = _lead(base, place.world_size) if place.rank == 0 else _answer(base, place, own)
    words = json.loads(base.get(f"effloop/{number}/roll"))
    return number, [Peer(word["host"], word["pid"], word["facts"], word["cores"]) for word in words]


def _lead(base: Store, world_size: int) -> int:
    """Rank 0's part: show all words until every rank has found its own among them."""
    number = int(base.add("effloop/starts", 1))
    for _ in _until_impatient(0, world_size):
        words = [_said(base, f"effloop/word/{rank}") for rank in range(world_size)]
        base.set("effloop/roll", json.dumps({"number": number, "words": words}))
        if all(_said(base, f"effloop/heard/{rank}") == number for rank in range(1, world_size)):
            break
    words = [_said(base, f"effloop/word/{rank}") for rank in range(world_size)]
    base.set(f"effloop/{number}/roll", json.dumps(words))
    return number


def _answer(base: Store, place: Place, own: dict[str, Any]) -> int:
    """Another rank's part."""
    number = 0
    for _ in _until_impatient(place.rank, place.world_size):
        said = _said(base, "effloop/roll")
        if said and said["words"][place.rank : place.rank + 1] == [own]:
            number = said["number"]
            break
    base.set(f"effloop/heard/{place.rank}", str(number))
    return number


def _until_impatient(rank: int, world_size: int) -> Iterator[None]:
    until = time.monotonic() + _PATIENCE.total_seconds()
    while time.monotonic() < until:
        yield
        time.sleep(_LOOK_UP_S)
    raise ConfigError(f"rank {rank}: not all of {world_size} ranks came within {_PATIENCE}; start every one of them")


def _said(base: Store, key: str) -> Any:
    """The JSON at a key; None if there is nothing."""
    return json.loads(base.get(key)) if base.check([key]) else None

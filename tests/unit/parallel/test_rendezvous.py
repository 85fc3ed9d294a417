"""What a rank knows of the others."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from torch.distributed import HashStore

from effloop.errors import RankError
from effloop.parallel import rendezvous
from effloop.parallel.base import RankEnv
from effloop.parallel.failures import failed_for_good
from effloop.parallel.rendezvous import Peer, RankGroup, describe_mismatch
from effloop.parallel.watchdog import Watchdog


def group(*peers: tuple[str, int], rank: int = 0, local: int = 2) -> RankGroup:
    env = RankEnv(rank, len(peers), rank % local, local, "localhost", 1, "torchrun")
    store = HashStore()
    return RankGroup(env, store, store, [Peer(host, 1, {}, cores) for host, cores in peers])


@pytest.mark.parametrize(
    ("peers", "sharing"),
    [
        ([("a", 0b11), ("a", 0b11)], 2),
        ([("a", 0b11), ("a", 0b1100)], 1),  # each bound to its own
        ([("a", 0b11), ("a", 0b110)], 2),
        ([("a", 0b11), ("b", 0b11)], 1),  # of another machine
        ([("a", 0b11)] * 4, 2),  # two machines of one name
        ([("a", 0), ("a", 0)], 2),  # a system that doesn't say
    ],
)
def test_who_shares_its_cores(peers, sharing):
    assert group(*peers).sharing == sharing


def test_its_own_cores():
    own = Peer.own({}).cores
    assert {core for core in range(own.bit_length()) if own >> core & 1} == os.sched_getaffinity(0)


def test_others_are_named_where_they_are_few():
    assert group(("a", 0), ("b", 0), rank=1).others == "rank 0 on a"
    assert group(*[("a", 0)] * 4).others == "rank 1 on a, rank 2 on a, rank 3 on a"
    assert group(*[("a", 0)] * 5).others == "the other 4 ranks"


def test_an_address_of_this_machine_alone_leads_to_its_loopback_interface():
    """`localhost` may be ::1."""
    peers = [Peer("a", 1, {}), Peer("a", 2, {}, address="::1")]
    found = replace(group(("a", 0), ("a", 0)), peers=peers).interface
    assert found == replace(group(("a", 0)), peers=peers[:1]).interface
    assert found


def test_no_start_has_ended_for_good_yet():
    assert not failed_for_good(group(("a", 0)))


class Counted:
    """A store that counts calls, and the bytes which are read from it."""

    def __init__(self) -> None:
        self._store, self.read, self.calls = HashStore(), 0, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = getattr(self._store, name)(*args)
            self.calls += 1
            self.read += sum(map(len, found if isinstance(found, list) else [found])) if "get" in name else 0
            return found

        return call


def test_ranks_that_wait_read_little():
    """Of 64 ranks the last comes late: each reads the list of all of them once, not each time that it looks."""
    store, found, started = Counted(), {}, time.monotonic()

    def rank(number: int) -> None:
        env = RankEnv(number, 64, number % 8, 8, "localhost", 1, "torchrun")
        found[number] = rendezvous._handshake(store, env, Peer(f"m{number // 8}", number, {}), 20.0)

    store.set("effloop/hello/5", json.dumps({"token": "of an earlier start"}))
    threads = [threading.Thread(target=rank, args=[number]) for number in range(64)]
    for number, thread in enumerate(threads):
        time.sleep(0.5 * (number == 63))
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: (start, [peer.pid for peer in peers]) for number, (start, peers) in found.items()} == dict.fromkeys(
        range(64), (1, [*range(64)])
    )
    size = len(store.get("effloop/1/ranks"))
    polls = (time.monotonic() - started) / 0.02
    assert store.read < size * (64 + polls) + 64 * 100  # the ranks once, and rank 0 while it polls


def test_many_values_that_differ():
    peers = [Peer(f"m{rank}", rank, {}) for rank in range(512)]
    line = describe_mismatch("torch", [f"2.{rank}" for rank in range(512)], peers)
    assert line.endswith("'2.2' (rank 2 on m2); and 509 other values; make them equal")


def test_heartbeats_are_read_at_once():
    store = Counted()
    dogs = [Watchdog(store, rank, 512, 60.0, lambda stall: None) for rank in range(512)]
    for dog in dogs[:-1]:
        dog._publish(store)
    assert [beat is None for beat in dogs[0]._read(store)] == [False] * 511 + [True]
    dogs[-1]._publish(store)
    store.calls = 0
    assert all(dogs[0]._read(store))
    assert store.calls == 2


def test_the_rank_that_is_missing_is_named():
    """Of three ranks that wait for the fourth; and one that has connected in an earlier start, and doesn't now."""
    store, lines = HashStore(), []
    store.set_timeout(timedelta(seconds=0.5))

    def rank(number: int) -> None:
        env = RankEnv(number, 4, number, 4, "localhost", 1, "torchrun")
        try:
            rendezvous._handshake(store, env, Peer("m", number, {}), 0.3)
        except (RankError, RuntimeError) as error:  # the latter of the store, where rank 0 has ended
            lines.append(str(error))

    for hello in ("", json.dumps({"token": "old", "host": "m", "pid": 7})):
        if hello:
            store.set("effloop/hello/2", hello)
        threads = [threading.Thread(target=rank, args=[number]) for number in (0, 1, 3)]
        with mock.patch.object(rendezvous, "_LATER_S", 0.2):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    first, second = (line for line in lines if "rank 2" in line)
    assert first.startswith("rank 2 of 4 ranks has not connected within 0.3 s")
    assert second.startswith("rank 2 on m (pid 7) of 4 ranks has not connected")

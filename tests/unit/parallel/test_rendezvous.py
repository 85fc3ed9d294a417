"""What a rank knows of the others."""

from __future__ import annotations

import os

import pytest
from torch.distributed import HashStore

from effloop.parallel.base import RankEnv
from effloop.parallel.failures import failed_for_good
from effloop.parallel.rendezvous import Peer, RankGroup


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


def test_no_start_has_ended_for_good_yet():
    assert not failed_for_good(group(("a", 0)))

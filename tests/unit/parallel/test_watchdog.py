"""Who is to blame when the ranks don't go on."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.distributed import DistStoreError, PrefixStore, TCPStore

from effloop.parallel import watchdog
from effloop.parallel.watchdog import Heartbeat, Stall, Stragglers, Watchdog, find_stalled_rank, find_straggler
from effloop.system.processes import this_system

PATIENCE_S = 180  # a store takes 5 s and more to open where names can't be looked up
BEAT = Heartbeat(number=7, steps=34, at="in training batch 17", host="here", pid=4711, space=("", ""))


def after(beat: Heartbeat, **changes) -> Heartbeat:
    return replace(beat, number=beat.number + 2, **changes)


OTHER = replace(BEAT, pid=5)
BEHIND = replace(OTHER, steps=33, at="before training batch 17, waiting for its data")
SUM = {"waits": True, "collective": "for a sum", "at": "after training batch 17"}


@pytest.mark.parametrize(
    ("earlier", "later", "blamed", "words"),
    [
        (
            [BEAT, OTHER],
            [after(BEAT), OTHER],
            5,
            "(pid 5) has not answered for 30 s: the others wait for it in training",
        ),
        ([BEAT, BEHIND], [after(BEAT), after(BEHIND)], 5, "before training batch 17"),
        ([BEAT, OTHER], [after(BEAT, waits=True), after(OTHER)], 5, "rank 1"),  # in the same batch, it waits for nobody
        (
            [BEAT, BEAT],
            [after(BEAT, **SUM)] * 2,
            None,
            "all 2 are after training batch 17, for a sum; check the network",
        ),
        ([BEAT, None], [after(BEAT), None], None, "rank 1 has sent no heartbeat"),
    ],
)
def test_who_is_to_blame(earlier, later, blamed, words):
    found = find_stalled_rank(earlier, later, 30)
    assert (found[1] and found[1].pid) == blamed
    assert words in found[0]


def watched(store: PrefixStore, rank: int, found: list[Stall], go_on: threading.Event) -> None:
    """A rank of two: of four batches, rank 1 is held up in the third, and so is rank 0 then."""
    watch = Watchdog(store, rank, 2, 1.0, found.append)
    watch.start()
    for number, _ in enumerate(watch.batches("abcd")):
        if (rank, number) in ((1, 2), (0, 3)):
            go_on.wait(PATIENCE_S)
    watch.close()


def verdicts(rank_of_two: Callable[[PrefixStore, int, list[Stall], threading.Event], None]) -> list[Stall]:
    """What rank 0 finds: two ranks, a thread each, on a real store; they are let go on then."""
    base = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = PrefixStore("run", base)
    found: tuple[list[Stall], list[Stall]] = ([], [])
    go_on = threading.Event()
    threads = [threading.Thread(target=rank_of_two, args=(store, rank, found[rank], go_on)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + PATIENCE_S
    while not found[0] and time.monotonic() < until:
        time.sleep(0.05)
    go_on.set()
    for thread in threads:
        thread.join()
    return found[0]


def test_two_ranks_on_a_real_store():
    (said,) = verdicts(watched)
    assert "rank 1 on" in said[0]
    assert f"(pid {os.getpid()})" in said[0]
    assert "in training batch 3" in said[0]
    assert tuple(said[1].space) == this_system()


def built(store: PrefixStore, rank: int, found: list[Stall], go_on: threading.Event) -> None:
    """A rank of two that meet twice before there is a batch; rank 1 doesn't come to the second time."""
    watch = Watchdog(store, rank, 2, 1.0, found.append)
    watch.start()
    with watch.waiting("to compare the data"):
        pass
    if rank:
        go_on.wait(PATIENCE_S)
        assert not found  # its own clock doesn't run
    with watch.waiting("to begin with the same weights"):
        go_on.wait(PATIENCE_S)
    watch.close()


def test_who_waits_in_a_collective_names_the_rank_that_does_not_come():
    (said,) = verdicts(built)
    assert "rank 1 on" in said[0]
    assert "wait for it before the first batch, to begin with the same weights; raise" in said[0]


def test_a_store_that_is_slow_has_not_ended(monkeypatch):
    """Heartbeats go on, without which the others would blame this rank for the next slow step."""
    monkeypatch.setattr(watchdog, "_WINDOW_S", 0.0)
    dog = Watchdog(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 0, 1, 0.5, lambda stall: None)
    read = threading.Semaphore(0)

    def late(store: object) -> None:
        read.release()
        raise DistStoreError("wait timeout after 2000ms")

    monkeypatch.setattr(dog, "_read", late)
    dog.start()
    assert read.acquire(timeout=PATIENCE_S)
    assert read.acquire(timeout=PATIENCE_S)
    assert not dog._gone
    dog.close()


def test_what_goes_on_is_left_alone():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: list[Stall] = []
    watch = Watchdog(store, 0, 1, 0.5, found.append)
    watch.start()
    time.sleep(0.8)  # before the first batch and between epochs a rank may take its time
    with torch.no_grad():
        assert list(watch.batches(iter("ab"))) == ["a", "b"]
    with watch.waiting("for a sum"):
        pass
    time.sleep(0.8)
    watch.close()
    assert not found


# A rank that is much slower than the others.


def window(*own_s: float, batches: int = 20) -> tuple[list[Heartbeat], list[Heartbeat]]:
    """Heartbeats of each rank before and after 20 batches of a second each, in which it is busy for so long."""
    after = [replace(BEAT, batches=batches, own_s=batches * each, all_s=float(batches)) for each in own_s]
    return [BEAT] * len(own_s), after


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ((0.2, 0.2, 1.0, 0.2), 2),
        ((0.2, 0.9), 1),
        ((0.2, 0.2), None),
        ((0.2, 0.3), None),  # not so much slower
        ((0.001, 0.01), None),  # which nobody notices
        ((0.2,), None),
    ],
)
def test_who_holds_the_others_up(own, found):
    straggler = find_straggler(*window(*own))
    assert (straggler and straggler[0]) == found
    assert find_straggler(*window(*own, batches=5)) is None  # too few to tell


def test_it_is_said_once_and_not_at_once():
    said: list[str] = []
    stragglers = Stragglers(said.append)
    total = [BEAT, replace(BEAT, host="b", pid=2)]
    for number in range(6):
        stragglers.window(total)
        assert len(said) == (number >= 2)
        total = [
            replace(each, batches=each.batches + 20, own_s=each.own_s + own, all_s=each.all_s + 20)
            for each, own in zip(total, (4, 20), strict=True)
        ]
    assert said[0].startswith("rank 1 on b (pid 2) holds the others up: it takes 5.0 times as long")
    assert "they wait 80% of the time" in said[0]

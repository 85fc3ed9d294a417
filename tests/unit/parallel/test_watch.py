"""Who is to blame when the ranks don't go on."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

import torch
from torch.distributed import PrefixStore, TCPStore

from effloop.parallel.watch import Beat, Verdict, Watch, pid_space, verdict

BEAT = Beat(number=7, steps=34, at="in training batch 17", host="here", pid=4711, space="")


def after(beat: Beat, **changes) -> Beat:
    return replace(beat, number=beat.number + 2, **changes)


def test_a_beat_that_stands_still_is_to_blame():
    earlier = [BEAT, replace(BEAT, pid=5)]
    found = verdict(earlier, [after(BEAT), earlier[1]], 30)
    assert found.beat == earlier[1]
    assert "rank 1 on here (pid 5) has not answered for 30 s: the others wait for it in training batch 17" in found.line


def test_the_rank_furthest_behind_is_to_blame():
    behind = replace(BEAT, steps=33, at="before training batch 17, for whose data it waits", pid=5)
    found = verdict([BEAT, behind, BEAT], [after(BEAT), after(behind), after(BEAT)], 30)
    assert found.beat.pid == 5
    assert "before training batch 17" in found.line


def test_of_ranks_in_the_same_batch_the_one_that_waits_for_nobody_is_to_blame():
    busy = replace(BEAT, pid=5)
    found = verdict([BEAT, busy], [after(BEAT, waits=True), after(busy)], 30)
    assert found.beat.pid == 5


def test_where_all_wait_nobody_is_to_blame():
    found = verdict([BEAT, BEAT], [after(BEAT, waits=True), after(BEAT, waits=True)], 30)
    assert found.beat is None
    assert "network" in found.line
    assert "rank 1" in verdict([BEAT, None], [after(BEAT), None], 30).line


def watched(store: PrefixStore, rank: int, found: list[Verdict], go_on: threading.Event) -> None:
    """A rank of two: of four batches, rank 1 is held up in the third, and so is rank 0 then."""
    watch = Watch(store, rank, 2, 1.0, found.append)
    for number, _ in enumerate(watch.batches("abcd")):
        if (rank, number) in ((1, 2), (0, 3)):
            go_on.wait(60)
    watch.close()


def test_two_ranks_on_a_real_store():
    base = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = PrefixStore("run", base)
    found: tuple[list[Verdict], list[Verdict]] = ([], [])
    go_on = threading.Event()
    threads = [threading.Thread(target=watched, args=(store, rank, found[rank], go_on)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60
    while not found[0] and time.monotonic() < until:
        time.sleep(0.05)
    go_on.set()
    for thread in threads:
        thread.join()
    (said,) = found[0]
    assert "rank 1 on" in said.line
    assert f"(pid {os.getpid()})" in said.line
    assert "in training batch 3" in said.line
    assert said.beat.space == pid_space()


def test_what_goes_on_is_left_alone():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: list[Verdict] = []
    watch = Watch(store, 0, 1, 1.0, found.append)
    with torch.no_grad():
        assert list(watch.batches(iter("ab"))) == ["a", "b"]
    time.sleep(1.5)  # between epochs a rank may take its time
    watch.close()
    assert not found

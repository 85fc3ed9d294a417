import faulthandler
import gc
import itertools
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import Forked
from plans import line, make_engine, make_plan, native_config, open_source

import effloop
from effloop.batch import Batch, ImageSize
from effloop.data.augment.native.augment import NativeAugment
from effloop.data.engine.processes import ProcessEngine
from effloop.data.engine.shared import SharedRing, SharedSlots
from effloop.data.plan import Plan
from effloop.errors import ConfigError, WorkerError
from effloop.system import hardware

MEMORY = "effloop-batches"  # what the kernel calls the memory of batches


@pytest.fixture
def plan(photos: Path) -> Plan:
    return make_plan(open_source("folder", photos))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(plan: Plan) -> Iterator[None]:
    list(make_engine("inline", plan).stream(0))  # opens what stays open
    gc.collect()
    before, threads = _open_files(), set(threading.enumerate())
    yield
    gc.collect()
    assert multiprocessing.active_children() == []
    assert _open_files() <= before
    assert set(threading.enumerate()) <= threads
    assert MEMORY not in Path("/proc/self/maps").read_text()


def _open_files() -> Counter[str]:
    """How many, by kind or name."""
    found: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            found[os.readlink(fd).partition(":")[0].removesuffix(" (deleted)")] += 1
    return found


def make(plan: Plan, num_workers: int = 2, **options: Any) -> ProcessEngine:
    engine = make_engine("processes", plan, num_workers, **options)
    assert isinstance(engine, ProcessEngine)
    return engine


def images(plan: Plan, epoch: int = 0) -> list[torch.Tensor]:
    return [batch.images for batch in make_engine("inline", plan).stream(epoch)]


def assert_right(plan: Plan, batches: Iterator[Batch] | list[Batch], epoch: int = 0) -> None:
    for batch, wanted in zip(batches, images(plan, epoch), strict=True):
        assert torch.equal(batch.images, wanted)


class Harmful(NativeAugment):
    """An augmentation that does something to the process that it is in, where that isn't the loop's."""

    def __init__(self, harm: Callable[[], object]) -> None:
        super().__init__(native_config(), size=ImageSize.of(24), train=True)
        self.harm = harm
        self.loop = os.getpid()

    def apply(self, *args: Any) -> None:
        if os.getpid() != self.loop:
            self.harm()
        super().apply(*args)


def fail() -> None:
    raise ValueError("no such colour")


def test_more_jobs_than_a_pipe_holds(photos):
    plan = make_plan(open_source("folder", photos, "val"), train=False, batch=4000, size=4)
    with closing(make(plan, run_length=1)) as engine:
        for _ in range(2):
            assert_right(plan, engine.stream(0))


def test_as_many_slots_as_batches_are_under_way(photos):
    plan = make_plan(open_source("folder", photos), batch=2)
    with closing(make(plan, prefetch=3)) as engine:
        for epoch in range(3):
            for batch in engine.stream(epoch):
                assert len(batch) == 2
                del batch
        for epoch in range(20):
            for _ in engine.stream(epoch):
                break
        assert engine.pool is not None
        assert len(engine.pool.ring) <= 3 + 1 + 3 + 1  # an epoch that was left may have workers at it


def test_kept_batches_stay_as_they_are_and_open_no_files(photos):
    plan = make_plan(open_source("folder", photos), batch=1)
    with closing(make(plan)) as engine:
        first = next(batches := engine.stream(0))
        before = _open_files()
        kept = [first, *batches]
        assert _open_files() == before
        views = [batch.images[0, :, 3:] for batch in kept]
        del first, kept
        list(engine.stream(1))
    for view, wanted in zip(views, images(plan), strict=True):  # nor do they need the engine
        assert torch.equal(view, wanted[0, :, 3:])


def test_left_early_while_workers_write(plan):
    slow = replace(plan, augment=Harmful(lambda: time.sleep(0.002)))
    with closing(make(slow, prefetch=3, run_length=2)) as engine:
        kept = []
        for epoch in range(4):
            for batch in engine.stream(epoch):
                kept.append(batch)
                break
        assert_right(plan, engine.stream(9), 9)
    for epoch, batch in enumerate(kept):
        assert torch.equal(batch.images, images(plan, epoch)[0])


def test_a_worker_that_is_killed_while_idle(plan):
    with closing(make(plan)) as engine:
        batches = engine.stream(0)
        next(batches)
        process = sorted(multiprocessing.active_children(), key=lambda child: child.pid or 0)[1]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        connection.wait([process.sentinel])
        told = rf"^engine: worker \d of 2 \(pid {process.pid}\) was killed by SIGKILL.*batch_size lower$"
        with pytest.raises(WorkerError, match=told):
            next(batches)
        assert multiprocessing.active_children() == []
        assert_right(plan, engine.stream(1), 1)  # by new ones


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: (faulthandler.disable(), os.kill(os.getpid(), signal.SIGSEGV)), "was killed by SIGSEGV"),
        (lambda: os._exit(3), "ended with exit code 3"),
    ],
)
def test_a_worker_that_ends_at_its_work(plan, harm, told):
    with closing(make(replace(plan, augment=Harmful(harm)))) as engine:
        with pytest.raises(WorkerError, match=rf"^engine: worker \d of 2 \(pid \d+\) {told} while it loaded "):
            next(engine.stream(0))
        assert multiprocessing.active_children() == []


def test_what_is_raised_in_a_worker_comes_with_its_traceback(plan):
    with closing(make(replace(plan, augment=Harmful(fail)))) as engine:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"(?s)worker \d \(pid \d+\):\nTrace.*in fail\n.*no such colour"):
                next(engine.stream(0))


def explain() -> None:
    raise ConfigError("augment: needs the package 'colours'; pip install 'colours'")


def test_what_a_line_explains_comes_as_that_line(plan):
    with closing(make(replace(plan, augment=Harmful(explain)))) as engine, pytest.raises(ConfigError) as caught:
        next(engine.stream(0))
    assert str(caught.value) == "augment: needs the package 'colours'; pip install 'colours'"


def test_the_engine_goes_and_its_workers_with_it(plan):
    engine = make(plan)
    next(iter(engine.stream(0)))
    assert len(multiprocessing.active_children()) == 2
    del engine
    gc.collect()
    assert multiprocessing.active_children() == []


def test_interrupted_and_begun_anew(plan):
    slow = replace(plan, augment=Harmful(lambda: time.sleep(0.01)))
    with closing(make(slow)) as engine:
        batches = engine.stream(0)
        next(batches)
        threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            for epoch in itertools.count():
                list(engine.stream(epoch))
        assert_right(plan, engine.stream(1), 1)


ENDED = line("engine: its workers have ended, and this epoch with them; start the epoch again")


def test_a_fork_of_the_loops_process_has_workers_of_its_own(plan):
    with closing(make(plan)) as engine:
        batches = engine.stream(0)
        held = next(batches)

        def use() -> None:
            told = f"engine: its workers, and this epoch with them, belong to process {os.getppid()}; start the epoch"
            with pytest.raises(WorkerError, match=f"^{re.escape(told)} again$"):
                next(batches)
            for epoch in (2, 3):
                assert_right(plan, engine.stream(epoch), epoch)
            engine.close()

        child = multiprocessing.get_context("fork").Process(target=use)
        child.start()
        assert_right(plan, engine.stream(1), 1)
        child.join()
        assert child.exitcode == 0
        child.close()
        assert_right(plan, [held, *batches])


def test_what_was_asked_for_is_withdrawn_when_the_loop_leaves(plan, tmp_path):
    begun = tmp_path / "begun"

    def note() -> None:
        with begun.open("ab") as file:
            file.write(b".")
        time.sleep(0.02)

    with closing(make(replace(plan, augment=Harmful(note)), prefetch=3, run_length=1)) as engine:
        for _ in engine.stream(0):
            break
        before = begun.stat().st_size
        time.sleep(0.3)
        assert begun.stat().st_size <= before + 2  # one of each worker


def test_closed_in_the_middle(plan):
    engine = make(plan)
    batches = engine.stream(0)
    next(batches)
    engine.close()
    engine.close()
    with pytest.raises(WorkerError, match=ENDED):
        next(batches)


def test_closed_by_another_thread_while_the_loop_waits(plan):
    slow = replace(plan, augment=Harmful(lambda: time.sleep(0.1)))
    with closing(make(slow, run_length=2)) as engine:
        batches = engine.stream(0)
        next(batches)  # the workers are there
        closer = threading.Timer(0.1, engine.close)
        closer.start()
        with pytest.raises(WorkerError, match=ENDED):
            list(batches)
        closer.join()
        assert multiprocessing.active_children() == []


def test_interrupted_twice(plan, tmp_path):
    """The second time while the workers are waited for, which then end at once."""
    slow = tmp_path / "slow"
    harm = Harmful(lambda: slow.exists() and time.sleep(10))
    with closing(make(replace(plan, augment=harm))) as engine:
        list(engine.stream(0))
        slow.touch()
        timers = [threading.Timer(at, os.kill, [os.getpid(), signal.SIGINT]) for at in (0.2, 0.7)]
        for timer in timers:
            timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(engine.stream(1))
        assert multiprocessing.active_children() == []
        for timer in timers:
            timer.join()
        slow.unlink()
        assert_right(plan, engine.stream(2), 2)


def test_too_little_memory(plan, tmp_path, monkeypatch):
    told = "engine: 13.8 kB of shared memory for a batch can't be allocated, beside 0 others: {}; "
    told += "set batch_size or engine.prefetch lower, or keep fewer batches"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(make(plan)) as engine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(ConfigError, match=line(told.format("File too large"))):
                next(engine.stream(0))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        (tmp_path / "meminfo").write_text("MemAvailable: 12 kB\n")
        with monkeypatch.context() as patch:
            patch.setattr(hardware, "MEMINFO", tmp_path / "meminfo")
            with pytest.raises(ConfigError, match=line(told.format("Cannot allocate memory"))):
                next(engine.stream(0))
        assert_right(plan, engine.stream(0))


def test_a_ring_of_shared_slots():
    ring = SharedRing(SharedSlots((2, 4, 4, 3)), torch.device("cpu"))
    number, memory = ring.numbered((2, 4, 4, 3))
    assert (number, memory.shape, memory.dtype) == (0, (2, 4, 4, 3), torch.uint8)
    memory[:] = 7
    np.testing.assert_array_equal(ring.slots.map(0), memory)
    view = memory[1:].permute(0, 3, 1, 2)
    del memory
    assert [ring.numbered((2, 4, 4, 3))[0] for _ in range(2)] == [1, 1]
    del view
    assert ring.numbered((2, 4, 4, 3))[0] == 0
    assert len(ring) == 2


class TestProcessesOfTheirOwn:
    """What becomes of the workers when the loop's process ends."""

    @pytest.fixture
    def start(self, photos: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[int]]]]:
        started: list[subprocess.Popen[str]] = []

        def begin(body: str, *, forked: bool = True) -> tuple[subprocess.Popen[str], list[int]]:
            script = _SCRIPT.format(photos=str(photos), body=textwrap.indent(textwrap.dedent(body), "    "))
            path = os.pathsep.join([str(Path(__file__).parents[3]), str(Path(effloop.__file__).parents[1])])
            (tmp_path / "script.py").write_text(script)
            make, python = (Forked, []) if forked else (subprocess.Popen, [sys.executable])
            process = make(
                [*python, str(tmp_path / "script.py")],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            started.append(process)
            assert process.stdout is not None
            return process, [int(word) for word in process.stdout.readline().split()]

        yield begin
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    @pytest.mark.slow
    def test_killed_in_the_middle(self, start):
        process, workers = start("for epoch in range(10**9): list(engine.stream(epoch))")
        assert len(workers) == 4
        process.kill()
        wait_for(lambda: all(map(has_ended, workers)))

    @pytest.mark.slow
    def test_killed_while_workers_wait_for_room(self, start):
        """Each failure is 10,000 characters: seven fill a pipe that nobody reads from."""
        process, workers = start(
            """
            while True:
                try:
                    next(failing.stream(0))
                except RuntimeError:
                    pass
            """
        )
        for _ in range(200):  # until it is stopped where it doesn't read
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.02)
            if all("pipe" in Path(f"/proc/{pid}/wchan").read_text() for pid in workers[2:]):
                break
            process.send_signal(signal.SIGCONT)
            time.sleep(0.01)
        else:
            pytest.skip("never found both workers waiting; this kernel may not say what they wait for")
        process.kill()
        wait_for(lambda: all(map(has_ended, workers)))

    def test_killed_while_another_fork_of_it_lives(self, start):
        process, workers = start(
            """
            if os.fork() == 0:
                time.sleep(100)
                os._exit(0)
            print("forked", flush=True)
            for epoch in range(10**9): list(engine.stream(epoch))
            """
        )
        assert process.stdout.readline() == "forked\n"
        process.kill()
        wait_for(lambda: all(map(has_ended, workers)))

    @pytest.mark.slow
    def test_ends_without_closing(self, start):
        process, workers = start("batches = engine.stream(0); next(batches)", forked=False)
        assert process.communicate(timeout=120) == ("", "")
        assert process.returncode == 0
        assert all(map(has_ended, workers))

    def test_interrupted(self, start):
        process, workers = start(
            """
            try:
                print("begun", flush=True)
                for epoch in range(10**9): list(engine.stream(epoch))
            except KeyboardInterrupt:
                print("interrupted")
            """
        )
        assert process.stdout.readline() == "begun\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=120) == ("interrupted\n", "")
        assert process.returncode == 0
        assert all(map(has_ended, workers))


_SCRIPT = """
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from plans import make_engine, make_plan, native_config, open_source
from effloop.batch import ImageSize
from effloop.data.augment.native.augment import NativeAugment

class Failing(NativeAugment):
    def apply(self, *args):
        raise ValueError("x" * 20_000)

if __name__ == "__main__":
    plan = make_plan(open_source("folder", Path({photos!r})))
    engine = make_engine("processes", plan, 2)
    next(engine.stream(0))
    augment = Failing(native_config(), size=ImageSize.of(24), train=True)
    failing = make_engine("processes", replace(plan, augment=augment), 2, run_length=1, prefetch=4)
    try:
        next(failing.stream(0))
    except RuntimeError:
        pass
    print(*sorted(child.pid for child in multiprocessing.active_children()), flush=True)
{body}
"""


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in itertools.takewhile(lambda _: not condition(), range(12000)):
        time.sleep(0.01)
    assert condition()

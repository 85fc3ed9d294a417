import os
import threading

from effloop.system.cached import cached_property


class Slow:
    def __init__(self) -> None:
        self.begun, self.go_on, self.count = threading.Event(), threading.Event(), 0

    @cached_property
    def value(self) -> int:
        self.count += 1
        self.begun.set()
        self.go_on.wait()
        return 3


def test_it_is_computed_once():
    one = Slow()
    one.go_on.set()
    assert (one.value, one.value, one.count) == (3, 3, 1)


def test_a_process_forked_while_a_thread_computes_it_does_not_wait():
    slow, quick = Slow(), Slow()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    slow.begun.wait()
    pid = os.fork()
    if not pid:
        quick.go_on.set()
        os._exit(quick.value)
    for _ in range(1000):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        threading.Event().wait(0.01)
    else:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    slow.go_on.set()
    thread.join()
    assert found
    assert os.waitstatus_to_exitcode(status) == 3

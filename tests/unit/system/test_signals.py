"""Who gets Ctrl-C, and when."""

import signal
import subprocess
import sys

import pytest

from effloop.system import signals


def test_ctrl_c_waits_for_the_end_of_a_write():
    done = False
    with pytest.raises(KeyboardInterrupt), signals.interrupts_deferred():  # noqa: PT012  what follows the signal is the point
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_blocked_in_a_child_until_it_lets_it_through():
    code = (
        "import signal; from effloop.system.signals import unblock_interrupts; signal.raise_signal(signal.SIGINT); "
        "print('blocked', flush=True); unblock_interrupts()"
    )
    with signals.interrupts_blocked():
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.communicate()[0] == b"blocked\n"
    assert child.returncode == -signal.SIGINT
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])

"""How processes end, which one is which, and whose lines are whose."""

import os
import subprocess
import sys

import pytest

from effloop.system import processes
from effloop.system.processes import PrefixedStream


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL (out of memory?)"),
        (-15, "was killed by SIGTERM"),
        (-63, "was killed by signal 63"),
    ],
)
def test_how_a_child_ended(code, line):
    assert processes.how_ended(code) == line


def test_a_process_is_told_from_a_later_one_of_its_number():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    facts = processes.describe_process(child.pid)
    boot, namespace, start = facts["started"]
    assert processes.is_alive(facts) is True
    assert processes.is_alive({**facts, "started": [boot, namespace, start - 1]}) is False
    assert processes.is_alive({**facts, "started": ["another boot", namespace, start]}) is False
    assert processes.is_alive({**facts, "started": [boot, "another container", start]}) is None
    assert processes.is_alive({**facts, "host": "elsewhere"}) is None
    assert processes.is_alive({"pid": child.pid}) is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.is_alive(facts) is False  # a zombie, too
    child.communicate()
    assert processes.is_alive(facts) is False


def test_lines_have_their_rank(capsys):
    stream = PrefixedStream(sys.stdout, "[rank 1] ")
    print("a", "b", file=stream)
    stream.write("half")
    assert capsys.readouterr().out == "[rank 1] a b\n"
    stream.write(" and half\n\n")
    assert capsys.readouterr().out == "[rank 1] half and half\n[rank 1] \n"


def test_half_a_line_is_passed_on_when_it_is_flushed(capsys):
    stream = PrefixedStream(sys.stdout, "[rank 1] ")
    stream.flush()
    print("half", end="", file=stream, flush=True)
    assert capsys.readouterr().out == "[rank 1] half"
    print(" and", end="", file=stream, flush=True)
    print(" half", "line", sep="\n", file=stream)
    assert capsys.readouterr().out == " and half\n[rank 1] line\n"

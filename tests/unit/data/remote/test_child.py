"""What processes of their own say."""

import subprocess
import sys

from effloop.data.remote.child import Child


def test_two_lines_at_once_are_two_messages():
    says = """import os, sys; os.write(1, b'{"bytes": 0}\\n{"manifest": "x"}\\n'); sys.stdin.readline()"""
    with subprocess.Popen([sys.executable, "-c", says], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        messages = Child(it, "waits").messages()
        assert next(messages) == {"bytes": 0}
        assert next(messages) == {"manifest": "x"}  # though that process waits
        it.stdin.close()
        assert not [*messages]

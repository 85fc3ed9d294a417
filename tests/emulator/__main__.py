"""`python -m emulator COMMAND`: a command, and what it starts, on the emulated GPU."""

import os
import sys

from emulator import environment

if __name__ == "__main__":
    found = environment(
        os.environ.get("EMULATOR_SCHEDULE", "latest"), devices=int(os.environ.get("EMULATOR_DEVICES", "2"))
    )
    os.execvpe(sys.argv[1], sys.argv[1:], found)

"""Record anew what the golden test compares with: `python tests/golden/record.py`, about two minutes.

For a change of numbers that is meant, and for another machine or other packages; what changed is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]  # this checkout's effloop, and `runs`
import conftest  # noqa: E402, F401  one thread, as in the tests
from golden.cases import CASES, GOLDEN, Lab, golden  # noqa: E402


def record() -> None:
    """Compute every case once and write golden.json, unless cases that share a key disagree."""
    before = golden()["values"] if GOLDEN.is_file() else {}
    values, failed = {}, []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder, "cache"))
        lab = Lab(Path(folder))
        for name, case in CASES.items():
            with contextlib.redirect_stdout(sys.stderr):
                value = case.compute(lab)
            if values.setdefault(case.key, value) != value:
                failed.append(name)
        environment = lab.environment
    if failed:
        raise SystemExit(f"not recorded, these disagree with others of their key: {', '.join(failed)}")
    GOLDEN.write_text(json.dumps({"environment": environment, "values": values}, indent=1, sort_keys=True) + "\n")
    changed = [key for key in sorted({*values, *before}) if values.get(key) != before.get(key)]
    print(f"{GOLDEN}: {len(values)} values; changed: {', '.join(changed) or 'none'}")


if __name__ == "__main__":
    record()

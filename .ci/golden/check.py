"""Compare batches, losses, scores, fingerprints and written files with what was recorded: `python .ci/golden/check.py`.

`NAME ...` checks the cases whose names contain one of the words. `--record` computes all and writes golden.json:
for a change of numbers that is meant, for another machine or other packages. Each takes about three minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["ATEN_CPU_CAPABILITY"] = "avx2"  # the same pixels on a processor with AVX-512

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "tests")]  # effloop, and `runs`
import shared  # noqa: E402, F401  one thread, as in the tests
from cases import CASES, GOLDEN, Case, Lab, golden  # noqa: E402


def record(lab: Lab) -> None:
    """Compute every case once and write golden.json, unless cases that share a key disagree."""
    before = golden()["values"] if GOLDEN.is_file() else {}
    values, failed = {}, []
    for name, case in CASES.items():
        value = _compute(case, lab)
        if values.setdefault(case.key, value) != value:
            failed.append(name)
    if failed:
        raise SystemExit(f"not recorded, these disagree with others of their key: {', '.join(failed)}")
    GOLDEN.write_text(json.dumps({"environment": lab.environment, "values": values}, indent=1, sort_keys=True) + "\n")
    changed = [key for key in sorted({*values, *before}) if values.get(key) != before.get(key)]
    print(f"{GOLDEN}: {len(values)} values; changed: {', '.join(changed) or 'none'}")


def check(lab: Lab, words: list[str]) -> None:
    """Compute the cases that this machine can compare, and exit with 1 if one differs."""
    was, here = golden(), lab.environment
    skipped, equal, failed = {}, 0, []
    for name, case in CASES.items():
        if words and not any(word in name for word in words):
            continue
        differs = [f"{need} is {here[need]}, was {was['environment'][need]}" for need in case.needs
                   if here[need] != was["environment"][need]]  # fmt: skip
        if differs:
            skipped[name] = "; ".join(differs)
        elif _compute(case, lab) == was["values"][case.key]:
            equal += 1
        else:
            failed.append(name)
            print(f"differs: {name}", flush=True)
    for reason in sorted(set(skipped.values())):
        print(f"not compared: {list(skipped.values()).count(reason)} cases, recorded elsewhere: {reason}")
    print(f"{equal} equal, {len(failed)} differ, {len(skipped)} not compared")
    sys.exit(bool(failed))


def _compute(case: Case, lab: Lab) -> object:
    with contextlib.redirect_stdout(sys.stderr):
        return case.compute(lab)


if __name__ == "__main__":
    words = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder, "cache"))
        if words == ["--record"]:
            record(Lab(Path(folder)))
        else:
            check(Lab(Path(folder)), words)

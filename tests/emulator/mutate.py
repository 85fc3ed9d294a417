"""`python tests/emulator/mutate.py [sanitizer] [WORD...]`: is it seen when a safeguard of the code for GPUs is missing?

For each of `mutations.txt`, or those with one of the words, a copy of the package is changed in one place; its tests in
tests/gpu run on the emulator by the latest schedule, then by others, until one fails. A row says which, and how
many seconds it took. Without a change all have to pass. `sanitizer`: whether torch's own check for races sees it, too.
"""

import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "effloop"
TESTS = [str(HERE.parent / "gpu" / f"test_{name}.py") for name in ("transfer", "safeguards", "second_gpu", "gpu")]
SCHEDULES = (("latest", 0), ("ahead", 0), ("random", 1), ("random", 2), ("random", 3))
TIMEOUT_S = 400  # all tests at once take 20 s, on a busy machine 100


class Mutation(NamedTuple):
    """A change of one file of the package."""

    why: str  # what goes wrong
    tests: str  # a part of their names
    file: str  # below effloop/
    changes: list[tuple[str, str]]  # texts that are there once, and what they become

    def applied(self) -> str:
        """The changed file; a ValueError if a text isn't there, or more than once."""
        text = (PACKAGE / self.file).read_text()
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(f"mutations.txt: {old!r} is {text.count(old)} times in effloop/{self.file}")
            text = text.replace(old, new)
        return text


def mutations(words: Sequence[str] = ()) -> list[Mutation]:
    """Those of `mutations.txt`, in its order."""
    found: list[Mutation] = []
    file = ""
    for line in (HERE / "mutations.txt").read_text().splitlines():
        if line.startswith("["):
            file = line[1:-1]
        elif " | " in line:
            found.append(Mutation(*line.split(" | "), file, []))
        elif " ==> " in line:
            old, new = line.strip().replace("\\n", "\n").split(" ==> ")
            found[-1].changes.append((old, new))
    return [each for each in found if not words or any(word in " ".join(each[:3]) for word in words)]


def outcome(folder: Path, tests: str, schedule: tuple[str, int], *, sanitizer: bool = False) -> tuple[int, str]:
    """What tests of the package in a folder end with, in a forked process: pytest's exit code, and what they print."""
    with tempfile.TemporaryFile("w+") as out:
        if pid := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            out.seek(0)
            return code, out.read()
        code = 3
        try:
            for number in (1, 2):
                os.dup2(out.fileno(), number)
            signal.alarm(TIMEOUT_S)
            code = _run(folder, tests, schedule, sanitizer)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)


def _run(folder: Path, tests: str, schedule: tuple[str, int], sanitizer: bool) -> int:
    import pytest
    from torch.cuda import _sanitizer

    import emulator
    from emulator import kernels

    os.environ.update(emulator.environment(*schedule))
    kernels.schedule(*schedule)
    if sanitizer:
        _sanitizer.enable_cuda_sanitizer()
    sys.path.insert(0, str(folder))
    words = ["-qx", "-pxdist.plugin", "-n0", "-Wignore", "-pno:cacheprovider", "--tb=short", "-k", tests]
    code = int(pytest.main([*words, *TESTS]))
    assert sys.modules["effloop"].__file__ == str(folder / "effloop" / "__init__.py")
    return code


def main(words: list[str]) -> int:
    chosen = mutations([each for each in words if each != "sanitizer"])
    changed, wrong = [each.applied() for each in chosen], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(PACKAGE, folder / "effloop")
        (folder / "configs").symlink_to(PACKAGE.parent / "configs")
        for schedule in SCHEDULES:
            code, said = outcome(folder, " or ".join(dict.fromkeys(each.tests for each in chosen)), schedule)
            wrong += [f"without a change, schedule {schedule}: exit code {code}\n{said}"] * bool(code)
        for mutation, text in zip(chosen, changed, strict=True):
            began, path = time.monotonic(), folder / "effloop" / mutation.file
            path.write_text(text)
            Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
            for schedule in SCHEDULES:
                code, said = outcome(folder, mutation.tests, schedule)
                if code:
                    break
            failed = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", said, re.MULTILINE)
            seen = f"{failed[1] if failed else f'exit code {code}'} ({schedule[0]})"
            if code != 1 and code != -signal.SIGALRM:  # it hangs
                wrong.append(f"{mutation.file}: {mutation.why}: {seen}\n{said}")
            row = [f"{mutation.file:26}", f"{mutation.why:58}", f"{seen:72}", f"{time.monotonic() - began:4.1f}"]
            if "sanitizer" in words:
                said = outcome(folder, mutation.tests, SCHEDULES[0], sanitizer=True)[1]
                row.append("yes" if "CUDASanitizerErrors" in said else "no")
            print(*row, sep=" | ", flush=True)
            shutil.copy2(PACKAGE / mutation.file, path)
            Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    print(f"{len(chosen)} mutations", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    if "LD_PRELOAD" not in os.environ:
        sys.path.insert(0, str(HERE.parent))
        import emulator

        os.execve(sys.executable, [sys.executable, *sys.argv], emulator.environment())
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half of the time
    for module in "torch", "pytest", "hydra", "xdist.plugin", "PIL.Image", "rich.console":  # once, before the forks
        importlib.import_module(module)
    sys.exit(main(sys.argv[1:]))

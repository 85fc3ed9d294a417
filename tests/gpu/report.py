"""What a machine with a GPU can tell of EffLoop, in about ten minutes, as a block of text to paste into an issue.

    pip install -e '.[dali,export,timm]' pytest-xdist && python tests/gpu/report.py

Nothing is downloaded or sent. Every part is a process of its own with a time limit. pytest imports this file, too, as a
plugin that notes when a test begins and ends: one that crashes, hangs or loses the device costs no other test.
"""

from __future__ import annotations

import argparse
import faulthandler
import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
LOG = "EFFLOOP_GPU_LOG"  # the environment variable with the file that tests are noted in
NOT_SANITIZED = "compile|processes|pt2"  # names of tests: torch's sanitizer can't see traced code, and fails in forks
STUCK_S, LOST = 90, 70  # that a test may take; exit code of a process that can't use its device any more
STDERR = os.dup(2)  # pytest captures the number 2

# The plugin of pytest.


def note(name: str, outcome: str, words: str = "") -> None:
    with open(os.environ[LOG], "a") as file:
        file.write(json.dumps([name, outcome, words]) + "\n")


def noted(log: str) -> dict[str, tuple[str, str]]:
    """Test -> its last outcome, `begun` if it has none yet, and what it said."""
    return {name: (outcome, words) for name, outcome, words in map(json.loads, Path(log).read_text().splitlines())}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    done, out = noted(os.environ[LOG]), "TORCH_CUDA_SANITIZER" in os.environ and NOT_SANITIZED
    items[:] = [item for item in items if item.nodeid not in done and not (out and re.search(out, item.nodeid))]


def pytest_runtest_logstart(nodeid: str) -> None:
    note(nodeid, "begun")
    faulthandler.dump_traceback_later(STUCK_S, exit=True, file=STDERR)


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        lines = report.longreprtext.splitlines()
        said = [line[1:].strip() for line in lines if line.startswith("E ")][:4] + lines[-1:]
        note(report.nodeid, "failed", "\n".join(said + report.capstderr.splitlines()[:5]))
        try:
            sys.modules["torch"].cuda.synchronize()
        except RuntimeError:  # all tests that follow here would fail; another process goes on with them
            os._exit(LOST)
    elif report.skipped:
        note(report.nodeid, "skipped", str(report.longrepr[2]).removeprefix("Skipped: "))
    elif report.when == "call":
        note(report.nodeid, "passed")


pytest_collectreport = pytest_runtest_logreport  # of a file that can't be imported


# The parts.


@dataclass
class Part:
    """A command, and what came of it."""

    name: str
    share: float  # of the time, beside the others'
    words: Sequence[str]
    result: str = ""
    lines: list[str] = field(default_factory=list)  # what failed, and figures
    seconds: float = 0.0

    def run(self, folder: Path, limit_s: float) -> tuple[str, list[str]]:
        """How it ended, "" if well; and the lines it wrote."""
        paths = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled"}
        env |= {"COLUMNS": "150", "PYTHONUTF8": "1"}
        command, ended = ["env", *(sys.executable if word == "python" else word for word in self.words)], ""
        with open(folder / "output", "w+", encoding="utf-8", errors="replace") as file:
            options: Any = {"cwd": folder, "env": env, "stdout": file, "stderr": file, "start_new_session": True}
            process = subprocess.Popen(command, **options)
            try:
                ended = f"exit code {code}" if (code := process.wait(limit_s)) else ""
            except subprocess.TimeoutExpired:
                ended = f"no end within {limit_s:.0f} s"
            finally:  # and all that it has started; a run in a test would end by SIGTERM, and fail the test
                for number in (signal.SIGTERM, signal.SIGKILL)["pytest" in self.words :]:
                    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(process.pid, number)
                        process.wait(5)
            file.seek(0)
            return ended, [line.rstrip() for line in file if line.strip()]

    def do(self, folder: Path, limit_s: float) -> None:
        """Run it; of its output the tables are kept."""
        ended, lines = self.run(folder, limit_s)
        self.result = f"failed: {ended}" if ended else "passed"
        self.lines = last_words(lines) if ended else [re.sub("[│┃]", " ", line) for line in lines if line[0] in "│┃"]


def last_words(lines: list[str]) -> list[str]:
    """Where a thread has crashed, or the main one was hanging; else what was written at last."""
    threads = [at for at, line in enumerate(lines) if "most recent call first" in line]
    at = next((at for at in threads if "Current" in lines[at]), (threads or [-4])[-1])
    return lines[at:][:5]


class Tests(Part):
    """Tests; after one that ends the process, another process goes on with the next."""

    def do(self, folder: Path, limit_s: float) -> None:
        os.environ[LOG] = log = str(folder / self.name)
        Path(log).touch()
        end, more = time.time() + limit_s, True
        while more and time.time() < end:
            ended, lines = self.run(folder, end - time.time())
            cut = [name for name, (outcome, _) in noted(log).items() if outcome == "begun"]
            for name in cut:
                note(name, "failed", "\n".join([ended, *last_words(lines)]))
            more = bool(cut) or ended == f"exit code {LOST}"
        tests = noted(log).items()
        failed = [name + "\n" + said for name, (outcome, said) in tests if outcome == "failed"]
        outcomes = [outcome for _, (outcome, _) in tests]
        words = ", ".join(f"{outcomes.count(each)} {each}" for each in ("passed", "failed", "skipped"))
        well = "passed" in outcomes and not failed and not more
        self.result = f"passed: {words}" if well else f"failed: {words}{f'; {ended}' * (more or not tests)}"
        self.lines = failed[:20] + [each.partition("\n")[0] for each in failed[20:]]
        self.lines += sorted({f"skipped: {said}" for _, (outcome, said) in tests if outcome == "skipped"})
        self.lines += [] if tests else last_words(lines)


def all_parts(packages: Iterable[str], gpus: int, memory: int) -> list[Part]:
    """What is run with such packages, on so many GPUs with so many bytes."""
    batch = 128 if memory > 40e9 else 32
    tests = "ROOT/tests/gpu --rootdir=ROOT -c ROOT/pyproject.toml -m gpu -n 0 -p report -p no:cacheprovider"
    shape, bench = "image_size=224 amp=true optim.fused=true", "python -m effloop bench repeats=3 what="
    knobs, train = "knobs=nothing,compile,channels_last,fused", "python -m effloop epochs=3 amp=true"
    there = " ".join(["-", *packages, *["two-gpus"] * (gpus > 1)])
    table = f"""tests 4 pytest-xdist python -m pytest {tests}
        resnet50 2 - {bench}step model=resnet50 batch_size={batch} {shape} {knobs}
        step 1.5 - {bench}step knobs=nothing,tf32,bf16,fp16,channels_last,compile,fused,ema,max_grad_norm,checkpointing
        photographs 0.2 - python -m effloop convert data=embedded to=folder out=clothes
        loader 1 - {bench}loader data.root=clothes
        train 1 - {bench}train data.root=clothes
        loader-224 0.5 - {bench}loader data.root=photos batch_size={batch} image_size=224 vs=none
        train-224 1 - {bench}train data.root=photos model=resnet50 batch_size={batch} {shape}
        train-dali 1 nvidia-dali {bench}train data.root=photos model=resnet50 batch_size={batch} {shape} engine=dali
        resnet18 1 - {bench}step model=resnet18 batch_size={2 * batch} {shape} {knobs}
        vit 1.5 timm {bench}step model=timm model.arch=vit_small_patch16_224 batch_size={2 * batch} {shape} {knobs}
        sanitizer 2 pytest-xdist TORCH_CUDA_SANITIZER=1 python -m pytest {tests}
        one-gpu 0.5 - {train}
        ddp 0.5 - {train} parallel=ddp
        second-gpu 0.5 two-gpus {train} device=cuda:1"""
    parts = []
    for name, share, need, *words in map(str.split, table.splitlines()):
        words = [word.replace("ROOT", str(ROOT)) for word in words]  # here, as there may be blanks in it
        words += [f"out={name}.json"] * ("bench" in words)
        parts.append((Tests if "pytest" in words else Part)(name, float(share), words))
        parts[-1].result = "not run: the time was over" if need in there else f"skipped: no {need}"
    return parts


def write_photos(folder: Path, count: int = 2048) -> None:
    """FOLDER/{train,val}/{a,b}, of ImageNet's usual size; 32 different ones under many names."""
    sys.path.insert(0, str(HERE.parent))
    from images import encode, photo

    files = [encode(photo(375, 500, seed), "JPEG", quality=90) for seed in range(32)]
    for number in range(count):
        path = folder / ("train" if number % 16 else "val") / "ab"[number // 16 % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[number % 32])


def demand(folder: Path) -> list[str]:
    """How many times the images that a step takes the loader has ready, if both were measured."""
    with suppress(OSError, ValueError):
        found = [json.loads((folder / f"{name}.json").read_text())["rows"] for name in ("resnet50", "loader-224")]
        takes, has = (max(median(row["images_per_s"]) for row in rows if "images_per_s" in row) for rows in found)
        return [f"resnet50 takes {takes:,.0f} images/s, the loader has {has:,.0f}: {has / takes:.2f} times"]
    return []


# The block of text.


def anonymous(text: str) -> str:
    """The text without folders, and without names of the user and the machine."""
    text = text.replace(f"{Path.home()}/", "")  # there may be blanks in it
    text = re.sub(r"(?<![\w/.])(?:/[^\s/'\":,()]+)*/(?=[^\s/])", "", text)
    names = {socket.gethostname(), socket.gethostname().partition(".")[0], Path.home().name}
    with suppress(KeyError, OSError):
        names.add(getpass.getuser())
    for name in names - {"", "root", "localhost"}:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", text)
    return re.sub(r"(?<![\w.])\d+(\.\d+){3}(?![\w.])", "…", text)  # an address


def block(found: dict[str, Any], parts: Sequence[Part]) -> str:
    """All in one text for an issue; `found` is of `describe_environment`."""
    versions = {**found["packages"], "python": found["python"], "platform": found["platform"]}
    wanted = "effloop|torch|timm|nvidia-dali|python$|platform$"
    facts = {name: version for name, version in versions.items() if re.match(wanted, name)}
    lines = [f"{name}: {value}" for name, value in {**(found["effloop"] or {}), **facts, **found["hardware"]}.items()]
    lines.append("")
    lines += [f"{part.name:12}{part.seconds:5.0f} s  {part.result}" for part in parts]
    for part in parts:
        lines += ["", f"{part.name}: {' '.join(part.words)}"] * bool(part.lines)
        lines += [f"  {line[:200]}".rstrip() for each in part.lines for line in each.splitlines()]
    return anonymous("\n".join(["```text", *lines, "```", ""]))


def main() -> int:
    parser = argparse.ArgumentParser(description="EffLoop on a GPU: a block of text to paste into an issue.")
    parser.add_argument("--minutes", type=float, default=10, help="what all of it may take (default: 10)")
    end = time.time() + 60 * parser.parse_args().minutes
    sys.path.insert(0, str(ROOT))
    import torch
    from rich.console import Console

    from effloop.runs.environment import describe_environment, find_checkouts

    if not torch.cuda.is_available():
        print(f"report: torch {torch.__version__} finds no GPU; run it on a machine with one", file=sys.stderr)
        return 2
    found, console = describe_environment(find_checkouts()), Console(stderr=True)
    memory = found["hardware"]["gpu_memory"] = torch.cuda.get_device_properties(0).total_memory
    parts = all_parts(found["packages"], torch.cuda.device_count(), memory)
    todo = [part for part in parts if not part.result.startswith("skipped")]
    with (
        tempfile.TemporaryDirectory(prefix="effloop-gpu-", ignore_cleanup_errors=True) as name,
        suppress(KeyboardInterrupt),
    ):
        write_photos((folder := Path(name)) / "photos")
        for number, part in enumerate(todo):
            began, shares = time.time(), sum(each.share for each in todo[number:])
            limit_s = min(end - began, max(30, 2 * part.share / shares * (end - began)))
            if limit_s > 5:
                part.result = "failed: stopped by Ctrl-C"
                with console.status(f"{number + 1} of {len(todo)}: {part.name}, at most {limit_s:.0f} s"):
                    part.do(folder, limit_s)
            part.seconds = time.time() - began
            console.print(f"{part.name}: {part.result} ({part.seconds:.0f} s)", markup=False, highlight=False)
        parts[-1].lines += demand(folder)
    Path("gpu-report.txt").write_text(text := block(found, parts), "utf-8")
    print(text)
    print("It is in gpu-report.txt, too: please paste it into an issue.")
    return int(any(part.result.startswith("failed") for part in parts))


if __name__ == "__main__":
    sys.exit(main())

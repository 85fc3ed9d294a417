"""`tests/gpu/report.py`: the block of text that it prints, of parts that are really run; and torch's sanitizer."""

import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulator
import pytest
import torch

from effloop.batch import Batch
from effloop.data.transfer import Transfer
from effloop.runs.environment import describe_environment

SCRIPT = Path(__file__).parents[1] / "gpu" / "report.py"
TESTS = """
import os, sys, time, types
import pytest
import report

report.STUCK_S = 0.3
lost = lambda: (_ for _ in ()).throw(RuntimeError("an illegal memory access"))
sys.modules["torch"] = torch = types.SimpleNamespace(cuda=types.SimpleNamespace(synchronize=lambda: None))

def test_passes(): pass
def test_fails(): assert 1 == 2, "in /home/somebody/secret/file.py"
def test_is_skipped(): pytest.skip("one GPU is here")
def test_hangs(): time.sleep(60)
def test_crashes(): os.kill(os.getpid(), 11)
def test_loses_the_device():
    torch.cuda.synchronize = lost
    assert not "lost"
def test_comes_last(): pass
"""


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("gpu_report", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "gpu_report", module)
    spec.loader.exec_module(module)
    monkeypatch.setenv(module.LOG, "")
    yield module
    os.close(module.STDERR)


def words(folder: Path) -> list[str]:
    return ["python", "-m", "pytest", str(folder), f"--rootdir={folder}", "-p", "report", "-p", "no:cacheprovider"]


def test_no_test_costs_another_one(report, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a second to import
    (tmp_path / "test_x.py").write_text(TESTS)
    tests = report.Tests("tests", 1, words(tmp_path))
    tests.do(tmp_path, 60)
    assert tests.result == "failed: 2 passed, 4 failed, 1 skipped"
    found = dict(line.split("\n", 1) for line in tests.lines[:4])
    names, said = zip(*found.items(), strict=True)
    failed = [f"test_x.py::test_{name}" for name in ("fails", "hangs", "crashes", "loses_the_device")]
    assert list(names) == failed
    assert said[0].startswith("AssertionError: in /home/somebody/secret/file.py\nassert 1 == 2\n")
    assert "in test_hangs" in said[1]
    assert said[2].startswith("exit code 139\n") or said[2].startswith("exit code -11\n")
    assert "in test_crashes" in said[2]
    assert tests.lines[4] == "skipped: one GPU is here"


def test_the_time_of_a_part_is_limited(report, tmp_path):
    hangs = report.Part("hangs", 1, ["sh", "-c", "echo begins; sleep 60 & sleep 60"])
    hangs.do(tmp_path, 0.3)
    assert hangs.result == "failed: no end within 0 s"
    assert hangs.lines == ["begins"]
    tests = report.Tests("tests", 1, ["sleep", "60"])
    tests.do(tmp_path, 0.2)
    assert tests.result == "failed: 0 passed, 0 failed, 0 skipped; no end within 0 s"


def test_the_block_names_nobody(report, tmp_path):
    table = report.Part("table", 1, ["printf", "nothing\n┃ knob ┃ images/s ┃\n│ fused │ 1,234 │\n"])
    fails = report.Part("fails", 1, ["ls", f"{Path.home()}/a", "/data/of-mine", f"{tmp_path}/x/y.py"])
    for part in (table, fails):
        part.do(tmp_path, 10)
    fails.lines.append(f"rank 1 of {socket.gethostname()} at 10.1.2.3:29500, images/s")
    text = report.block(describe_environment({"git": None, "effloop": None}), [table, fails])
    assert "  fused   1,234" in text.replace("  │", "")
    assert "torch: 2." in text
    assert "cores: " in text
    assert "fails           0 s  failed: exit code 2" in text
    for word in (socket.gethostname(), "10.1.2.3", "/data", str(tmp_path.parent), f"{Path.home()}/"):
        assert word not in text, text
    assert "images/s" in text


def test_all_parts_are_there(report, monkeypatch):
    monkeypatch.setattr(report, "ROOT", Path("/a folder"))
    parts = report.all_parts(["pytest-xdist", "timm"], 1, 80 * 10**9)
    skipped = [part.name for part in parts if part.result.startswith("skipped")]
    assert skipped == ["train-dali", "second-gpu"]
    assert "batch_size=128" in parts[1].words
    assert {"/a folder/tests/gpu", "--rootdir=/a folder"} < {*parts[0].words}


def test_without_a_gpu_it_is_one_line(report, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["report.py"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert report.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "finds no GPU" in err


@pytest.mark.slow
def test_the_sanitizer_is_content_on_emulated_gpus(report, tmp_path, monkeypatch):
    for name, value in emulator.environment().items():
        monkeypatch.setenv(name, value)
    [part] = [part for part in report.all_parts(["pytest-xdist"], 1, 0) if part.name == "sanitizer"]
    part.words = [*part.words, "-k", "test_batches_are_those_of_the_cpu"]
    part.do(tmp_path, 300)
    assert part.result == "passed: 8 passed, 0 failed, 0 skipped", part.lines


def transferred(waits: bool) -> str:
    """What the sanitizer says of batches that are copied on a stream of their own."""
    transfer = Transfer(torch.device("cuda", 0), [0.5], [0.5], channels_last=False)
    images, ids = torch.zeros((2, 1, 4, 4), dtype=torch.uint8).pin_memory(), torch.arange(2)
    if not waits:
        transfer._wait_for = lambda batch, done: batch
    try:
        list(transfer.stream([Batch(images, ids, ids, ids >= 0)] * 3, lambda ids: ids))
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.nightly
def test_the_sanitizer_sees_a_missing_wait(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_SANITIZER", "1")
    assert emulator.call(transferred, True) == ""
    assert emulator.call(transferred, False) == "CUDASanitizerErrors"

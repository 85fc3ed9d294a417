"""The emulated GPUs: late where CUDA may be, strict where it is; and training on them, as on a CPU to the bit."""

import contextlib
import hashlib
import io
import os
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import emulator
import pytest
import torch
from runs import TINY, once, rows, train


def test_rules_of_cuda(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides real ones
    log = tmp_path / "log"
    late, found = emulator.call(rules, log=log)
    assert late["passed at once"] is False
    assert late["waits"] == [2, 4, 6]
    assert all(each != each for each in late["does not"])  # NaN
    assert late["flag"] == [165, 1]  # before the host has waited, and after
    assert "cuda:1 and cpu" in found["host and device"]
    assert "cuda:1 and cuda:0" in found["two devices"]
    assert "Event device" in found["event of another device"]
    assert "out of memory" in found["memory"]
    assert "device-side assert" in found["index"]
    assert "must match the size" in found["shapes"]
    assert all("synchronizing" in found[name] for name in ("read", "mask", "pageable copy"))
    assert found["pinned copy"] == found["mask of numbers"] == ""
    assert found["forked"] == 3  # cudaErrorInitializationError
    assert emulator.contexts(log) == {0, 1}
    assert all(any(each in line for line in emulator.errors(log)) for each in ("forked child", "a queued copy uses"))


def rules() -> Any:
    return copied_beside(), refused()


def copied_beside() -> dict[str, Any]:
    source, stream = torch.arange(1.0, 4).pin_memory(), torch.cuda.Stream()
    found: dict[str, Any] = {}
    for name in ("does not", "waits"):
        with torch.cuda.stream(stream):
            copied = source.to("cuda", non_blocking=True)
        found["passed at once"] = stream.query()
        if name == "waits":
            torch.cuda.current_stream().wait_stream(stream)
        found[name] = (copied * 2).cpu().tolist()
    flag = torch.ones(1, dtype=torch.uint8, device="cuda").to("cpu", non_blocking=True)
    found["flag"] = [int(flag)]
    torch.cuda.synchronize()
    found["flag"].append(int(flag))
    return found


def refused() -> dict[str, Any]:
    from emulator import kernels

    found: dict[str, Any] = {}
    assert torch.cuda.device_count() == 2

    def attempt(name: str, function: Callable[[], Any]) -> None:
        found[name] = ""
        try:
            function()
        except Exception as error:
            found[name] = str(error)

    here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    attempt("host and device", lambda: there + torch.ones(3))
    attempt("two devices", lambda: here + there)
    attempt("shapes", lambda: here + torch.ones(4, device="cuda"))
    attempt("memory", lambda: torch.empty(1 << 40, device="cuda"))
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(0))
    attempt("event of another device", lambda: event.record(torch.cuda.current_stream(1)))
    pinned = torch.ones(3).pin_memory()
    warnings.simplefilter("ignore")  # the check is a prototype, says torch
    torch.cuda.set_sync_debug_mode("error")
    attempt("read", lambda: float(here[0]))
    attempt("mask", lambda: here[here > 0])
    attempt("mask of numbers", lambda: here[torch.zeros_like(here, dtype=torch.int64)])
    attempt("pageable copy", lambda: here.copy_(torch.ones(3)))
    attempt("pinned copy", lambda: here.copy_(pinned, non_blocking=True))
    torch.cuda.set_sync_debug_mode("default")
    cudart: Any = torch.cuda.cudart()
    slot = torch.ones(5000)
    cudart.cudaHostRegister(slot.data_ptr(), slot.nbytes, 0)
    assert slot.is_pinned()
    copy = slot.to("cuda", non_blocking=True)
    cudart.cudaHostUnregister(slot.data_ptr())
    assert not slot.is_pinned()
    assert copy.sum().item() == 5000
    child = os.fork()
    if not child:
        os._exit(int(cudart.cudaHostRegister(slot.data_ptr(), slot.nbytes, 0)))
    found["forked"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.redirect_stderr(io.StringIO()):
        attempt("index", lambda: here[torch.tensor([7], device="cuda")].cpu())
    kernels.schedule("latest")
    assert (here + 1).tolist() == [2, 2, 2]  # errors are forgotten
    return found


# Training.

VARIANTS = {
    "plain": [],
    "on the device": ["augment.device=gpu", "augment.mixup=0.4", "augment.cutmix=1", "augment.mix=batch"],
    "step": ["optim.ema=0.9", "accumulate=2", "max_grad_norm=0.1", "optim.fused=true"],
    "snapshots": ["nan=skip", "checkpoint.every_steps=3", "checkpoint.keep=9", "optim=sgd"],
    "diverges": ["optim=sgd", "lr=1e30"],
    "bf16": ["precision=bf16", "augment=native_colour", "augment.device=gpu"],
    "fp16": ["precision=fp16", "optim.ema=0.9"],
}


def trained(photos: str, *words: str) -> dict[str, Any]:
    """What a run leaves, except for times: its exit code, hashes of the checkpoints' tensors, the rows of its files."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
            code = train(Path(photos), "run=x", *words)
        run = Path("outputs/x")
        found: dict[str, Any] = {"code": code, "why": re.findall("nan: .*;", err.getvalue())}
        for path in sorted((run / "checkpoints").glob("*.ckpt")):
            found[path.name] = hashed(torch.load(path, map_location="cpu", weights_only=False))
        # A GPU's flags are read two updates later, when another line may have been logged.
        for path in sorted(run.glob("*.jsonl" if not code else "nan.jsonl")):
            kept = re.compile("top|loss|epoch|step|ids|what|norm")
            found[path.name] = [{key: row[key] for key in row if kept.search(key)} for row in rows(run, path.name)]
        return found


def hashed(value: Any) -> Any:
    """A tree with its tensors' bytes hashed, and without times."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
    if isinstance(value, dict):
        return {key: hashed(each) for key, each in value.items()}
    return [hashed(each) for each in value] if isinstance(value, list | tuple) else None


def compared(photos: str, devices: int, seeds: Sequence[int], epochs: int) -> list[str]:
    """Trainings on schedules of their own, in this process; those that differ from the CPU's, or from the eager one.

    Autocast casts other operations on a GPU: with it a CPU's numbers are others.
    """
    from emulator import kernels

    wanted: dict[str, Any] = {}
    differ = []
    for seed in seeds:
        draw = random.Random(seed)
        name, words = draw.choice([*VARIANTS.items()])
        words = [*words, f"epochs={epochs}"]
        if name not in wanted:
            kernels.schedule("eager")
            wanted[name] = trained(photos, *words, "device=cuda:0" if name in ("bf16", "fp16") else "device=cpu")
        kind = ("latest", "ahead", "eager", *["random"] * 7)[seed % 10]
        engine = [f"engine={draw.choice(['threads', 'processes'])}", f"num_workers={draw.randint(1, 2)}"]
        device = f"device=cuda:{draw.randrange(devices)}"
        kernels.schedule(kind, seed)
        torch.cuda.set_device(0)
        found = trained(photos, *words, *engine, device)
        if found != wanted[name] or kernels.first_error() or kernels.failures:
            keys = [key for key in {*found, *wanted[name]} if found.get(key) != wanted[name].get(key)]
            differ.append(f"{kind} {seed}: {name}, {engine}, {device}: {keys}, {kernels.first_error()}")
    return differ


def test_trains_as_on_a_cpu(photos):
    assert emulator.call(compared, str(photos), 2, [3, 21], 2) == []


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "seeds", [pytest.param(10, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.nightly)]
)
def test_trains_as_on_a_cpu_on_many_schedules(photos, devices, seeds):
    assert emulator.call(compared, str(photos), devices, range(seeds), 6, devices=devices, timeout_s=3000) == []


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_the_command_uses_one_gpu(photos, tmp_path, device):
    log = tmp_path / "log"
    words = [f"data.root={photos}", *TINY, f"device={device}", "engine=processes", "num_workers=1"]
    done = emulator.run("-m", "effloop", *once("train", *words), log=log, cwd=tmp_path)
    assert not done.returncode, done.stderr
    assert emulator.contexts(log) == {int(device == "cuda:1")}
    assert emulator.errors(log) == []


@pytest.mark.slow
def test_tests_for_a_gpu_pass():
    """All but those of speed, of compiled kernels and of DALI's, which say so."""
    done = emulator.run("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", Path(__file__).parents[1] / "gpu")
    assert not done.returncode, done.stdout
    assert re.search(r"1\d\d passed", done.stdout), done.stdout

"""Profilers, on a CPU; what they say of a GPU is tested on one."""

import gzip
import json
import pstats
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from effloop.errors import ConfigError
from effloop.profile import ProfileConfig, Profiler, profilers
from effloop.profile.syncs import SyncFinder

CPU = torch.device("cpu")


def config(name: str, wait: int = 1, steps: int = 2) -> ProfileConfig:
    made = profilers[name].config(name=name)
    assert isinstance(made, ProfileConfig)
    made.wait, made.steps = wait, steps
    return made


def profiled(name: str, folder: Path, wait: int = 1, steps: int = 2, rank: int = 0) -> tuple[Profiler, int]:
    """A profiler after a loop of its own, and how many updates that took."""
    updates = 0
    with profilers.build(config(name, wait, steps), folder, CPU, rank) as profiler:
        while not profiler.done:
            update(torch.ones(8, 8))
            updates += 1
            profiler.step()
    return profiler, updates


def update(x: Tensor) -> float:
    return float((x @ x).sum().item())


LINE = update.__code__.co_firstlineno + 1


@pytest.mark.parametrize("wait", [0, 1, 3])
def test_torch(tmp_path, wait):
    """The multiplications of two updates, and then one update whose reads of tensors are found."""
    profiler, updates = profiled("torch", tmp_path, wait)
    assert updates == wait + 3
    with gzip.open(tmp_path / "profile" / "effloop.pt.trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::mm") == 2
    text = "\n".join(profiler.report())
    assert re.search(r"aten::mm .* 2 *\n", text)
    assert f"    1 x item(), float() or bool(), profile/test_profilers.py:{LINE} (update)" in text
    assert (tmp_path / "profile" / "operators.txt").read_text().startswith("operators of 2 updates")


def test_cprofile(tmp_path):
    profiler, updates = profiled("cprofile", tmp_path)
    assert updates == 3
    stats = pstats.Stats(str(tmp_path / "profile" / "cprofile.pstats"))
    assert {name: calls for (_, _, name), (_, calls, *_) in stats.stats.items()}["update"] == 2  # type: ignore[attr-defined]
    assert "profile/test_profilers.py" in "\n".join(profiler.report())


@pytest.mark.parametrize("name", ["torch", "cprofile"])
def test_other_ranks_and_loops_that_stop(tmp_path, name):
    """Other ranks do as many updates and write nothing; nothing stays switched on."""
    assert profiled(name, tmp_path)[1] == profiled(name, tmp_path / "none", rank=1)[1]
    assert not (tmp_path / "none").exists()
    for stop in (0, 2, 3):  # before, within and behind the profiled updates
        with profilers.build(config(name), tmp_path, CPU, 0) as profiler:
            for _ in range(stop):
                profiler.step()
        profiled("cprofile", tmp_path)  # Python has one profiler at a time
        assert not torch._C._len_torch_dispatch_stack()


def test_what_cannot_be_profiled():
    config("none").check(0, CPU, in_place=True)
    config("torch").check(4, CPU, in_place=False)
    with pytest.raises(ConfigError, match=r"wait=1 and steps=2 need 4 updates, and 3 are left; set profile.wait=0"):
        config("torch").check(3, CPU, in_place=False)
    with pytest.raises(ConfigError, match="profile: torch ends the run, and this one is to be finished"):
        config("torch").check(100, CPU, in_place=True)
    with pytest.raises(ConfigError, match="nvtx is for NVIDIA GPUs, and the model is on the CPU"):
        config("nvtx").check(100, CPU, in_place=False)
    for key, value in (("wait", -1), ("steps", 0)):
        with pytest.raises(ConfigError, match=rf"profile\.{key}: {value} is not allowed"):
            ProfileConfig("torch", **{key: value})


def test_where_values_are_read():
    """Lines of whoever calls torch; not the counters of an optimizer, which are on the host."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    with SyncFinder(CPU) as finder:
        weight.sum().backward()
        optimizer.step()
    assert not finder.found
    with SyncFinder(CPU) as finder:
        weight[weight > 0.5].sum()
        if weight.sum() > 0:
            weight.detach().tolist()
    assert {what for *_, what in finder.found} == {"a mask as an index", "item(), float() or bool()"}
    assert {Path(file).name for file, *_ in finder.found} == {"test_profilers.py"}

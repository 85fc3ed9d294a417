"""What a process runs on and from."""

import subprocess
from pathlib import Path

import pytest
import torch

import effloop
from effloop.runs import environment
from effloop.runs.environment import find_checkout, find_checkouts
from effloop.runs.folder import RunInfo, write_run_info


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repo(here: Path) -> Path:
    """A checkout with one commit, which is the current folder."""
    git(here, "init")
    (here / "a.py").write_text("one\n")
    (here / "b.bin").write_bytes(bytes(256))
    (here / "sub").mkdir()
    git(here, "add", ".")
    git(here, "commit", "-m", "first")
    return here


def written(folder: Path) -> Path:
    """A run folder of a run that is started here."""
    folder.mkdir(parents=True)
    write_run_info(folder, RunInfo(effloop.compose(), [], {}))
    return folder


def test_a_clean_checkout(repo):
    (repo / "outputs").mkdir()
    (repo / "outputs/x").write_text("where runs land is no change")
    found = find_checkout(repo / "sub")
    assert found is not None
    assert found.facts == {"commit": found.commit, "dirty": False}
    assert len(found.commit) == 40
    assert not (written(repo / "outputs/run") / "changes.diff").exists()
    assert not found.untracked
    (repo / "sub/my [runs]/x").mkdir(parents=True)
    (repo / "sub/my [runs]/x/log.txt").touch()
    other, dirty = (find_checkout(repo / "sub", out=str(repo / out)) for out in ("sub/my [runs]", "x"))
    assert other == found
    assert dirty is not None
    assert dirty.facts["dirty"]
    (repo / "sub/my [runs]").rename(repo / ".runs")
    assert find_checkout(repo, out=str(repo / ".runs")) == found


def test_what_was_changed_can_be_applied(repo, tmp_path):
    git(tmp_path, "clone", str(repo), "clean")
    (repo / "a.py").write_text("two\n")
    (repo / "b.bin").write_bytes(bytes(range(256)))
    (repo / "sub/new.py").write_text("secret")
    changes = written(repo / "outputs/run") / "changes.diff"
    assert f"{repo} at " in changes.read_text()
    assert "not tracked, not in here: sub/\n" in changes.read_text()
    assert "secret" not in changes.read_text()
    git(tmp_path / "clean", "apply", str(changes))
    for name in ("a.py", "b.bin"):
        assert (tmp_path / "clean" / name).read_bytes() == (repo / name).read_bytes()


def test_a_package_twice_is_the_one_that_is_imported(tmp_path, monkeypatch):
    for folder, version in {"first": "1.0", "second": "2.0", "_vendor": "3.0"}.items():
        monkeypatch.syspath_prepend(tmp_path / folder)
        info = tmp_path / folder / "some.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Some\nVersion: {version}\n")
    assert environment.describe_environment({"git": None, "effloop": None})["packages"]["some"] == "2.0"


def test_a_huge_change_is_cut(repo):
    (repo / "a.py").write_text("x\n" * 3_000_000)
    changes = (written(repo / "outputs/run") / "changes.diff").read_text()
    assert len(changes) < 5_001_000
    assert "cut: 9,000,1" in changes


def test_no_checkout(here):
    assert find_checkout(here) is None
    git(here, "init")
    assert find_checkout(here) is None  # without a commit
    assert find_checkouts()["git"] is None
    assert environment.describe_environment(find_checkouts())["git"] is None


def test_an_installed_effloop_is_of_nobodys_checkout(repo):
    (repo / "sub/package.py").write_text("in a virtual environment")
    assert find_checkout(repo / "sub", tracked="package.py") is None
    git(repo, "add", ".")
    git(repo, "commit", "-m", "second")
    assert find_checkout(repo / "sub", tracked="package.py") is not None


def test_variables(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("API_TOKEN", "hunter2")
    found = environment.describe_environment({"git": None, "effloop": None}, ranks=3)
    assert found["variables"]["MKL_CBWR"] == "COMPATIBLE"
    assert "hunter2" not in str(found)
    assert found["ranks"] == 3
    assert found["hardware"]["torch_threads"] == torch.get_num_threads()
    assert bool(found["hardware"]["driver"]) == bool(found["hardware"]["gpus"]) == torch.cuda.is_available()


@pytest.mark.parametrize(
    "module",
    [
        "NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar",
        "NVIDIA UNIX Open Kernel Module for x86_64  580.9  Release",
    ],
)
def test_driver(module, tmp_path, monkeypatch):
    (tmp_path / "version").write_text(f"NVRM version: {module}\nGCC version:  gcc version 12.3.0\n")
    monkeypatch.setattr(environment, "NVIDIA_MODULE", tmp_path / "version")
    assert environment.nvidia_driver() == module.split()[-2 if "Tue" not in module else -3]

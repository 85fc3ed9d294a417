"""The environment that a run's numbers may depend on, beside config and data: code, packages, hardware, variables."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from effloop.lazy import torch
from effloop.registry import plugin_files
from effloop.system import gpu
from effloop.system.hardware import available_cores

# Asking git about a checkout that anybody may have written, whose configuration names programs for git to run.

_TIMEOUT_S = 10
_OFF = {  # settings that take precedence over a checkout's own
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.pager": "cat",
    "core.sshCommand": "false",
    "diff.external": "",
    "diff.ignoreSubmodules": "dirty",  # else git asks each for its state, by that one's configuration
    "protocol.allow": "never",
    "safe.bareRepository": "explicit",
}
# Variables of git's that the caller may set; others would add settings, or another repository.
_KEPT = ("GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM", "GIT_EXEC_PATH")


def _git(folder: Path, settings: Sequence[tuple[str, str]], *words: str) -> bytes:
    """What `git WORDS` prints in a folder: no program that a configuration names, no network, no writing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in _KEPT}
    numbered = {f"GIT_CONFIG_KEY_{number}": key for number, (key, _) in enumerate(settings)}
    numbered |= {f"GIT_CONFIG_VALUE_{number}": value for number, (_, value) in enumerate(settings)}
    env = {
        **kept,
        **numbered,
        "GIT_CONFIG_COUNT": str(len(settings)),
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",  # don't write to the repository
        "GIT_TERMINAL_PROMPT": "0",
    }
    command, none = ["git", "-C", str(folder), "--no-pager", *words], subprocess.DEVNULL
    return subprocess.run(command, stdin=none, capture_output=True, timeout=_TIMEOUT_S, env=env, check=True).stdout


def _settings(folder: Path) -> list[tuple[str, str]]:
    """Settings under which git runs no program: `_OFF`, and those that configured filters call for."""
    settings = [*_OFF.items()]
    names = _git(folder, settings, "config", "--list", "--name-only", "-z").decode(errors="surrogateescape").split("\0")
    for each in sorted({name.rpartition(".")[0] for name in names if name.startswith("filter.")}):
        settings += [(f"{each}.{key}", "") for key in ("clean", "smudge", "process")]  # where a file is compared
        settings.append((f"{each}.required", "false"))
    return settings


# Environment variables that select kernels or split sums. No others are read: they may hold secrets.
RECORDED_VARIABLES = tuple(
    """
    ATEN_CPU_CAPABILITY CUBLAS_WORKSPACE_CONFIG CUDA_VISIBLE_DEVICES DNNL_DEFAULT_FPMATH_MODE DNNL_MAX_CPU_ISA
    MKL_CBWR MKL_DYNAMIC MKL_ENABLE_INSTRUCTIONS MKL_NUM_THREADS NCCL_ALGO NCCL_PROTO NVIDIA_TF32_OVERRIDE OMP_DYNAMIC
    OMP_NUM_THREADS ONEDNN_DEFAULT_FPMATH_MODE ONEDNN_MAX_CPU_ISA OPENBLAS_NUM_THREADS
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    """.split()  # noqa: SIM905
)
NVIDIA_MODULE = Path("/proc/driver/nvidia/version")
_NAMED = re.compile(r"^(Name|Version): *(\S+)", re.MULTILINE)
_DIFF = (
    *("--binary", "--unified=3", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--no-relative", "--src-prefix=a/", "--dst-prefix=b/", "--submodule=short"),
    *("--ignore-submodules=dirty", "--diff-algorithm=default"),
)
"""Options for a diff of the whole checkout that `git apply` accepts, whatever the user's git settings. What was changed
inside a submodule isn't looked at: its configuration may name programs, too."""
_STATUS = ("--porcelain", "--untracked-files=normal", "--ignore-submodules=dirty", "--no-renames")


@dataclass(frozen=True)
class Checkout:
    """A git checkout as it is now."""

    root: Path  # its top folder
    commit: str  # hash of HEAD
    diff: bytes  # from HEAD to the working tree, for `git apply`
    # files and folders that git neither tracks nor ignores, except `outputs/` and the runs' folder
    untracked: tuple[str, ...]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """`commit`, `dirty`, and if tracked files were changed, a hash of the `changes`."""
        found: dict[str, Any] = {"commit": self.commit, "dirty": bool(self.diff or self.untracked)}
        return found | ({"changes": hashlib.sha256(self.diff).hexdigest()} if self.diff else {})


def find_checkout(folder: Path, tracked: str = "", out: str = "outputs") -> Checkout | None:
    """The git checkout that a folder is in; None outside of one, without git, or if it has no commit.

    It is None, too, where git doesn't track the file `tracked` of the folder. What is in `out` is no change.
    """
    try:
        git = partial(_git, folder, _settings(folder))
        root, commit = git("rev-parse", "--show-toplevel", "HEAD").decode().splitlines()
        if tracked:
            git("ls-files", "--error-unmatch", tracked)
        diff = git("diff", "HEAD", *_DIFF)
        written = os.path.relpath(os.path.realpath(os.path.expanduser(out)), root)
        inside = written.partition(os.sep)[0] not in (".", "..")
        excluded = [f":(exclude,top,literal){written}"] if inside else []
        paths = [":/", ":(exclude,top,glob)**/outputs/**", *excluded]
        status = git("status", *_STATUS, "--", *paths).decode(errors="replace")
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    untracked = (line.removeprefix("?? ") for line in status.splitlines() if line.startswith("?? "))
    return Checkout(Path(root), commit, diff, tuple(untracked))


def find_checkouts(out: str = "outputs") -> dict[str, Checkout | None]:
    """`git`: the working directory's checkout; `effloop`: EffLoop's own, None if it was installed. `out`: of runs."""
    package = Path(__file__).parents[1]  # maybe untracked, in a virtual environment inside another checkout
    return {"git": find_checkout(Path.cwd(), out=out), "effloop": find_checkout(package, "__init__.py", out)}


def describe_environment(checkouts: Mapping[str, Checkout | None], ranks: int = 1) -> dict[str, Any]:
    """Packages, Python, commits, hardware and variables of this process, without the machine's name."""
    here, own = checkouts["git"], checkouts["effloop"]
    gpus = [gpu.name(torch.device("cuda", number)) for number in range(gpu.count())]
    plugins = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in plugin_files()}
    return {
        "started": datetime.now(UTC).isoformat(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "git": here.facts if here else None,
        "effloop": own.facts if own else None,
        "ranks": ranks,
        "hardware": {
            "processor": processor(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "cores": available_cores(),
            "torch_threads": torch.get_num_threads(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "gpus": gpus,
            "driver": nvidia_driver() if gpus else None,
            "cuda": torch.version.cuda if gpus else None,
            "cudnn": torch.backends.cudnn.version() if gpus else None,  # type: ignore[no-untyped-call]
        },
        "variables": {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
        "packages": _packages(),
        **({"plugins": plugins} if plugins else {}),
    }


def effloop_version() -> str:
    """EffLoop's version; `not installed` if its checkout is only on the path."""
    try:
        return version("effloop")
    except PackageNotFoundError:
        return "not installed"


def _packages() -> dict[str, str]:
    path = [folder for folder in sys.path if not folder.endswith("_vendor")]  # added by setuptools when torch compiles
    found: dict[str, str] = {}
    for each in distributions(path=path):  # whose `metadata` parses all of the text, in 0.3 ms
        head = (each.read_text("METADATA") or each.read_text("PKG-INFO") or "").partition("\n\n")[0]
        fields: dict[str, str] = dict(_NAMED.findall(head))
        if name := fields.get("Name"):  # none for a package that is half uninstalled
            found.setdefault(name.lower(), fields.get("Version", ""))  # the first on the path, as for imports
    return dict(sorted(found.items()))


def processor() -> str:
    """Name of the CPU model."""
    try:
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def nvidia_driver() -> str | None:
    """Version of NVIDIA's driver, from its kernel module."""
    try:
        found = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", NVIDIA_MODULE.read_text())
    except OSError:
        return None
    return found[1] if found else None

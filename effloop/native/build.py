"""Compiles the C files beside it into one shared library: `pip install` runs this, with a compiler from PyPI.

It runs where the package's own dependencies aren't installed, so it imports nothing of the package.
"""

from __future__ import annotations

import os
import platform
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_HERE = Path(__file__).parent
_FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-sanitize=undefined", "-Wall", "-Wextra")
_GLIBC = "2.28"  # as manylinux_2_28, which PyTorch's own wheels ask for
_LIBRARY = "_native.so"
_digest = runpy.run_path(os.fspath(_HERE / "sources.py"))["digest"]


def compile_library(target: Path) -> None:
    """Compile every C file of this folder into a shared library, by Zig's compiler or the one that CC names.

    Raises:
        subprocess.CalledProcessError: The compiler has refused; its output has been shown.
    """
    machine = platform.machine()
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{_GLIBC}"]
    compiler = os.environ["CC"].split() if os.environ.get("CC") else zig
    baseline = ["-mcpu=x86_64_v2"] if machine == "x86_64" and compiler is zig else []
    sources = sorted(os.fspath(path) for path in _HERE.glob("*.c"))
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = os.path.join(folder, _LIBRARY)
        cache = {"ZIG_LOCAL_CACHE_DIR": folder, "ZIG_GLOBAL_CACHE_DIR": folder}
        sources_word = f'-DEFFLOOP_SOURCES="{_digest()}"'
        command = [*compiler, *_FLAGS, *baseline, sources_word, "-o", fresh, *sources, "-lm"]
        subprocess.run(command, check=True, env=os.environ | cache)
        os.replace(fresh, target)  # a process that has the old one mapped keeps it


class NativeBuild(BuildHookInterface[Any]):  # hatchling finds the hook by its base class
    """Adds the library to the wheel, or puts it in place for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless this is the source distribution."""
        if self.target_name != "wheel":
            return
        compile_library(_HERE / _LIBRARY)
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag.replace('linux', 'manylinux_' + _GLIBC.replace('.', '_'), 1)}"
        build_data["artifacts"].append(f"effloop/native/{_LIBRARY}")


if __name__ == "__main__":
    compile_library(_HERE / _LIBRARY)

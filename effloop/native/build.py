"""Compiles the C files beside it into one shared library: `pip install` runs this, with a compiler from PyPI.

It runs where the package's own dependencies aren't installed, so it imports nothing of the package.
"""

from __future__ import annotations

import importlib.util
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
_SOURCES = runpy.run_path(os.fspath(_HERE / "sources.py"))


def compile_library(target: Path) -> None:
    """Compile every C file of this folder into a shared library, by Zig's compiler or the one that CC names.

    Raises:
        SystemExit: There is no compiler, or it has refused and shown why.
    """
    machine = platform.machine()
    compiler = os.environ.get("CC", "").split()
    baseline = ["-msse4.2"] if compiler else ["-mcpu=x86_64_v2-slow_unaligned_mem_32"]
    if not compiler:
        if importlib.util.find_spec("ziglang") is None:
            sys.exit("effloop: there is no C compiler: pip install ziglang, or name one in CC, as in CC=gcc")
        compiler = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{_GLIBC}"]
    sources = sorted(os.fspath(path) for path in _HERE.glob("*.c"))
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / _LIBRARY
        cache = {"ZIG_LOCAL_CACHE_DIR": folder, "ZIG_GLOBAL_CACHE_DIR": folder}
        sources_word = f'-DEFFLOOP_SOURCES="{_SOURCES["digest"]()}"'
        flags = [*_FLAGS, *(baseline if machine == "x86_64" else []), sources_word]
        command = [*compiler, *flags, "-o", os.fspath(fresh), *sources, "-lm"]
        try:
            subprocess.run(command, check=True, env=os.environ | cache)
            os.replace(fresh, target)  # a process that has the old one mapped keeps it
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"effloop: the C parts can't be compiled: {str(error)[:200]}")


class NativeBuild(BuildHookInterface[Any]):  # hatchling finds the hook by its base class
    """Adds the library to the wheel, or puts it in place for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless this is the source distribution; for a wheel elsewhere, as the sources may be read-only."""
        if self.target_name != "wheel":
            return
        if version == "editable":
            compile_library(_HERE / _LIBRARY)
        else:
            self._folder = tempfile.TemporaryDirectory()
            library = Path(self._folder.name) / _LIBRARY
            compile_library(library)
            build_data["force_include"][os.fspath(library)] = f"effloop/native/{_LIBRARY}"
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        if not os.environ.get("CC"):  # another compiler links with this machine's libc
            tag = tag.replace("linux", "manylinux_" + _GLIBC.replace(".", "_"), 1)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"


if __name__ == "__main__":
    compile_library(_HERE / _LIBRARY)

"""Compiling the shared library: what the compiler is told, and what happens without one."""

import platform
import runpy
import sys
from pathlib import Path

import pytest

from effloop.native import build, sources


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of C files in the place of the package's; and what was compiled before."""
    here = tmp_path / "native"
    here.mkdir()
    for name, text in (("b.c", "int b;"), ("a.c", "int a;"), ("a.h", "extern int a;"), ("notes.txt", "")):
        (here / name).write_text(text)
    (here / "sources.py").write_text(Path(sources.__file__).read_text())
    monkeypatch.setattr(build, "_HERE", here)
    monkeypatch.setattr(build, "_SOURCES", runpy.run_path(str(here / "sources.py")))
    (here / "_native.so").write_bytes(b"as before")
    return here


def compiler(folder: Path, text: str) -> str:
    """A program for `CC`."""
    path = folder.parent / "cc"
    path.write_text(f"#!{sys.executable}\nimport pathlib, sys\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_digest_is_of_the_sources_names_and_contents(folder):
    def digest() -> str:
        found: str = runpy.run_path(str(folder / "sources.py"))["digest"]()
        return found

    seen = [digest()]
    for name, text in (("a.c", "int c;"), ("a.h", "extern int c;"), ("c.c", "")):
        (folder / name).write_text(text)
        seen.append(digest())
    (folder / "c.c").rename(folder / "d.c")
    seen.append(digest())
    assert len({*seen}) == len(seen)
    (folder / "notes.txt").write_text("changed")
    assert digest() == seen[-1]


def test_the_command(folder, monkeypatch):
    """By a compiler that writes down what it is told, as its output."""
    told = "pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_text('\\n'.join(sys.argv[1:]))"
    monkeypatch.setenv("CC", compiler(folder, told) + " -g")
    build.compile_library(folder / "_native.so")
    written = (folder / "_native.so").read_bytes()
    words = written.decode().split("\n")
    assert words[0] == "-g"
    assert {"-shared", "-fPIC", "-O3", "-fvisibility=hidden"} <= {*words}
    assert ("-msse4.2" in words) == (platform.machine() == "x86_64")
    assert f'-DEFFLOOP_SOURCES="{build._SOURCES["digest"]()}"' in words
    assert words[-3:] == [str(folder / "a.c"), str(folder / "b.c"), "-lm"]
    assert {path.name for path in folder.iterdir()} == {"a.c", "a.h", "b.c", "notes.txt", "sources.py", "_native.so"}


@pytest.mark.parametrize("text", ["sys.exit(1)", ""], ids=["refuses", "writes nothing"])
def test_a_compiler_that_fails_leaves_what_is_there(text, folder, monkeypatch):
    monkeypatch.setenv("CC", compiler(folder, text))
    with pytest.raises(SystemExit, match="effloop: the C parts can't be compiled: "):
        build.compile_library(folder / "_native.so")
    assert (folder / "_native.so").read_bytes() == b"as before"


def test_no_compiler(folder, monkeypatch):
    monkeypatch.setenv("CC", str(folder / "none"))
    with pytest.raises(SystemExit, match=r"can't be compiled: .*none"):
        build.compile_library(folder / "_native.so")
    monkeypatch.delenv("CC")
    monkeypatch.setitem(sys.modules, "ziglang", None)
    with pytest.raises(SystemExit, match="no C compiler: pip install ziglang, or name one in CC"):
        build.compile_library(folder / "_native.so")
    assert (folder / "_native.so").read_bytes() == b"as before"

"""What is printed does nothing to a terminal."""

import io
import sys

import pytest
from rich.console import Console
from rich.live import Live

from effloop.cli import main as command_line
from effloop.cli.main import main
from effloop.errors import printable
from effloop.system.processes import EscapedStream, escaped_output

TITLE, CLEAR, CLIPBOARD = "\x1b]0;taken\x07", "\x1b[2J\x1b[H", "\x1b]52;c;cm0gLXJm\x07"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_only_colours_and_bars_pass(kind):
    stream = kind()
    print(TITLE, CLEAR, CLIPBOARD, "ä\u202e\udcff", "two\nlines\t", file=EscapedStream(stream))  # type: ignore[type-var]
    written = stream.getvalue()
    assert {each for each in written if not each.isprintable()} == {"\n", "\t"}
    assert r"\x1b]0;taken\x07 \x1b[2J\x1b[H" in written
    assert "ä" + r"\u202e\udcff" in written
    coloured = "\x1b[1;31mred\x1b[0m\r\x1b[2K\x1b[1A\x1b[?25l"
    assert EscapedStream(stream).write(coloured) == len(coloured)
    assert stream.getvalue().endswith(coloured) == (kind is Terminal)


def test_rich_writes_through():
    plain, ours = Terminal(), Terminal()
    for file in (plain, EscapedStream(ours)):
        console = Console(file=file, force_terminal=True, color_system="standard")  # type: ignore[arg-type]
        with Live("[green]busy[/green]", console=console, auto_refresh=False):  # by a thread, at any time
            console.print("[red]a[/red]")
    assert ours.getvalue() == plain.getvalue()


def test_streams_are_put_back():
    before = sys.stdout, sys.stderr
    with escaped_output():
        assert isinstance(sys.stdout, EscapedStream)
    assert (sys.stdout, sys.stderr) == before


def test_a_line_is_one_line():
    assert printable("a b/ü.jpg") == "a b/ü.jpg"
    assert printable("a\nb\x1b[31m\u2028") == r"a\nb\x1b[31m\u2028"


def test_a_bug(monkeypatch, capsys):
    def broken(args: list[str]) -> int:
        raise ZeroDivisionError("by\x1b]0;0\nor so")

    monkeypatch.setattr(command_line, "_dispatch", broken)
    assert main([]) == 70
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    last = r"effloop: bug: ZeroDivisionError: by\x1b]0;0; please report it with the lines above"
    assert err.splitlines()[-1] == last
    with pytest.raises(ZeroDivisionError):
        main(["--debug"])


def test_ctrl_c(monkeypatch, capsys):
    def interrupted(args: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "_dispatch", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().err == "effloop: interrupted\n"

"""Sinks that fail, and files that a full disk leaves readable."""

import io
import resource
from functools import partial

import pytest
import torch
from rich.console import Console

from effloop.batch import Batch
from effloop.record.base import Position
from effloop.record.efficiency import Clock, Span
from effloop.record.rows import EpochTable, MetricsFile, Resumed
from effloop.record.run import LogFile, StandardOutput
from effloop.record.sinks import AppendFile, EpochReport, Sink, Sinks
from effloop.task import LOSS


class Heard(Sink):
    """Keeps what it hears; raises `error` when it has heard `limit` notes."""

    def __init__(self, error: BaseException | None = None, limit: int = 0) -> None:
        self.error, self.limit = error, limit
        self.lines: list[str] = []
        self.closed = False

    def note(self, line: str) -> None:
        if self.error and len(self.lines) == self.limit:
            raise self.error
        self.lines.append(line)

    def warning(self, line: str) -> None:
        self.note(line)

    def close(self) -> None:
        self.closed = True


def tell(sinks: Sinks, *lines: str) -> None:
    for line in lines:
        sinks.for_each(lambda sink, line=line: sink.note(line))


def test_one_that_fails_is_dropped_and_the_others_hear_all(capsys):
    sinks, good, bad, late = Sinks(), Heard(), Heard(OSError(28, "No space left on device"), limit=1), Heard()
    for name, sink in {"good": good, "one.jsonl": bad, "late": late}.items():
        sinks.open(name, lambda sink=sink: sink)
    tell(sinks, "a", "b", "c")
    line = "record: one.jsonl failed (No space left on device); the run continues without it"
    assert capsys.readouterr().err == f"effloop: warning: {line}\n"
    assert bad.lines == ["a"]
    assert bad.closed
    assert good.lines == ["a", "b", line, "c"]
    assert late.lines == ["a", line, "b", "c"]


def test_one_that_cannot_be_opened(tmp_path, capsys):
    sinks = Sinks()
    sinks.open("log.txt", lambda: LogFile(tmp_path / "log.txt"))
    sinks.open("four.jsonl", lambda: MetricsFile(tmp_path / "no" / "four.jsonl", 0))
    sinks.for_each(lambda sink: sink.close())
    line = "warning: record: four.jsonl failed (No such file or directory); the run continues without it\n"
    assert capsys.readouterr().err == f"effloop: {line}"
    assert (tmp_path / "log.txt").read_text() == line


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BrokenPipeError()])
def test_what_passes(error, capsys):
    sinks, sink = Sinks(), Heard(error)
    sink.is_output = True  # its reader is gone, which is no fault of ours
    sinks.open("output", lambda: sink)
    with pytest.raises(type(error)):
        tell(sinks, "a")
    assert capsys.readouterr().err == ""


def test_a_record_that_does_not_fit_leaves_nothing(tmp_path):
    file, limits = AppendFile(tmp_path / "x"), resource.getrlimit(resource.RLIMIT_FSIZE)
    file.write(b"whole\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # the system takes four bytes more
    try:
        with pytest.raises(OSError, match="File too large"):
            file.write(b"too long\n")
        file.write(b"fit\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        file.close()
    assert (tmp_path / "x").read_bytes() == b"whole\nfit\n"


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (MetricsFile, '{{"split": "train", "epoch": 0, "step": {}}}\n'),
        (partial(EpochTable, names=["loss"]), "0,{},0.1,1\n"),
    ],
)
def test_rows_after_the_checkpoint_are_dropped(tmp_path, kind, row):
    path = tmp_path / "rows"
    kind(path, Resumed()).close()
    header = path.read_text()
    path.write_text(header + "".join(row.format(step) for step in (2, 4, 6)) + row.format(3)[:-1])  # cut by a kill
    kind(path, Resumed(4)).close()
    assert path.read_text() == header + row.format(2) + row.format(4)
    assert list(tmp_path.iterdir()) == [path]


def test_a_terminal_shows_lines_as_they_are():
    out = io.StringIO()
    sink = StandardOutput(Console(file=out, force_terminal=True, width=80), [LOSS])
    line = "frozen: [conv1,*.bn1], in outputs/[red]x :smile: [/x]"
    sink.note(line)
    sink.close()
    assert line in out.getvalue()


def test_any_line_can_be_logged(tmp_path):
    log = LogFile(tmp_path / "log.txt")
    log.note("\udcff.jpg")
    log.close()
    assert (tmp_path / "log.txt").read_text() == "\\udcff.jpg\n"


def test_a_validations_line_has_its_own_times():
    """And counts no padding."""
    clock = Clock(world_size=2, padded=True)
    ids = torch.arange(4)
    assert len([*clock.wait([Batch(ids, ids, ids, ids < 3)])]) == 1
    assert clock.read().samples == 6
    spans = {"span": Span(1.0, 0.0, 100), "val_span": Span(2.0, 1.0, 50)}
    scores = {"train": {"loss": 1.0}, "val": {"loss": 0.5}}
    line = EpochReport(Position(0, 1, 5, 5, 5), 0.1, (LOSS,), **scores, **spans).line()
    assert line == "Epoch: [0] validation  Loss 0.5000  Data 25.0  Wait 50.0%"


def test_nothing_is_written_after_closing(capsys):
    """Ctrl-C may leave a span's generator to be collected when the files are closed."""
    sinks, sink = Sinks(), Heard()
    sinks.open("log.txt", lambda: sink)
    sinks.close()
    tell(sinks, "late")
    assert sink.closed
    assert not sink.lines
    assert capsys.readouterr() == ("", "")

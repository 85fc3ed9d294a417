"""`audit`: what is wrong with a dataset, before a model learns it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from effloop import config as configs
from effloop.assemble.environment import num_workers
from effloop.audit.findings import KINDS, Finding
from effloop.cli.command import command
from effloop.cli.convert import open_all
from effloop.config.overrides import quoted


@dataclass(frozen=True)
class AuditOptions:
    """Options of `audit`.

    Attributes:
        out: the page and the table to write, OUT.html and OUT.csv.
    """

    out: Path = Path("audit")


@command("audit", AuditOptions, "data.root=/data/pets out=pets")
def audit(options: AuditOptions, overrides: list[str]) -> int:
    """Find copies, odd images and wrong labels before a model learns them.

    All images of all splits are looked at once; the same command continues after an interruption. What was found is a
    page of pictures and a table, by which data.exclude leaves images out; nothing else is written or changed.
    num_workers=N sets the threads.
    """
    config = configs.compose(overrides)
    splits = open_all(config, "both")
    from effloop.audit import page
    from effloop.audit.scan import scan
    from effloop.measure.turns import run_command

    _, table = page.outputs(options.out)
    threads = num_workers(config)
    records = scan(splits, config.data.index_dir, threads)
    findings: list[Finding] = []
    order = [*KINDS]
    findings.sort(key=lambda each: (order.index(each.kind), -each.value))
    found = page.Audit(config, splits, findings, {})
    print(f"looked at {', '.join(f'{len(rows):,} {name}' for name, rows in records.items())} images")
    _print(found.lines())
    root = config.data.root or config.data.name
    act = run_command(overrides, [f"data.exclude={quoted(str(table))}"])
    written = page.write(found, options.out, f"Audit of {root}", act, threads)
    print("page: {}   table: {}".format(*written))
    if found.excluded:
        print(f"leave out what the table marks, {len(found.excluded):,} images: {act}")
    return 0


def _print(lines: dict[str, tuple[int, str]]) -> None:
    """Print a line for each kind of finding."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for kind, (number, line) in lines.items():
        table.add_row(kind, f"{number:,}", Text(line))
    Console().print(table if lines else "nothing was found")

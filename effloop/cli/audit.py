"""`audit`: what is wrong with a dataset, before a model learns it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import NDArray

from effloop import config as configs
from effloop.assemble.environment import num_workers
from effloop.audit.findings import KINDS, Finding
from effloop.cli.command import command, new_files
from effloop.cli.convert import open_all
from effloop.config.overrides import key_of
from effloop.convert.convert import Splits
from effloop.data.source import Source
from effloop.data.source.division import keep_copies
from effloop.errors import ConfigError, printable
from effloop.runs.reader import read_overrides

if TYPE_CHECKING:
    from effloop.audit.labels import Judged
    from effloop.audit.page import Audit
    from effloop.inference.trained import Trained


@dataclass(frozen=True)
class AuditOptions:
    """Options of `audit`.

    Attributes:
        run: a run, or the sweep of a cross-validation, whose predictions find wrong labels, and whose score is also
            given without leaks; its data is audited if no other is named.
        labels: look for wrong labels with features of packaged weights where no run predicts; auto does if that takes
            ten minutes at most.
        split: which of the splits data.train_split and data.val_split.
        out: the page and the table to write, OUT.html and OUT.csv.
    """

    run: Path | None = None
    labels: Literal["auto", "true", "false"] = "auto"
    split: Splits = "both"
    out: Path = Path("audit")


@command("audit", AuditOptions, "data.root=/data/pets run=outputs/pets")
def audit(options: AuditOptions, overrides: list[str]) -> int:
    """Find copies, odd images and wrong labels before a model learns them.

    All images of all splits are looked at once; the same command continues after an interruption. What is found is
    written to a page of pictures and a table, with which data.exclude leaves images out; no data is changed.
    num_workers=N sets the number of threads.
    """
    trained, config = None, configs.compose([] if options.run else overrides)
    if options.run:
        from effloop.audit.labels import open_run

        trained = open_run(options.run, overrides)
        config = trained.config
        if trained.folds is None:
            trained.loader("val").close()  # other classes are refused before minutes of work, as is all below
    # What a run would refuse is a finding here.
    config = replace(config, data=replace(config.data, allow_missing_classes=True))
    splits = open_all(config, options.split)
    if options.labels == "true" and (kinds := {source.kind.value for source in splits.values()} - {"classes"}):
        raise ConfigError(
            f"labels: true compares classes with predictions, but the targets are {', '.join(kinds)}; drop it"
        )
    from effloop.audit import copies, labels, odd, page, scan
    from effloop.audit import splits as divisions
    from effloop.measure.turns import run_command

    html, table = new_files(options.out, ".html", ".csv")
    threads, index_dir = num_workers(config), config.data.index_dir
    records = scan.scan(splits, index_dir, threads)
    findings = copies.find(splits, records, threads)
    others = odd.find(splits, records, config.decode, threads) + divisions.find(splits)
    if options.split == "both" and not config.data.exclude:  # all copies, also those that are left out
        keep_copies(splits, index_dir, [each.places for each in findings])
    judged, scores, notes = None, dict[str, str](), list[str]()
    if trained:
        judged, scores = _judged(trained, splits, findings, score_alone=options.labels == "false")
    if options.labels != "false":
        limit = math.inf if options.labels == "true" else labels.LIMIT_S
        wrong, notes = labels.find(splits, records, config, judged, limit)
        others += wrong
    findings = sorted(findings + others, key=lambda each: ([*KINDS].index(each.kind), -each.value))
    found = page.Audit(config, splits, findings, scores, notes)
    _show(found, records)
    own = [word for word in read_overrides(options.run) if key_of(word) != "run"] if options.run else []
    other = [word for word in overrides if key_of(word) != "data.exclude"]  # the table has its rows
    act = run_command(own, [*other, f"data.exclude={table}"])
    page.write(found, html, table, act, threads)
    print(f"page: {html}   table: {table}")
    if found.excluded:
        marked = f"{len(found.excluded):,} image{'s' * (len(found.excluded) != 1)}"
        before = f", and what {config.data.exclude} leaves out" if config.data.exclude else ""
        print(printable(f"leave out the {marked} that the table marks{before}: {act}"))
    return 0


def _judged(
    trained: Trained, splits: Mapping[str, Source], copies: Sequence[Finding], *, score_alone: bool
) -> tuple[Judged | None, dict[str, str]]:
    """What a run predicts, None where only its score is wanted and no leak changes that; and what leaks mean for it."""
    from effloop.audit.labels import judge

    leaks = {place for each in copies if each.kind == "leak" for place in each.places if place.split == "val"}
    if not leaks:
        return None if score_alone else judge(trained, splits, leaks), {}
    judged, score = judge(trained, splits, leaks), trained.task.meters[0].name
    if len(leaks) == len(splits.get("val", ())):
        return judged, {"leak": f"{score} ({judged.score}) is of these alone"}
    return judged, {"leak": f"without them {score} is {judged.without} instead of {judged.score}"}


def _show(found: Audit, records: Mapping[str, NDArray[Any]]) -> None:
    """Print a line for each kind of finding."""
    looked = " and ".join(f"{len(rows):,} {name}" for name, rows in records.items())
    print(f"looked at {looked} images", *found.notes, sep="\n")
    lines = found.lines()
    wide = max((len(number) for number, _ in lines.values()), default=0)
    for kind, (number, line) in lines.items():
        print(f"{kind:<13}  {number:>{wide}}  {printable(line)}")
    print("nothing was found\n" * (not lines), end="")

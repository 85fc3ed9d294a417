"""When a run of a sweep is ended early."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from effloop.run.training import should_prune
from effloop.runs.reader import JOB
from effloop.task import LOSS

SKIPPED = -1.0


def write(folder: Path, losses: Sequence[float | None]) -> Path:
    folder.mkdir()
    (folder / JOB).write_text("{}")
    rows = [{"split": "val", "epoch": epoch, "loss": loss} for epoch, loss in enumerate(losses) if loss is not SKIPPED]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("mine", "others", "ends"),
    [
        ([0.4, 0.6], [[0.5, 0.5]] * 4, False),  # the best so far counts
        ([0.6, 0.6], [[0.5, 0.5]] * 4, True),
        ([0.6, 0.6], [[0.5, 0.5]] * 3, False),  # too few
        ([0.6, 0.6], [[0.5, 0.5]] * 3 + [[0.5]], False),  # one hasn't come so far
        ([None, None], [[0.5, 0.5]] * 4, True),  # null is NaN: it diverged
        ([0.6, 0.6], [[0.5, 0.5]] + [[None, None]] * 3, False),
        ([SKIPPED, 0.6], [[SKIPPED, 0.5]] * 4, True),
        ([SKIPPED, 0.6], [[0.5, 0.7]] * 4, True),
        ([SKIPPED, 0.6], [[0.5, SKIPPED, 0.5]] * 4, False),  # none has a score of this epoch
        ([0.6, SKIPPED], [[0.5, 0.5]] * 4, False),
    ],
)
def test_by_the_loss(mine, others, ends, tmp_path):
    for number, losses in enumerate(others):
        write(tmp_path / str(number), losses)
    assert should_prune(write(tmp_path / "mine", mine), LOSS, 2, 8) is ends

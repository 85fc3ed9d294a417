from pathlib import Path

import pytest

from effloop.runs.reader import RunRecord
from effloop.system.processes import describe_process

GONE = {**describe_process(), "started": ["another boot", "", 1]}


@pytest.mark.parametrize(
    ("job", "process", "state"),
    [
        ({"state": "failed"}, {"state": "failed"}, "failed"),
        ({"state": "failed"}, {"state": "running", **GONE}, "failed"),
        ({"state": "failed"}, {"state": "running", **describe_process()}, "running"),
        ({"state": "running", **GONE}, {"state": "done"}, "done"),
        ({"state": "running", **GONE}, {"state": "running", **GONE}, "killed"),
        ({"state": "running", **describe_process()}, {"state": "failed"}, "running"),
    ],
)
def test_a_job_that_is_continued_alone(job, process, state):
    assert RunRecord(Path(), job={"number": 0, **job}, process=process).state == state

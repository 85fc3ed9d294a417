from __future__ import annotations

from threading import Event

import pytest

from effloop.data.remote import store
from effloop.data.remote.store import ATTEMPTS, Attempts, FetchError, retried
from effloop.errors import DataError


@pytest.fixture
def attempts() -> Attempts:
    """Those at a file, with pauses that are over at once."""
    over = Event()
    over.set()
    return Attempts("https://host/a.tar", stopped=over)


def test_attempts_without_an_answer_are_counted(attempts):
    for _ in range(ATTEMPTS - 1):
        attempts.failed(FetchError("no answer"))
    with pytest.raises(DataError, match=r"a\.tar can't be fetched: no answer \(attempt 8 of 8"):
        attempts.failed(FetchError("no answer"))


def test_a_rate_limit_is_waited_for_by_time_not_by_attempts(attempts, monkeypatch):
    busy = FetchError("429 Too Many Requests", after_s=2)
    for _ in range(10 * ATTEMPTS):
        attempts.failed(busy)
    monkeypatch.setattr(store, "_MOST_PATIENT_S", 2.5)
    attempts._began -= 3
    with pytest.raises(DataError, match="429 Too Many Requests"):
        attempts.failed(busy)


def test_nothing_is_asked_again_when_others_have_failed_for_good():
    over, asked = Event(), []

    def ask():
        asked.append(over.set())
        raise FetchError("429 Too Many Requests", after_s=60)

    with pytest.raises(DataError, match=r"a\.tar can't be fetched: 429"):
        retried("https://host/a.tar", ask, stopped=over)
    assert len(asked) == 1

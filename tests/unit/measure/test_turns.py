import itertools
from collections.abc import Iterator

import pytest
from plans import line

from effloop.errors import ConfigError
from effloop.measure import loops
from effloop.measure.turns import in_turns, scratch_folder


def test_order_turns_about():
    seen: list[str] = []
    runs = {name: lambda name=name: len(seen.append(name) or seen) for name in "abc"}
    assert in_turns(runs, 2, warm_up=1) == {"a": [6, 7], "b": [5, 8], "c": [4, 9]}
    assert "".join(seen) == "abccbaabc"


def test_until_it_is_enough():
    numbers = iter(range(100))
    turns = in_turns({"a": lambda: next(numbers), "b": lambda: next(numbers)}, lambda found: sum(found["a"]) > 5)
    assert turns == {"a": [0, 3, 4], "b": [1, 2, 5]}


@pytest.mark.parametrize("each_s", [0.001, 0.1, 10.0])
def test_a_turn_takes_a_while_at_most(each_s, monkeypatch):
    """Batches come in pairs; of slow ones not only the second of a pair is counted."""
    now, taken = 0.0, 0
    monkeypatch.setattr(loops.time, "perf_counter", lambda: now)

    def stream() -> Iterator[range]:
        nonlocal now, taken
        for taken in itertools.count(1):
            now += 2 * each_s * (taken % 2)
            yield range(32)

    found = loops.turn_of(list, stream(), 0.2)
    assert now < max(4 * 0.2 + 0.1, 2 * each_s + 0.1)
    assert found.images_per_s == pytest.approx(32 / each_s, rel=0.2)


def test_scratch(tmp_path):
    """It is gone in the end; one that can't be made is a line."""
    with pytest.raises(ZeroDivisionError), scratch_folder(str(tmp_path / "work")) as folder:  # noqa: PT012
        assert folder.parent == tmp_path / "work"
        (folder / "file").touch()
        raise ZeroDivisionError
    assert list((tmp_path / "work").iterdir()) == []
    (tmp_path / "file").touch()
    wanted = f"work: {tmp_path}/file can't be written: File exists; set work=FOLDER"
    with pytest.raises(ConfigError, match=line(wanted)), scratch_folder(str(tmp_path / "file")):
        pass

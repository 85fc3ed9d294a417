import pickle
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tabled import Tabled

from effloop.data.source import DataConfig
from effloop.data.source.base import class_counts, fingerprint_of
from effloop.data.source.division import held_out, keep_copies, part_of
from effloop.errors import EffLoopError

COUNTS = [2, 3, 10, 101, 1000, 4321]


def config(**options: Any) -> DataConfig:
    return DataConfig(name="folder", root="x", **options)


def table(counts: list[int], **options: Any) -> Tabled:
    labels = np.repeat(np.arange(len(counts)), counts)
    return Tabled([f"{label}/{index}.jpg" for index, label in enumerate(labels)], labels, **options)


def names(source: Tabled, found: NDArray[np.bool_]) -> set[bytes]:
    return {source.raw_key(index) for index in np.flatnonzero(found).tolist()}


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_a_share_of_each_class(share):
    source = table(COUNTS)
    found = held_out(source, config(val=share))
    wanted = [min(max(int(np.floor(share * count + 0.5)), 1), count - 1) for count in COUNTS]
    assert np.bincount(source.labels[found]).tolist() == wanted


@pytest.mark.parametrize("folds", [2, 5])
def test_each_sample_validates_in_one_fold(folds):
    source = table([5, 6, 7, 8, 9] * 40)
    found = np.stack([held_out(source, config(folds=folds, fold=fold)) for fold in range(folds)])
    assert (found.sum(axis=0) == 1).all()
    for each in found:
        counts = np.bincount(source.labels[each])
        assert (counts >= class_counts(source) // folds).all()
        assert (counts <= -(-class_counts(source) // folds)).all()
    assert np.ptp(found.sum(axis=1)) < 0.06 * len(source)  # remainders of the classes are in all of them


def test_depends_on_names_and_seed_alone():
    source, order = table(COUNTS), np.random.default_rng(0).permutation(sum(COUNTS))
    shuffled = Tabled([source.key(index) for index in order.tolist()], source.labels[order])
    for options in ({"val": 0.2}, {"folds": 2, "fold": 1}):
        found = names(source, held_out(source, config(**options)))
        assert found == names(shuffled, held_out(shuffled, config(**options)))
        assert found != names(source, held_out(source, config(**options, split_seed=1)))


@pytest.mark.parametrize("options", [{"val": 0.2}, {"folds": 5, "fold": 2}])
@pytest.mark.parametrize("kind", ["classes", "flags"])
def test_few_change_sides_when_samples_are_added(options, kind):
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 10, 11_000) if kind == "classes" else (rng.random((11_000, 5)) < 0.3).astype(np.uint8)
    keys = [f"{rng.integers(1 << 40)}.jpg" for _ in range(11_000)]
    fewer, more = Tabled(keys[:10_000], targets[:10_000]), Tabled(keys, targets)
    moved = held_out(more, config(**options))[:10_000] != held_out(fewer, config(**options))
    assert moved.mean() < 0.01  # a new draw would move 32 %


def test_one_sample_added_moves_at_most_one():
    for count in range(5, 60):
        fewer, more = (
            Tabled([f"{i}" for i in range(count)], [0] * count),
            Tabled([f"{i}" for i in range(count + 1)], [0] * (count + 1)),
        )
        assert (held_out(more, config(val=0.3))[:-1] != held_out(fewer, config(val=0.3))).sum() <= 1


class Patients(Tabled):
    """A patient for each sample."""

    columns = ("patient", "fold")

    def __init__(self, patients: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        super().__init__([f"patient{patient}/{index}.jpg" for index, patient in enumerate(patients)], labels)
        self.patients = patients

    def column(self, name: str, start: int, stop: int) -> list[bytes]:
        numbers = self.patients if name == "patient" else self.patients % 4
        return [b"%d" % number for number in numbers[start:stop]]


class WithoutFold(Patients):
    """The column has nothing of one."""

    def column(self, name: str, start: int, stop: int) -> list[bytes]:
        return [text if number != 7 else b"" for number, text in enumerate(super().column(name, start, stop), start)]


@pytest.mark.parametrize("group", ["patient", r"patient(\d+)"])
@pytest.mark.parametrize("options", [{"val": 0.2}, *({"folds": 5, "fold": fold} for fold in range(5))])
def test_groups_are_unbroken(group, options):
    rng = np.random.default_rng(1)
    patients = rng.zipf(1.4, 5000) % 700
    source = Patients(patients, (patients % 3).astype(np.int64))
    found = held_out(source, config(group=group, **options))
    assert not set(patients[found]) & set(patients[~found])
    counts, largest = np.bincount(source.labels), max(np.bincount(patients))
    assert (abs(np.bincount(source.labels[found], minlength=3) - 0.2 * counts) <= largest).all()


def test_a_column_says_the_folds():
    source = Patients(np.arange(100), np.zeros(100, np.int64))
    assert (np.flatnonzero(held_out(source, config(fold=3))) % 4 == 3).all()


NINE = np.arange(9)


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        (table([9, 1]), {"val": 0.2}, "data.val: the class 'b' has 1 sample in table, so that a split would lack it"),
        (table([9, 3]), {"folds": 5, "fold": 0}, "would lack it: add samples, set data.folds=3, or"),
        (table([1]), {"val": 0.2, "allow_missing_classes": True}, "has one sample alone (0/0.jpg), which can't be"),
        (table([9]), {"fold": 0}, "data.fold: 0 of how many? table has no column 'fold'; set data.folds=5"),
        (Patients(NINE, 0 * NINE), {"fold": 4}, "table has 4 in its column 'fold', which has 0, 1, 2, 3"),
        (table([9]), {"val": 0.2, "group": "patient"}, "table has no column 'patient'; set a regular expression"),
        (table([9]), {"val": 0.2, "group": "(x)"}, "'(x)' finds nothing in 0/0.jpg, 0/1.jpg, 0/2.jpg and 6 more"),
        (WithoutFold(NINE, 0 * NINE), {"fold": 0}, "data.fold: table/patient7/7.jpg has nothing in the column"),
        (table([9, 9]), {"folds": 3, "fold": 0, "group": "^(.)"}, "3 groups or more are needed: set data.folds=2"),
        (table([9, 9]), {"val": 0.5, "group": "^(.)"}, "in too few groups in table, so that a split would lack it"),
    ],
)
def test_refused(source, options, says):
    with pytest.raises(EffLoopError) as refused:
        held_out(source, config(**options))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("targets", ["classes", "flags", "numbers"])
def test_parts(targets):
    rng, count = np.random.default_rng(0), 40
    values = {
        "classes": np.arange(count) % 3,
        "flags": (rng.random((count, 3)) < 0.4).astype(np.uint8),
        "numbers": rng.random((count, 2), np.float32),
    }
    source = Tabled([f"{index}.jpg" for index in range(count)], values[targets])
    train, val = (part_of(source, config(val=0.25), split) for split in ("train", "val"))
    assert (train.where, val.where) == ("75 % of table", "25 % of table")
    assert sorted([*train.ids, *val.ids]) == list(range(count))
    for part in (train, val, pickle.loads(pickle.dumps(val))):
        assert part.fingerprint() == fingerprint_of(part)
        assert part.fingerprint()["samples"] == len(part) == len(part.targets)
        assert part.raw_keys(np.arange(2, 5)).items() == [source.raw_key(int(index)) for index in part.ids[2:5]]
        assert (part.targets == values[targets][part.ids]).all()
        assert part.name(3) == source.name(int(part.ids[3]))
        part.will_need([])  # all of a batch are in the cache
    assert train.identity() != val.identity()


def test_a_division_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = table([20, 20])
    for options in (
        {"val": 0.2},
        {"val": 0.2},
        {"val": 0.2, "split_seed": 1},
        {"folds": 2, "fold": 0},
        {"folds": 2, "fold": 1},
    ):
        part_of(source, config(**options), "train")
    assert len([*tmp_path.rglob("division-*.index")]) == 4


def test_many_mixed_groups():
    """Two groups of each most frequent class: rounding each class's would give val much more, or nothing."""
    rng = np.random.default_rng(0)
    source = Patients(np.repeat(np.arange(400), 25), rng.integers(0, 200, 10_000))
    assert held_out(source, config(val=0.2, group="patient", allow_missing_classes=True)).mean() == pytest.approx(
        0.2, abs=0.03
    )


@pytest.mark.parametrize("share", [0.05, 0.2, 0.8])
def test_few_groups_of_a_class(share):
    patients = np.arange(3 * 40) // 4
    found = held_out(
        Patients(patients, patients // 3), config(val=share, group="patient")
    )  # three patients of each class
    counts = np.bincount(patients[found] // 3, minlength=10) // 4
    assert (counts > 0).all()
    assert (counts < 3).all()


def test_copies_stay_on_one_side(tmp_path):
    source, options = table([40, 40]), {"index_dir": str(tmp_path), "group": "copies", "val": 0.3}
    with pytest.raises(EffLoopError, match=r"haven't been looked for in table as it is now; run .*effloop audit"):
        held_out(source, config(**options))
    parts = {split: part_of(source, config(val=0.5, index_dir=str(tmp_path)), split) for split in ("train", "val")}
    wanted = [[3, 50, 7], [50, 60], [20, 21]]  # the first two have one in common
    side = {int(row): (split, place) for split, part in parts.items() for place, row in enumerate(part.ids)}
    keep_copies(parts, str(tmp_path), [[side[row] for row in group] for group in wanted])
    found = held_out(source, config(**options))
    assert len({*found[[3, 7, 50, 60]]}) == len({*found[[20, 21]]}) == 1
    order = np.random.default_rng(0).permutation(80)
    shuffled = Tabled([source.key(row) for row in order.tolist()], source.labels[order])
    place = {int(row): place for place, row in enumerate(order)}
    keep_copies({"all": shuffled}, str(tmp_path), [[("all", place[row]) for row in group] for group in wanted])
    assert (held_out(shuffled, config(**options)) == found[order]).all()
    before = part_of(source, config(**options), "val").ids.tolist()
    for _ in range(2):
        keep_copies({"all": source}, str(tmp_path), [[("all", row) for row in range(0, 80, 2)]])
    other = part_of(source, config(**options), "val")
    assert {row % 2 for row in other.ids} == {1} or {*range(0, 80, 2)} <= {*other.ids.tolist()}
    assert before != other.ids.tolist()
    named = Patients(np.arange(9), NINE * 0)  # a column of that name is taken
    named.columns = ("copies",)
    assert held_out(named, config(**options)).any()

"""Labels that predictions contradict."""

import numpy as np
import pytest
from numpy.typing import NDArray

from effloop.audit import labels
from effloop.audit.findings import Place
from effloop.audit.records import RECORD
from effloop.cli.convert import open_all


def _drawn(count: int, num_classes: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Probabilities that often name the label; the last class has no samples, and some are as probable as others."""
    rng = np.random.default_rng(seed)
    own = rng.integers(num_classes - 1, size=count)
    logits = rng.normal(size=(count, num_classes)).round(1)
    logits[np.arange(count), own] += rng.choice([0, 1, 3], count)
    return (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).astype(np.float32), own


@pytest.mark.parametrize("num_classes", [3, 12])
def test_as_cleanlab(num_classes):
    count = pytest.importorskip("cleanlab.count")
    for seed in range(20):
        probabilities, own = _drawn(300, num_classes, seed)
        wrong, _, joint = labels.contradicted(probabilities, own)
        assert len(wrong) == count.num_label_issues(own, probabilities)
        theirs = count.compute_confident_joint(own, probabilities, calibrate=False)
        np.testing.assert_array_equal(joint, theirs - np.diag(theirs.diagonal() - joint.diagonal()))
        np.testing.assert_array_equal(theirs.diagonal(), joint.diagonal().clip(1))


def test_by_hand():
    """Means of 0.7 and 0.45: the third is taken for the second class, the last for the first."""
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.2, 0.8], [0.9, 0.1]], np.float32)
    wrong, ratios, joint = labels.contradicted(probabilities, np.array([0, 0, 0, 1, 1]))
    assert wrong.tolist() == [4, 2]
    np.testing.assert_allclose(ratios, [9, 9, 3 / 7, 4, 1 / 9], rtol=1e-6)
    assert joint.tolist() == [[2, 1], [1, 1]]


def test_flipped_labels_come_first():
    """Of three clouds with a label in twenty flipped; samples without features say nothing."""
    rng = np.random.default_rng(0)
    own = np.arange(300) % 3
    features = (rng.normal(size=(300, 32)) + 4 * np.eye(3, 32)[own]).astype(np.float16)
    features[:4] = 0
    flipped = rng.choice(np.arange(4, 300), 15, replace=False)
    own[flipped] = (own[flipped] + 1) % 3
    found = labels._out_of_fold(features, own, 3, seed=0)
    used = np.flatnonzero(~np.isnan(found[:, 0]))
    assert used.tolist() == [*range(4, 300)]
    np.testing.assert_allclose(found[used].sum(axis=1), 1, rtol=1e-5)
    wrong, ratios, _ = labels.contradicted(found[used], own[used])
    assert {*used[wrong].tolist()} <= {*flipped.tolist()}
    assert len({*used[np.argsort(ratios)[:15]].tolist()} & {*flipped.tolist()}) >= 14


def test_a_run_predicts_what_it_was_not_trained_on(finished):
    """Its score is also that without some; labels that it contradicts come with what it predicts."""
    trained = labels.open_run(finished, ["device=cpu"])
    splits = open_all(trained.config, "both")
    judged = labels.judge(trained, splits, {Place("val", 0), Place("val", 5), Place("train", 3)})
    assert np.isnan(judged.probabilities[:40]).all()
    val, own = judged.probabilities[40:], splits["val"].labels
    hits, text = val.argmax(axis=1) == own, trained.task.meters[0].text
    assert (judged.score, judged.without) == (text(hits.mean()), text(np.delete(hits, [0, 5]).mean()))
    unread = {name: np.zeros(len(split), RECORD) for name, split in splits.items()}
    findings, (note,) = labels.find(splits, unread, trained.config, judged)
    assert note == f"{hits.sum()} of 13 labels are as predicted by {trained.describe()}"
    wrong = [finding for finding in findings if finding.kind == "label"]
    for finding in wrong:
        (split, sample), best = finding.places[0], val[finding.places[0].sample].max()
        assert (split, hits[sample]) == ("val", False)
        assert finding.text == f"predicted: {'abc'[val[sample].argmax()]} ({best:.2f})"
        assert finding.value == pytest.approx(1 - val[sample, own[sample]] / best, rel=1e-5)
    assert [finding.value for finding in wrong] == sorted((finding.value for finding in wrong), reverse=True)

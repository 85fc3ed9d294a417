"""What every registered task does."""

import json
import math

import pytest
import torch
from torch import Tensor

from effloop.task import LOSS, Task, is_spatial, meters_of, score_names, tasks

CPU = torch.device("cpu")
NUM_OUTPUTS = 7


def make(name: str, num_outputs: int = NUM_OUTPUTS) -> Task:
    return tasks.build(tasks[name].config(name=name)).for_outputs(num_outputs)


def random_outputs(task: Task, count: int, num_outputs: int = NUM_OUTPUTS) -> Tensor:
    return torch.randn(count, num_outputs, *(task.target.shape if task.spatial else ()))


def example(task: Task, count: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, targets and `valid` of a batch."""
    torch.manual_seed(0)
    targets = task.example_targets(count, NUM_OUTPUTS, CPU)
    return random_outputs(task, count), targets, torch.rand(count) < 0.7


@pytest.mark.parametrize("name", tasks.names())
class TestTask:
    def test_meters(self, name):
        """The loss is one of them, and none has another's name."""
        meters = meters_of(name)
        assert LOSS in meters
        assert len({meter.name for meter in meters}) == len({meter.label for meter in meters}) == len(meters)

    def test_targets_are_as_specified(self, name):
        task = make(name)
        targets = task.example_targets(5, NUM_OUTPUTS, CPU)
        assert targets.dtype == task.target.dtype
        assert targets.shape == (5, *task.target.shape)
        assert task.spatial == is_spatial(name) == (len(task.target.shape) > 1)

    def test_loss(self, name):
        task = make(name)
        outputs, targets, _ = example(task)
        loss = task.loss(outputs.requires_grad_(), targets)
        assert loss.shape == ()
        loss.backward()
        assert torch.isfinite(outputs.grad).all()

    def test_views_of_an_image_become_one_output(self, name):
        """Of the shape that `sums` takes; of two that agree it has the scores of each."""
        task = make(name)
        outputs, targets, valid = example(task)
        together = task.ensemble([outputs, outputs, outputs])
        assert together.shape == outputs.shape
        torch.testing.assert_close(task.sums(together, targets, valid), task.sums(outputs, targets, valid))
        torch.testing.assert_close(task.ensemble([outputs, outputs.flip(0)]), task.ensemble([outputs.flip(0), outputs]))

    def test_sums_add_up(self, name):
        """Over batches, and so over ranks and restarts; padding counts nowhere, whatever it holds."""
        task = make(name)
        outputs, targets, valid = example(task)
        outputs[~valid] = math.nan
        whole = task.sums(outputs, targets, valid)
        assert (whole.shape, whole.dtype) == ((task.num_sums,), torch.float64)
        columns = zip(*(column.split(8) for column in (outputs, targets, valid)), strict=True)
        parts = torch.stack([task.sums(*part) for part in columns])
        torch.testing.assert_close(parts.sum(dim=0), whole)
        torch.testing.assert_close(task.sums(outputs[valid], targets[valid], valid[valid]), whole)

    def test_scores(self, name):
        """In the order of files."""
        task = make(name)
        found, names = list(task.scores(task.sums(*example(task)).tolist())), score_names(meters_of(name))
        assert found == [each for each in names if each in found]
        assert task.collects or found == names
        assert all(math.isnan(value) for value in task.scores([0.0] * task.num_sums).values())

    def test_scores_of_all_outputs(self, name):
        """In whatever order; those that sums give, too, are the same, and of a network that has diverged NaN."""
        task = make(name)
        if not task.collects:
            pytest.skip("its scores are of sums")
        outputs, targets, valid = example(task)
        task.tune(outputs.numpy(), targets.numpy())
        found = task.scores_of(outputs.numpy(), targets.numpy())
        assert list(found) == score_names(meters_of(name))
        assert task.scores_of(outputs.flip(0).numpy(), targets.flip(0).numpy()) == pytest.approx(found, rel=1e-12)
        by_sums = task.scores(task.sums(outputs, targets, torch.ones_like(valid)).tolist())
        assert {key: found[key] for key in by_sums} == pytest.approx(by_sums, rel=1e-5)
        outputs[3, 2] = math.nan
        task.tune(outputs.numpy(), targets.numpy())
        assert all(map(math.isnan, task.scores_of(outputs.numpy(), targets.numpy()).values()))

    def test_its_state_is_what_it_is_used_with(self, name):
        task, again = make(name), make(name)
        outputs, targets, _ = example(task)
        task.tune(outputs.numpy(), targets.numpy())
        again.load_state_dict(json.loads(json.dumps(task.state_dict())))
        assert again.state_dict() == task.state_dict()
        classes = [f"c{number}" for number in range(NUM_OUTPUTS)]
        assert task.spatial or again.predictions(outputs, classes).keys() == task.predictions(outputs, classes).keys()
        assert again.agreement(outputs, outputs).all()
        if task.state_dict():
            with pytest.raises(ValueError, match="for 2"):
                make(name, 2).load_state_dict(task.state_dict())

    def test_details(self, name):
        """Of each sample alone, whatever batch it is in, without waiting for the device; all of it can be written."""
        task, names = make(name), [f"c{number}" for number in range(NUM_OUTPUTS)]
        outputs, targets, _ = example(task)
        facts = task.facts(outputs, targets)
        parts = [task.facts(*part) for part in zip(outputs.split(8), targets.split(8), strict=True)]
        torch.testing.assert_close(torch.cat(parts), facts)
        assert task.facts(outputs.to("meta"), targets.to("meta")).shape == facts.shape
        sums = [] if task.collects else task.sums(outputs, targets, torch.ones(40, dtype=torch.bool)).tolist()
        kept = targets[:, :0, 0] if task.spatial else targets
        found = task.details(facts.numpy(), kept.numpy(), names, sums)
        if found is None:
            pytest.skip("it has none")
        assert json.dumps([found.rows, found.worst])
        assert {tuple(row) for row in found.rows} == {tuple(found.rows[0])}
        assert {next(iter(row.values())) for row in found.rows} == {*names}
        assert all({"id", "target", "predicted"} <= {*row} for row in found.worst)
        assert len({row["id"] for row in found.worst}) == 32
        diverged = task.facts(torch.full_like(outputs, math.nan), targets)
        assert task.details(diverged.numpy(), kept.numpy(), names, sums) is not None

    @pytest.mark.parametrize("num_outputs", [1, NUM_OUTPUTS])
    def test_predictions_are_a_value_for_each_image(self, name, num_outputs):
        classes = [f"c{number}" for number in range(num_outputs)]
        task = make(name, num_outputs)
        if task.spatial:
            pytest.skip("masks are written instead")
        columns = task.predictions(random_outputs(task, 5, num_outputs), classes, 3, every=True)
        assert columns
        assert {len(values) for values in columns.values()} == {5}

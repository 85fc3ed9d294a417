"""A run done again: what differs is named, the numbers are compared; and what differs between runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import rows, train

from effloop.cli.main import main
from effloop.runs.reader import read_run


@pytest.fixture(scope="module")
def original(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one epoch, its data named by a relative path; not to be changed."""
    folder = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "photos").symlink_to(photos)
        assert train(Path("photos"), "run=run", "epochs=1") == 0
    return folder / "outputs/run"


@pytest.fixture
def run(original: Path, here: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(original, here / "run"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def again(out: str) -> Path:
    """The folder of a replay, from what it has printed."""
    return Path(next(line for line in out.splitlines() if line.startswith("run: ")).split()[1])


def test_equal_to_the_bit(original, here, capsys):
    assert main(["replay", str(original)]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"\nreplay of {original}: nothing differs\nmetrics.jsonl: bit-identical, 4 lines\n")
    run = again(out)
    assert run.is_relative_to("outputs")
    assert (run / "metrics.jsonl").read_bytes() == (original / "metrics.jsonl").read_bytes()
    changed = {"run": str(run.relative_to("outputs")), "threads": torch.get_num_threads()}
    assert read_run(run).config == {**read_run(original).config, **changed}
    typed = yaml.safe_load((original / "overrides.yaml").read_text())
    assert yaml.safe_load((run / "overrides.yaml").read_text()) == [word for word in typed if word != "run=run"]


def test_other_numbers_without_a_reason(run, capsys):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), "loss": 0.125})
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["replay", str(run)]) == 1
    *_, what, then, now = capsys.readouterr().out.splitlines()
    assert what == "metrics.jsonl: line 2 differs"
    assert '"loss": 0.125' in then
    assert json.loads(now.removeprefix("  now ")) == rows(run.parent / again_folder(run))[1]


@pytest.mark.parametrize("kept", [True, False])
def test_copied_data(kept, photos, here, capsys):
    """Its times are no difference, its bytes are; where nothing but the place differs, other numbers are an error."""
    data, copy = here / "data", here / "copy"
    shutil.copytree(photos, data)
    assert train(data, "run=run", "epochs=1") == 0
    shutil.copytree(data, copy, copy_function=shutil.copyfile)
    run = here / "outputs/run"
    if not kept:
        shutil.rmtree(data)
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace('"loss": ', '"loss": 1'))
    capsys.readouterr()
    assert main(["replay", str(run), f"data.root={copy}"]) == 1
    place = f"\nreplay of {run}: nothing differs\ndata at {data} then, at {copy} now: "
    how = "53 files have other times and the same bytes"
    how = how if kept else "names, labels and sizes are the same, bytes can't be compared any more"
    assert f"{place}{how}\nmetrics.jsonl: line 1 differs" in capsys.readouterr().out
    if kept:
        changed = copy / "train/a/000.jpg"
        changed.write_bytes(changed.read_bytes()[:-3] + b"\0\xff\xd9")
        assert main(["replay", str(run), f"data.root={copy}"]) == 0
        out = capsys.readouterr().out
        assert f"  data.root: {data} then, {copy} now\n" in out
        assert f": 1 of 53 files have other bytes: {changed}\n" in out


def again_folder(run: Path) -> Path:
    """The one run folder below `outputs/`."""
    (config,) = (run.parent / "outputs").rglob("config.yaml")
    return config.parent.relative_to(run.parent)


def test_a_run_that_did_not_finish(run, capsys):
    first, second = (run / "metrics.jsonl").read_text().splitlines()[:2]
    (run / "metrics.jsonl").write_text(f"{first}\n{second[:20]}")
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints")
    assert main(["replay", str(run), "run=x"]) == 0
    assert capsys.readouterr().out.endswith("metrics.jsonl: bit-identical, 1 lines; outputs/x has 3 more\n")


def test_what_differs_is_named(run, capsys):
    environment = json.loads((run / "environment.json").read_text())
    edit(run / "environment.json", packages={**environment["packages"], "torch": "2.14.0"}, python="3.12.0")
    (run / "resumed.json").write_text('[{"epoch": 1, "overrides": ["lr=0.5"], "differs": ["python: 1 then, 2 now"]}]')
    assert main(["replay", str(run), "seed=1", "task.label_smoothing=0"]) == 0  # it is known why
    out = capsys.readouterr().out
    _, _, after = out.partition(f"\nreplay of {run}, what differs:\n")
    assert after.splitlines()[:6] == [
        "  task.label_smoothing: 0.1 then, 0.0 now",
        "  seed: 0 then, 1 now",
        f"  {run} was resumed at epoch 1 with lr=0.5 in another environment: python: 1 then, 2 now",
        f"  python: 3.12.0 then, {environment['python']} now",
        f"  torch: 2.14.0 then, {environment['packages']['torch']} now",
        "metrics.jsonl: line 1 differs",
    ]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("environment.json", '{"packages": ', "run/environment.json can't be read: "),
        ("resumed.json", "[3]", "run/resumed.json can't be read: "),
        ("config.yaml", "device: ${oc.env:SECRET}\n", "run/config.yaml is not a config that EffLoop wrote"),
        ("config.yaml", None, "'run' is not a run folder"),
    ],
)
def test_damaged(run, file, content, words, capsys):
    (run / file).unlink(missing_ok=True)
    if content is not None:
        (run / file).write_text(content)
    refused(capsys, words, "replay", "run")


def refused(capsys: pytest.CaptureFixture[str], words: str, *args: str) -> None:
    capsys.readouterr()
    assert main(list(args)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert not Path("outputs").exists()


class TestDiff:
    def of(self, capsys: pytest.CaptureFixture[str], *paths: Path) -> list[str]:
        capsys.readouterr()
        assert main(["diff", *map(str, paths)]) == 0
        return [line.strip() for line in capsys.readouterr().out.splitlines()]

    def test_what_differs(self, original, run, capsys):
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump({**config, "amp": True, "optim": {"name": "sgd"}}))
        edit(run / "environment.json", python="3.12.0", command=["other"])
        edit(run / "data.json", classes=["a", "b"])
        (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().splitlines()[0] + "\n")
        title, *found, metrics = self.of(capsys, original, run)
        assert title == f"{run} beside {original}, what differs:"
        python = json.loads((original / "environment.json").read_text())["python"]
        wanted = {"amp: null then, true now", "optim.name: adamw then, sgd now", f"python: {python} then, 3.12.0 now"}
        assert {*wanted, "classes: [a,b,c] then, [a,b] now"} <= {*found}
        assert metrics == f"metrics.jsonl: bit-identical, 1 lines; {original} has 3 more"

    def test_jobs_of_a_sweep(self, original, run, here, capsys):
        (here / "sweep").mkdir()
        (here / "sweep/sweep.json").write_text("{}")
        for number in (0, 1):
            job = Path(shutil.copytree(run, here / f"sweep/{number}"))
            fields = {"number": number, "overrides": [f"seed={number}"], "state": "done", "reason": ""}
            (job / "job.json").write_text(json.dumps(fields))
        (here / "sweep/1/config.yaml").write_text((run / "config.yaml").read_text().replace("\nseed: 0", "\nseed: 1"))
        assert "seed: 0 then, 1 now" in self.of(capsys, here / "sweep")
        capsys.readouterr()
        assert main(["replay", "sweep/0", "run=alone"]) == 0
        assert not Path("outputs/alone/job.json").exists()

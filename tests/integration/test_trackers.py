"""MLflow and Weights & Biases beside the run folder, each read back by what it brings along."""

import importlib.util
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import rows, train

from effloop.cli.main import main
from effloop.record.trackers import import_mlflow, import_wandb

if not (importlib.util.find_spec("mlflow") and importlib.util.find_spec("wandb")):
    pytest.skip("needs effloop[mlflow] and effloop[wandb]", allow_module_level=True)


@pytest.fixture
def store(here: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a store in files."""
    uri = (here / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return import_mlflow().MlflowClient(uri)


def the_run(client: Any, project: str = "effloop") -> Any:
    experiment = client.get_experiment_by_name(project)
    (found,) = client.search_runs([experiment.experiment_id])
    return found


def check_against(client: Any, found: Any, run: Path) -> None:
    """Params, metrics, summary and tags are what the run folder says."""
    config, summary = yaml.safe_load((run / "config.yaml").read_text()), json.loads((run / "summary.json").read_text())
    assert found.data.params["optim.lr"] == str(config["optim"]["lr"])
    assert found.data.params["augment.ops.crop.scale"] == str(config["augment"]["ops"]["crop"]["scale"])
    assert len(found.data.params) > 60
    assert found.data.tags["effloop.run_dir"] == str(run.absolute())
    for split, names in {"train": ("loss", "top1", "lr"), "val": ("loss", "top1")}.items():
        for name in names:
            history = {m.step: m.value for m in client.get_metric_history(found.info.run_id, f"{split}/{name}")}
            assert history == {row["step"]: row[name] for row in rows(run) if row["split"] == split}
    assert found.data.metrics["best/top1"] == summary["best"]["top1"]
    assert found.data.metrics["time/evaluation"] == summary["time"]["evaluation"]
    assert "perf/images_per_s" in found.data.metrics


@pytest.mark.nightly
def test_mlflow(here, photos, finished, store, capfd):
    assert train(photos, "run=x", "record.mlflow=true", "record.project=pets", "epochs=1") == 0
    first = the_run(store, "pets")
    assert first.info.status == "FINISHED"
    assert first.info.run_name == "outputs/x"
    assert main(["resume", "outputs/x", "epochs=3", "schedule=constant"]) == 0
    found = the_run(store, "pets")  # still a single one
    assert found.info.run_id == first.info.run_id
    assert found.info.status == "FINISHED"
    check_against(store, found, here / "outputs/x")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "KILLED"), (ValueError, "FAILED")])
def test_mlflow_knows_how_a_run_ended(here, photos, store, error, status, monkeypatch):
    from effloop.train.trainer import Trainer

    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(Trainer, "evaluate", broken)
    assert train(photos, "run=x", "record.mlflow=true") == (130 if error is KeyboardInterrupt else 70)
    assert the_run(store).info.status == status
    assert the_run(store).data.metrics["train/lr"] > 0


def test_mlflow_whose_server_is_gone(here, photos, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")  # discard: nobody listens
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert train(photos, "run=gone", "record.mlflow=true") == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "effloop: warning: record: MLflow failed (MlflowException: API request to http://…@127.0.0.1:9/"
    )
    assert line.endswith("; the run continues without it")
    assert "secret" not in (here / "outputs/gone/log.txt").read_text()
    assert len(rows(here / "outputs/gone")) == 8


def logged(folder: Path) -> list[Any]:
    """The records of a .wandb file: LevelDB's log format, blocks of 32 KiB behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    import_wandb().teardown()  # waits for W&B's own process, which writes the file, to end
    (path,) = folder.glob("offline-run-*/run-*.wandb")
    data, at, parts, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """W&B without a server; it keeps what it found in the environment until it is told to forget."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    import_wandb().teardown()
    yield
    import_wandb().teardown()


@pytest.mark.usefixtures("offline")
@pytest.mark.slow
def test_wandb(here, photos, finished, capfd):
    assert train(photos, "run=x", "record.wandb=true", "record.project=pets", "epochs=3") == 0
    assert capfd.readouterr().err == ""
    run = here / "outputs/x"
    assert rows(run) == rows(finished)
    records = logged(run / "wandb")
    (begun,) = [each.run for each in records if each.WhichOneof("record_type") == "run"]
    assert (begun.project, begun.display_name) == ("pets", "outputs/x")
    assert json.loads((run / "loggers.json").read_text()) == {"wandb": begun.run_id}
    config = {each.key: json.loads(each.value_json) for each in begun.config.update}
    assert config["optim"]["lr"] == yaml.safe_load((run / "config.yaml").read_text())["optim"]["lr"]
    assert config["run_dir"] == str(run)
    history = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in each.history.item}
        for each in records
        if each.WhichOneof("record_type") == "history"
    ]
    for split, column in {"train": "train/loss", "val": "val/loss"}.items():
        wanted = {row["step"]: row["loss"] for row in rows(run) if row["split"] == split}
        assert {each["_step"]: each[column] for each in history if column in each} == wanted
    summary = {
        item.key or item.nested_key[0]: json.loads(item.value_json)
        for each in records
        if each.WhichOneof("record_type") == "summary"
        for item in each.summary.update
    }
    assert summary["best/top1"] == json.loads((run / "summary.json").read_text())["best"]["top1"]
    assert [each.exit.exit_code for each in records if each.WhichOneof("record_type") == "exit"] == [0]


def test_wandb_without_a_login(here, photos, monkeypatch, capfd):
    for name in [each for each in os.environ if each.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(here))  # where a login would be
    import_wandb().teardown()
    assert train(photos, "run=alone", "record.wandb=true") == 0
    assert capfd.readouterr().err == (
        "effloop: warning: record: Weights & Biases failed (there is no login: run `wandb login`, or set WANDB_API_KEY "
        "or WANDB_MODE=offline); the run continues without it\n"
    )
    assert len(rows(here / "outputs/alone")) == 8


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_not_installed(here, photos, name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    assert train(photos, "run=x", f"record.{name}=true") == 2
    line = f"effloop: record.{name}=true needs the package '{name}'; pip install 'effloop[{name}]'\n"
    assert capsys.readouterr() == ("", line)
    assert not (here / "outputs").exists()

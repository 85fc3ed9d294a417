"""Metadata of exported files."""

from __future__ import annotations

import json
from pathlib import Path

from effloop import config as configs
from effloop.inference.metadata import portable


def test_no_path_of_this_machine_but_the_data(tmp_path: Path) -> None:
    """Nor anything that other machines would do by it."""
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(b"")
    paths = {"data.root": "root", "data.index_dir": "index", "distill.teacher": "run", "out": "out", "resume": "other"}
    words = [f"{key}={tmp_path}/{name}" for key, name in paths.items()]
    config = configs.compose(
        ["data=folder", "model=cnn", "profile=torch", "probe=0", f"model.weights={weights}", *words]
    )
    plain = portable(config)
    assert plain["data"].pop("root") == f"{tmp_path}/root"
    assert str(tmp_path) not in json.dumps(plain)
    assert (plain["profile"], plain["probe"]) == ({"name": "none"}, 0)

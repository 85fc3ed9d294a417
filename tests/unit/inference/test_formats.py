"""Reading a `.pt2` runs nothing that is in it; damaged files of OpenVINO."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from effloop.errors import CheckpointError, EffLoopError
from effloop.inference.formats import OpenVino, Pt2, one_line_errors

CPU = torch.device("cpu")
Parts = dict[str, bytes]
MODEL, INPUTS = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS = "data/weights/model_weights_config.json"


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def pickled(marker: Path) -> bytes:
    torch.save((Evil(marker),), buffer := io.BytesIO())
    return buffer.getvalue()


def changed(kind: str, parts: Parts, marker: Path) -> None:
    """Code in a file, in one of its parts."""
    touch, text = f"__import__('pathlib').Path({str(marker)!r}).touch()", parts[MODEL].decode()
    size = text[(start := text.index("Symbol('")) : text.index(")", start) + 1]
    config = json.loads(parts[WEIGHTS])
    next(iter(config["config"].values()))["use_pickle"] = True
    parts |= {
        "sample_inputs": {INPUTS: pickled(marker)},
        "pickled_weight": {WEIGHTS: json.dumps(config).encode(), "data/weights/weight_0": pickled(marker)},
        "old_weights": {"data/weights/model.pt": pickled(marker)},
        "library": {"data/aotinductor/model/x.so": b""},
        "size": {MODEL: text.replace(size, touch).encode()},
        "guard": {MODEL: json.dumps(json.loads(text) | {"guards_code": [f"{touch} or True"]}).encode()},
        "name": {MODEL: text.replace('"input"', json.dumps(f"x=open({str(marker)!r}, 'w')")).encode()},
        "operation": {MODEL: text.replace("torch.ops.aten.linear.default", "torch.serialization.os.system").encode()},
        "tree": {MODEL: text.replace("builtins.tuple", "collections.defaultdict").encode()},
    }[kind]


ATTACKS = ["sample_inputs", "pickled_weight", "old_weights", "library", "size", "guard", "name", "operation", "tree"]


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval().requires_grad_(False)
    Pt2().save(Pt2().convert(model, torch.zeros(2, 3, 2, 2)), tmp_path / "model.pt2", "{}")
    with zipfile.ZipFile(tmp_path / "model.pt2") as file:
        return {each.partition("/")[2]: file.read(each) for each in file.namelist()}


def write(parts: Parts, path: Path, root: str = "model/") -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for each, content in parts.items():
            file.writestr(root + each, content)
    return path


def test_unchanged_parts_are_read(parts, tmp_path):
    path = write(parts, tmp_path / "same.pt2")
    assert Pt2().open(path, CPU, nn.Identity)(torch.zeros(3, 3, 2, 2)).shape == (3, 2)
    assert Pt2().read_metadata(path) == "{}"


@pytest.mark.parametrize("kind", ATTACKS)
def test_code_is_refused(kind, parts, tmp_path):
    marker = tmp_path / "marker"
    before = dict(parts)
    changed(kind, parts, marker)
    assert parts != before
    path = write(parts, tmp_path / "evil.pt2")
    with pytest.raises(CheckpointError, match="reading may run code"):
        Pt2().open(path, CPU, nn.Identity)
    Pt2().read_metadata(path)
    assert not marker.exists()


def test_old_layout_is_refused(tmp_path):
    """Which torch.export.load reads by pickle if it fails otherwise."""
    marker, names = tmp_path / "marker", ("state_dict", "constants", "example_inputs")
    old = {f"serialized_{each}.pt": pickled(marker) for each in names}
    path = write(old | {"version": b"8.20", "serialized_exported_program.json": b"{}"}, tmp_path / "old.pt2", "")
    with pytest.raises(Exception, match=r"archive_format|archive"):
        Pt2().open(path, CPU, nn.Identity)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_text(path.read_text()[:1000]), r"can't be read: RuntimeError: (?!Exception from)"),
        (lambda path: path.with_suffix(".bin").unlink(), r"its weights, model.bin, are not there; copy both"),
        (lambda path: path.with_suffix(".bin").write_bytes(b"short"), "Incorrect weights in bin file"),
    ],
)
@pytest.mark.nightly
def test_damaged(damage, message, tmp_path, capfd):
    """A line that says what is wrong, and none by C++."""
    path = tmp_path / "model.xml"
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval().requires_grad_(False)
    OpenVino().save(OpenVino().convert(model, torch.zeros(2, 3, 2, 2)), path, "{}")
    assert OpenVino().read_metadata(path) == "{}"
    damage(path)
    capfd.readouterr()
    with pytest.raises(EffLoopError, match=message) as raised, one_line_errors(f"{path} can't be read"):
        OpenVino().read_metadata(path)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")

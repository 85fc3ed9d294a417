"""`effloop export`, and `eval` of what it writes."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import encode, exif, photo
from runs import make_photos, train

import effloop
from effloop.cli.main import main
from effloop.inference.formats import Pt2, formats
from effloop.inference.trained import Trained

DEEP = np.arange(40 * 30, dtype=np.uint16).reshape(40, 30) * 50
DOC = Path(__file__).parents[2] / "docs" / "export.md"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photos(tmp_path_factory.mktemp("photos"), train=60, val=45)


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose predictions are sure enough for int8."""
    out = tmp_path_factory.mktemp("run")
    assert train(photos, f"out={out}", "run=run", "epochs=6", "augment.eval_ratio=0.8") == 0
    return out / "run"


def metadata(path: Path) -> dict[str, Any]:
    form = next(kind for kind in formats.values() if kind.suffix == path.suffix)
    return json.loads(form().read_metadata(path) or "")


def scores(run: Path, *overrides: str) -> dict[str, float]:
    trained = Trained.open(run, overrides)
    return trained.evaluate(trained.loader())[0]


@pytest.mark.parametrize(
    ("to", "option"),
    [("state_dict", "half=true"), ("pt2", "batch=7"), ("onnx", "int8=true"), ("openvino", "batch=dynamic")],
)
@pytest.mark.slow
def test_export_and_eval(to, option, run, tmp_path, capsys):
    """The file's scores are the checkpoint's, by its metadata, by `eval`, and with other overrides."""
    path = tmp_path / f"model{formats[to].suffix}"
    assert main(["export", str(run), f"to={to}", f"out={path}", option]) == 0
    captured = capsys.readouterr()
    assert not captured.err
    assert {*tmp_path.iterdir()} == {*formats[to].files(path)}
    found, expected = metadata(path), scores(run)
    assert found["measured"]["before"] == pytest.approx(expected)
    assert found["measured"]["images"] == 45
    assert found["classes"] == ["a", "b", "c"]
    assert found["output"]["shape"] == [7 if option == "batch=7" else "batch", 3]
    assert found["provenance"]["run"] == "run"
    assert found["provenance"]["data"]["val"]["samples"] == 45
    if option == "int8=true":
        assert b"DequantizeLinear" in path.read_bytes()
        assert found["int8"]["images"] == 60, "all there are, of the 256 asked for"
    else:
        assert found["measured"]["agreement"] == 1
        assert found["measured"]["difference"] < (0.01 if option == "half=true" else 1e-5)
    assert scores(path)["loss"] == pytest.approx(expected["loss"], abs=0.02)
    assert scores(path, "batch_size=5", "engine=inline")["top1"] == found["measured"]["after"]["top1"]
    assert main(["eval", str(path), "split=train"]) == 0
    assert "60" in capsys.readouterr().out


@pytest.mark.slow
def test_preprocessing_by_the_metadata_alone(run, photos, tmp_path, monkeypatch, capsys):
    """The program in docs/export.md makes the loader's images of the files, and predicts what the model predicts."""
    path = tmp_path / "model.onnx"
    assert main(["export", str(run), "to=onnx", f"out={path}"]) == 0
    capsys.readouterr()
    files = [str(file) for file in sorted((photos / "val").glob("*/*.jpg"))]
    for name, data in (("turned.jpg", encode(photo(), "JPEG", exif=exif(6))), ("deep.png", encode(DEEP, "PNG"))):
        (tmp_path / name).write_bytes(data)
        files.append(str(tmp_path / name))
    (program,) = re.findall(r"^# classify.py\n.*?(?=^```)", DOC.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(sys, "argv", ["classify.py", str(path), *files])
    exec(compile(program, "classify.py", "exec"), found := {})
    model = effloop.load(run)
    images = model.preprocess(files)
    made = torch.from_numpy(np.stack([found["prepare"](file) for file in files]))
    levels = (images - made).abs().mean(dim=(1, 2, 3)) * 255 * 0.226  # the mean of data.std
    assert levels.max() < 0.6
    with torch.inference_mode():
        best = model(images).argmax(dim=1).tolist()
    expected = [f"{file} {'abc'[label]}" for file, label in zip(files, best, strict=True)]
    assert capsys.readouterr().out.splitlines() == expected


class Sabotaged(Pt2):
    """Changes a weight after tracing."""

    suffix = ".sabotaged"

    def save(self, program: Any, path: Path, metadata: str) -> None:
        state = program.state_dict
        name = next(name for name in reversed(state) if name.endswith("weight") and state[name].ndim == 2)
        state[name].data.mul_(-1)
        super().save(program, path, metadata)


@pytest.mark.nightly
def test_other_outputs_are_refused(run, tmp_path, monkeypatch, capsys):
    """No file is left, and one from before stays as it is."""
    monkeypatch.setitem(formats, "sabotaged", Sabotaged)
    path = tmp_path / "model.sabotaged"
    for _ in range(2):
        assert main(["export", str(run), "to=sabotaged", f"out={path}"]) == 1
        captured = capsys.readouterr()
        assert "predicts the same for" in captured.err
        assert captured.err.count("\n") == 1
        assert "file:" not in captured.out
        assert [each.read_text() for each in tmp_path.iterdir()] == ["before"] * path.exists()
        path.write_text("before")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["to=pt2", "int8=true"], "set to=onnx or openvino"),
        (["to=onnx", "int8=true", "half=true"], "half: contradicts int8"),
        (["to=state_dict", "batch=4"], "leave batch out"),
        (["to=onnx", "out=model.pt2"], "set out=FILE.onnx"),
        (["to=onnx", "out=nowhere/model.onnx"], "out: nowhere/model.onnx"),
        (["to=onnx", "data.mean=null", "data.std=null"], "data.mean"),
    ],
)
def test_refused(words, message, run, here, capsys):
    assert main(["export", str(run), *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(here.iterdir())


def test_files_that_are_no_exports(run, tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    assert main(["export", str(run), "to=state_dict", f"out={path}"]) == 0
    assert main(["export", str(path), "to=onnx"]) == 2
    assert main(["eval", str(path), "image_size=32"]) == 2
    assert main(["eval", str(path), "model.width=8"]) == 2
    assert main(["eval", str(tmp_path / "other.onnx")]) == 2
    for kind in formats.values():
        damaged = tmp_path / f"damaged{kind.suffix}"
        damaged.write_bytes(path.read_bytes()[:1000])
        assert main(["eval", str(damaged)]) == 2
    lines = capsys.readouterr().err.splitlines()
    for line, part in zip(
        lines, ["already", "image_size: 32", "model: the", "not there", *["can't be read"] * 4], strict=True
    ):
        assert line.startswith("effloop: ")
        assert part in line
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, path)
    assert main(["eval", str(path)]) == 2
    assert "no metadata of EffLoop's" in capsys.readouterr().err

"""`bench what=inference`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from effloop.cli.main import main
from effloop.errors import ConfigError
from effloop.measure.bench_inference import side_names, threads_restored


@pytest.mark.slow
def test_figures(finished: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["formats=pytorch,onnx,cuda", "cores=1", "batch=20", "repeats=2", "out=result.json"]
    with threads_restored():
        torch.set_num_threads(2)
        assert main(["bench", "what=inference", str(finished), *words]) == 0
        assert torch.get_num_threads() == 2
    result = json.loads((here / "result.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert (result["model"], result["batch"], result["score"]) == ("cnn", 20, "top1")
    measured = [row for row in result["rows"] if not row["unavailable"]]
    there = [] if not torch.cuda.is_available() else [("cuda", 1)]
    expected = [("pytorch", 1), ("onnx", 1), *there]
    assert [(row["format"], row["threads"]) for row in measured] == expected
    for row in measured:
        assert len(row["ms"]) >= 20
        assert len(row["images_per_s"]) == 2
        assert 0 < row["ms_p50"] <= row["ms_p95"]
        assert row["score"] == measured[0]["score"]
        assert row["agreement"] == 1
        assert row["megabytes"] > 0
    with (here / "result.csv").open() as file:
        assert [(row["format"], int(row["threads"])) for row in csv.DictReader(file)] == expected
    assert (here / "result.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in here.iterdir()} == {"result.json", "result.csv", "result.png"}
    out = capsys.readouterr().out
    assert torch.cuda.is_available() or "cuda: no GPU here" in out


def test_names() -> None:
    assert side_names("onnx_int8,pytorch,onnx_int8") == ["onnx_int8", "pytorch"]
    assert {"pytorch", "pt2", "onnx", "onnx_int8", "openvino_int8", "tensorrt"} <= {*side_names("all")}
    assert not {"compiled", "onnx_half"} & {*side_names("all")}
    with pytest.raises(ConfigError, match="did you mean 'onnx_int8'"):
        side_names("onnx_int")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["what=inference"], "needs the run"),
        (["what=inference", "RUN", "cores=0"], "cores: '0'"),
        (["what=inference", "RUN", "batch=many"], "batch: 'many'"),
        (["what=loop", "RUN"], "run: what=loop doesn't take it; set what to one of inference"),
        (["what=loop", "threads=1", "batch=2"], "batch: what=loop doesn't take it"),
    ],
)
def test_refused(
    words: list[str], message: str, finished: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *(str(finished) if word == "RUN" else word for word in words)]) == 2
    assert message in capsys.readouterr().err

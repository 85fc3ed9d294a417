"""`diagnose` finds what holds a run back; the faults are those of `planted`."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import encode, photo
from runs import call

from effloop.cli.main import main

LIGHT = ("image_size=32", "model.width=4", "batch_size=16", "threads=1", "epochs=10", "num_workers=2")
PLUGIN = f"plugins=[{Path(__file__).parents[1] / 'planted.py'}]"


def make(root: Path, train: int, val: int, side: int, kind: str = "JPEG") -> Path:
    """Class folders of photographs; PNGs have grain, so that they are long."""
    grain = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            pixels = photo(side, side * 4 // 3, seed=number)
            if kind == "PNG":
                pixels = (pixels // 8 * 8 + grain.integers(0, 8, pixels.shape, dtype=np.uint8)).astype(np.uint8)
            path = root / split / "ab"[number % 2] / f"{number:04}.{kind.lower()}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(pixels, kind))
    return root


def diagnosed(tmp_path: Path, *words: str, seconds: int = 1) -> dict[str, Any]:
    """The result, and what was `said`; in a process of its own, as the plugin stays in the registries."""
    out = tmp_path / "diagnosis"
    code, said, err = call("diagnose", PLUGIN, f"seconds={seconds}", f"out={out}", *words, cwd=tmp_path)
    assert code == 0, err
    found: dict[str, Any] = json.loads((out / "diagnosis.json").read_text())
    return found | {"said": said}


@contextmanager
def measured(found: dict[str, Any]) -> Iterator[None]:
    """What figures say fails a test only where no other program used the cores meanwhile."""
    try:
        yield
    except AssertionError:
        if busy := [each for each in found["findings"] if "other programs used them" in each]:
            pytest.skip(busy[0])
        raise


@pytest.mark.nightly
def test_slow_storage(tmp_path):
    """Found, with overrides that help, and all of it told."""
    root = make(tmp_path / "photos", 64, 16, 60)
    found = diagnosed(tmp_path, "data=far", f"data.root={root}", *LIGHT)
    assert found["verdict"]["bound"] == "storage"
    best = found["overrides"][0]
    assert best["override"] == "data.cache=bytes" or re.fullmatch(r"num_workers=\d+", best["override"])
    assert best["exact"]
    assert best["images_per_s"] > 1.5 * found["images_per_s"]
    assert best["gain"] == best["images_per_s"] / best["before"]
    assert best["commands"][0].startswith(f"effloop data=far data.root={root}")
    assert [each["name"] for each in found["stages"]] == [
        *("storage", "decode", "augment", "batch", "loader", "transfer", "step", "log", "loop")
    ]
    assert found["memory"]["total"]["host"] > 0
    assert not (tmp_path / "outputs").exists()  # nothing of the trial is left
    said = found["said"]
    assert "storage-bound" in said
    assert "activations" in said
    assert f"diagnosis: {tmp_path}/diagnosis/diagnosis.html" in said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["probe=2"], "probe: a probe trains one layer on features in memory; set probe=0"),
        (["seconds=0"], "seconds: '0' is not allowed; set a whole number from 1 to 3,600"),
        (["lr=1,2"], "lr=1,2: several values are a sweep"),
    ],
)
def test_refusals(words, line, capsys):
    assert main(["diagnose", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"effloop: {line}")
    assert err.count("\n") == 1


FAULTS = {
    "storage": (["data=far"], (256, 32, 60), r"num_workers=\d+|data\.cache=bytes"),
    "decode": ([], (48, 4, 1000, "PNG"), r"data\.cache=pixels|convert .*"),
    "augment": (["+augment.ops.spin={op:Spin}"], (256, 32, 60), r"augment\.ops\.spin=null"),
    "compute": (["model=heavy", "image_size=64"], (256, 32, 60), r"precision=bf16|progressive=.*"),
    "logging": (["record=sluggish", "record.log_every=1"], (256, 32, 60), r"record\.log_every=10"),
    "evaluation": ([], (128, 512, 120), r"eval_every=\d+"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("bound", FAULTS)
def test_planted_faults(bound, tmp_path):
    words, shape, advice = FAULTS[bound]
    light = [word for word in LIGHT if "heavy" not in str(words) or "width" not in word]
    found = diagnosed(tmp_path, f"data.root={make(tmp_path / 'photos', *shape)}", *light, *words, seconds=10)
    with measured(found):
        assert found["verdict"]["bound"] == bound
        assert re.fullmatch(advice, found["overrides"][0]["override"])


@pytest.mark.nightly
def test_too_few_workers(tmp_path):
    root = make(tmp_path / "photos", 256, 32, 480)
    light = [word for word in LIGHT if word != "num_workers=2"]
    found = diagnosed(tmp_path, f"data.root={root}", *light, "num_workers=1", seconds=10)
    with measured(found):
        assert "images are loaded by 1 worker" in found["verdict"]["line"]
        better = [each["override"] for each in found["overrides"]]
        assert any(re.fullmatch(r"num_workers=\d+", override) for override in better)


@pytest.mark.slow
def test_a_line_that_reads_a_tensor(tmp_path):
    root = make(tmp_path / "photos", 64, 16, 60)
    light = [word for word in LIGHT if word != "num_workers=2"]
    found = diagnosed(tmp_path, f"data.root={root}", *light, "task=reading", "engine=inline")
    assert found["run"]["num_workers"] == 0
    (finding,) = [each for each in found["findings"] if "planted.py" in each]
    assert "(loss) waits for the device once in each update, by item()" in finding


@pytest.mark.nightly
def test_what_waits_wants_more_workers(tmp_path):
    """Not another recipe, nor a cache alone."""
    root = make(tmp_path / "photos", 256, 16, 60)
    found = diagnosed(tmp_path, f"data.root={root}", *LIGHT, "+augment.ops.doze={op:Doze}", "verify=true", seconds=5)
    assert found["verdict"]["bound"] == "augment"
    assert all(each["override"].startswith("num_workers=") for each in found["overrides"])
    assert found["overrides"][0]["gain"] > 1.5

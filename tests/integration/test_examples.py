"""The programs of docs/examples/, run as a reader would, on tiny data."""

import csv
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from runs import TINY

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PAGE = (EXAMPLES.parent / "examples.md").read_text("utf-8")


@pytest.fixture
def serve(here: Path) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "serve.py"))


def test_serve_trains_once_and_answers_requests(serve, photos, here):
    import uvicorn

    overrides = [f"data.root={photos}", *TINY, "epochs=1", "record.tensorboard=false"]
    model = serve["trained"](overrides)
    scores = here / "outputs" / "served" / "summary.json"
    written = scores.stat().st_mtime_ns
    serve["trained"](["data.root=/there/is/none"])  # is there, and not trained again
    assert scores.stat().st_mtime_ns == written

    server = uvicorn.Server(uvicorn.Config(serve["application"](model), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        url, image = f"http://127.0.0.1:{port}/predict", next(photos.glob("val/b/*.jpg"))
        with urlopen(url, data=image.read_bytes()) as response:
            assert json.load(response) == model.predict([image], top=3)[0]
        with pytest.raises(HTTPError, match="422") as refused:
            urlopen(url, data=b"no image")
        assert "not an image" in refused.value.read().decode()
        refused.value.close()
    finally:
        server.should_exit = True
        thread.join()


def test_loop_trains(photos, monkeypatch, capsys):
    words = ["loop.py", f"data.root={photos}", "image_size=32", "batch_size=8", "epochs=2", "num_workers=0"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(EXAMPLES / "loop.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["epoch", "0:"], ["epoch", "1:"]]
    assert all(" of 13 right" in line for line in lines)  # each image of the validation once


@pytest.mark.slow
def test_kaggle_from_a_table_to_a_submission(photos, here):
    python = Path(sys.executable).parent
    variables = {**os.environ, "PATH": f"{python}:{os.environ['PATH']}"}
    run: Callable[..., Any] = lambda *words: subprocess.run(words, check=True, env=variables)  # noqa: E731
    run("python", EXAMPLES / "competition.py", photos, "kaggle")
    run("sh", EXAMPLES / "kaggle.sh", "kaggle", "image_size=32", "epochs=1")
    texts = (Path(name).read_text("utf-8") for name in ("kaggle/sample_submission.csv", "submission.csv"))
    sample, found = (list(csv.reader(text.splitlines())) for text in texts)
    assert [row[0] for row in found] == [row[0] for row in sample]
    assert found[0] == sample[0]
    assert {row[1] for row in found[1:]} <= set("abc")


def test_the_page_shows_each_and_they_are_short():
    for file in EXAMPLES.iterdir():
        assert len(file.read_text("utf-8").splitlines()) <= 60, file
        assert f"examples/{file.name}" in PAGE

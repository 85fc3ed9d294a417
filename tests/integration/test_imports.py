"""What a run imports: the core, and the parts that it has chosen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from runs import TINY

import effloop

_RUN = """
import json, sys
from effloop.cli.main import main
from effloop.run import training
training._LEAST_TRAINED_S = float("inf")  # a long run is reviewed at its end, by a tool
code = main(sys.argv[1:])
print("\\n" + json.dumps([code, sorted(name for name in sys.modules if name.partition(".")[0] == "effloop")]))
"""
_NOT_CHOSEN = (
    "effloop.convert",
    "effloop.data.augment.albumentations",
    "effloop.data.augment.torchvision",
    "effloop.data.cache.cached",
    "effloop.data.engine.dali",
    "effloop.data.engine.processes",
    "effloop.data.remote.fetch",
    "effloop.data.remote.cache",
    "effloop.data.source.division",
    "effloop.data.source.formats",
    "effloop.data.source.table_source",
    "effloop.data.source.masks",
    "effloop.data.source.storage.indexed",
    "effloop.inference",
    "effloop.measure.diagnose",
    "effloop.measure.tune",
    "effloop.model.zoo",
    "effloop.parallel.ddp",
    "effloop.profile.tools",
    "effloop.record.trackers",
    "effloop.report",
    "effloop.run.ranks",
    "effloop.run.sweep",
    "effloop.task.segmentation",
)
_MOST = 200


def test_a_default_run_imports_the_core_and_what_it_has_chosen(photos: Path, tmp_path: Path) -> None:
    root = shutil.copytree(photos, tmp_path / "photos")
    (root / "LICENSE").touch()  # beside the splits, and no format's
    command = [sys.executable, "-c", _RUN, f"data.root={root}", *TINY, "record.tensorboard=false"]
    env = {**os.environ, "PYTHONPATH": str(Path(effloop.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True)
    code, imported = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    assert [name for name in imported if name.startswith(_NOT_CHOSEN)] == []
    assert len(imported) <= _MOST

"""What a run imports: the core, and the parts that it has chosen."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from runs import TINY

import effloop
from effloop.cli.main import MODULES

TESTS = Path(__file__).parents[1]
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


def test_a_default_run_imports_the_core_and_what_it_has_chosen(photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "photos")
    (root / "LICENSE").touch()  # beside the splits, and no format's
    command = [sys.executable, "-c", _RUN, f"data.root={root}", *TINY, "record.tensorboard=false"]
    env = {**os.environ, "PYTHONPATH": str(Path(effloop.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True)
    code, imported = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    assert [name for name in imported if name.startswith(_NOT_CHOSEN)] == []
    assert len(imported) <= _MOST


_WITHOUT_TORCH = """
import contextlib, io, json, sys
from composing import compose_once
from effloop.cli.main import main
compose_once()
for words, wanted in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        main(words.split())
    assert wanted in out.getvalue(), (words, out.getvalue()[-200:])
    assert not {"torch", "torchvision", "timm"} & {*sys.modules}, words
"""


def test_what_needs_no_torch_does_not_import_it(photos, tmp_path):
    commands = {
        "--help": "EffLoop trains image models",
        **{f"{name} --help": f"effloop {name}" for name in MODULES},
        **{f"list {what}": what for what in ("data", "augment", "optim.lr", "experiment")},
        "list": "nuclei",
        "list keys": "optim.lr",
        "list model": "resnext101_32x8d",  # torchvision's, by its files
        "list nosuch": "neither a group nor a key",
        "optim.lr=abc": "optim.lr: 'abc' is not allowed; set a number",
        "data=nosuch": "no choice 'nosuch'",
        "optm.lr=1": "did you mean 'optim'?",
        "--batch-size=4": "write batch_size=4",
        "data.root=/nosuch": "'/nosuch' is not there",
        "show data.root=/nosuch": "'/nosuch' is not there",
        "verify data.root=/nosuch": "'/nosuch' is not there",
        "tune data.root=/nosuch": "'/nosuch' is not there",
        "parallel=ddp data.root=/nosuch": "'/nosuch' is not there",
        "launch to=slurm data.root=/nosuch file=/nosuch/file": "file: /nosuch/file can't be written",
        "launch to=skypilot lr=abc image=i storage=s gpus=0": "lr: 'abc' is not allowed",
        "resume nosuch": "'nosuch' is not a run folder",
        "report nosuch": "'nosuch' is not there",
        "export outputs/x to=onx": "to: 'onx'",
        "model=resnet19": "did you mean 'resnet18'?",
        f"data.root={photos} model=torchvision model.arch=resnet19": "did you mean 'resnet18'?",
        f"data.root={photos} model=timm model.arch=resnet19": "did you mean 'resnet18'?",
        "model.arch=resnet19": "model=smp, model=timm or model=torchvision has it",
        f"data.root={photos} task=multilabel --cfg job": "multilabel",
    }
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (Path(effloop.__file__).parents[1], TESTS)))}
    command = [sys.executable, "-c", _WITHOUT_TORCH, json.dumps([*commands.items()])]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

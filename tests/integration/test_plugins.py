"""Parts of a third-party package, installed by nothing but being on the path."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from kills_train import equal
from runs import TINY, call, rows

import effloop

PAGE = Path(__file__).parents[2] / "docs/own-source.md"
SOURCE = re.search(r"^```python\n(# mypackage/stripes.py\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL).group(
    1
)  # type: ignore[union-attr]
"""The page's own example."""

DECODER = '''
"""A decoder that turns colours around."""
from dataclasses import dataclass
from effloop.data.decode import DecodeConfig, decoders
from effloop.data.decode.common import PillowDecoder

@dataclass
class NegativeConfig(DecodeConfig):
    white: int = 255

@decoders.register("negative", NegativeConfig)
class Negative(PillowDecoder):
    """Pillow's pixels, dark for light."""
    def decode_with_info(self, data, info, box=None, at_least=None):
        return self.config.white - super().decode_with_info(data, info, box, at_least)
'''


def install(site: Path, package: str, modules: dict[str, str]) -> None:
    """Lay down a package with an entry point, as `pip install --target SITE` would."""
    (site / package).mkdir(parents=True)
    for name, text in modules.items():
        (site / package / name).parent.mkdir(parents=True, exist_ok=True)
        (site / package / name).write_text(text)
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[effloop.plugins]\n{package} = {package}\n")


SCRIPT = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from effloop.cli.main import main

results = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    results.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""
"""Several commands in one process, which takes seconds to start."""
COMMANDS = {
    "list": ["list"],
    "mistyped": ["decode=negative", "decode.whte=1"],
    "converted": ["convert", "data=stripes", "to=lmdb", "out=stripes.lmdb"],
    "verified": ["verify", "data=stripes"],
    "train": ["data=stripes", "data.cache=bytes", "decode=negative", "decode.white=254", *TINY, "run=x"],
}


def test_packages(tmp_path):
    """A source that has a YAML file of its own, and can be cached and converted; a decoder that has none."""
    yaml_file = "# Stripes, 32 of them.\ndefaults: [stripes_schema, _self_]\ncount: 32\n"
    install(tmp_path / "site", "stripes_for_effloop", {"__init__.py": SOURCE, "configs/data/stripes.yaml": yaml_file})
    install(tmp_path / "site", "negative_for_effloop", {"__init__.py": DECODER})
    places = os.pathsep.join([str(tmp_path / "site"), str(Path(effloop.__file__).parents[1])])
    command = [sys.executable, "-c", SCRIPT, json.dumps([*COMMANDS.values()])]
    environment = {**os.environ, "PYTHONPATH": places}
    out = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    said = dict(zip(COMMANDS, json.loads(out), strict=True))

    lines = [line.split(maxsplit=2) for line in said["list"][1].splitlines()]
    assert ["data", "stripes", "Stripes, 32 of them."] in lines
    assert ["decode", "negative", "Pillow's pixels, dark for light."] in lines
    line = "effloop: 'decode.whte' is not a key of the config; did you mean 'decode.white'?\n"
    assert said["mistyped"] == [2, "", line]
    for name in ("converted", "verified", "train"):
        assert (said[name][0], said[name][2]) == (0, "")
    assert "32 images in 2 classes, Stripes" in said["train"][1]
    config = yaml.safe_load((tmp_path / "outputs/x/config.yaml").read_text())
    assert config["data"]["count"] == 32
    common = {"region": True, "dct_scaling": False, "max_pixels": 178_956_970, "exif": True, "window": None}
    assert config["decode"] == {"name": "negative", "white": 254, **common}
    assert (tmp_path / "outputs/x/checkpoints/best.ckpt").is_file()


@pytest.mark.slow
def test_a_source_is_diagnosed(tmp_path):
    (tmp_path / "stripes.py").write_text(SOURCE)
    code, out, _ = call("diagnose", "data=stripes", "plugins=[stripes.py]", *TINY, cwd=tmp_path)
    assert code == 0
    assert "diagnosis.html" in out


@pytest.mark.parametrize(
    "text",
    [
        "import nothing_of_this_name",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("1 / 0", "def broken(:")),
    ],
)
def test_that_does_not_import(tmp_path, text):
    install(tmp_path / "site", "broken_for_effloop", {"__init__.py": text})
    code, out, err = call("list", cwd=tmp_path, path=tmp_path / "site", forked=False)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(
        "effloop: plugin 'broken_for_effloop' (broken_for_effloop) does not import: "
    )


MINE = '''
"""A model, a loss and an operation in one file."""
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from effloop.data.augment.operation import PixelOperation, bernoulli, operation
from effloop.model import ModelConfig, models
from effloop.task import Classification, ClassificationConfig, tasks

@dataclass
class NetConfig(ModelConfig):
    hidden: int = 8

@models.register("net", NetConfig)
class Net(torch.nn.Sequential):
    """One hidden layer."""
    def __init__(self, num_classes=10, hidden=8):
        super().__init__(
            torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, hidden), torch.nn.ReLU(),
            torch.nn.Linear(hidden, num_classes),
        )

@models.register("needy", ModelConfig)
def needy(num_classes, depth):
    """A model of something that nobody gives."""

@dataclass
class FocalConfig(ClassificationConfig):
    gamma: float = 2.0

@tasks.register("focal", FocalConfig)
class Focal(Classification):
    """Classification with the focal loss."""
    def __init__(self, config):
        super().__init__(config)
        self.gamma = config.gamma

    def loss(self, outputs, targets):
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return ((1 - (-losses).exp()) ** self.gamma * losses).mean()

@operation
class Negative(PixelOperation):
    """Turns colours around."""
    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def draw(self, keys, sizes):
        return bernoulli(keys, self.p)

    def apply_inplace(self, image, drawn, row):
        if drawn[row]:
            image ^= 255

    def apply_batch(self, images, drawn):
        on = torch.from_numpy(drawn).to(images.device)[:, None, None, None]
        return torch.where(on, images ^ 255, images)
'''


@pytest.fixture
def mine(tmp_path: Path, photos: Path) -> list[str]:
    """Words that use the parts of ./parts/mine.py."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/mine.py").write_text(MINE)
    tiny = [word for word in TINY if not word.startswith("model.")]
    operation = "+augment.ops.negative={op: Negative, p: 0.5}"
    parts = ["model=net", "model.hidden=4", "task=focal", "task.gamma=1.5", operation]
    return [f"data.root={photos}", *tiny, "plugins=[parts/mine.py]", *parts]


def test_parts_in_a_file(mine, tmp_path):
    """Used where it is typed, in all processes; a saved config doesn't have it."""
    args = [*mine, "run=x", "epochs=1", "parallel=ddp", "engine=processes", "num_workers=1"]
    code, out, err = call(*args, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert out.endswith(" eval outputs/x 'plugins=[parts/mine.py]'\n")
    run = tmp_path / "outputs/x"
    assert "plugins" not in (run / "config.yaml").read_text() + (run / "overrides.yaml").read_text()
    assert list(json.loads((run / "environment.json").read_text())["plugins"]) == ["mine.py"]
    code, _, err = call("resume", "outputs/x", "epochs=2", cwd=tmp_path)
    assert code == 2
    assert re.fullmatch(r"effloop: model: the run's 'net' is not here;.* plugins=\[FILE.py\] if it is in a file\n", err)
    code, _, err = call("resume", "outputs/x", "epochs=2", "plugins=parts/mine.py", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert len(rows(run, "metrics.jsonl")) > 0


SHARDING = '''
"""A strategy that replaces parameters before the optimizer is made, as `fully_shard` does."""
from dataclasses import dataclass
from torch import nn
from effloop.parallel import Parallel, ParallelConfig, parallels

@dataclass
class ToyConfig(ParallelConfig):
    pass

@parallels.register("toy", ToyConfig)
class Toy(Parallel):
    """Its parameters are other ones."""
    def wrap(self, model):
        for module in model.modules():
            for name, old in [*module.named_parameters(recurse=False)]:
                setattr(module, name, nn.Parameter(old.detach().clone()))
                old.detach().fill_(float("nan"))  # whoever holds these learns nothing
        return model
'''


@pytest.mark.nightly
def test_a_strategy_may_replace_parameters(photos, tmp_path):
    """Optimizer, EMA, step and checkpoints hold what `wrap` returns: the run ends as without the strategy."""
    (tmp_path / "toy.py").write_text(SHARDING)
    found = []
    for run, words in {"alone": [], "wrapped": ["parallel=toy", "plugins=[toy.py]"]}.items():
        args = [f"data.root={photos}", *TINY, *words, f"run={run}", "optim.ema=0.9", "device=cpu", "epochs=1"]
        code, _, err = call(*args, cwd=tmp_path)
        assert (code, err) == (0, "")
        found.append(torch.load(tmp_path / f"outputs/{run}/checkpoints/last.ckpt", weights_only=True))
    for part in ("model", "optimizer", "average"):
        assert equal(*(each[part] for each in found)), part


@pytest.mark.nightly
def test_parts_in_a_file_in_a_sweep(mine, tmp_path):
    """Its launcher's processes begin with unpickling what has the parts' configs in it."""
    words = ["-m", "model.hidden=2,3", "hydra/launcher=submitit_local", "epochs=1"]
    code, _, err = call(*[word for word in mine if "hidden" not in word], *words, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert len([*tmp_path.rglob("summary.json")]) == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["plugins=[none.py]"],
            "plugins: 'none.py' is not a Python file that is there; name one, e.g. plugins=[mine.py]",
        ),
        (["plugins=json.py"], "plugins: 'json.py' can't be imported as 'json', which is another module; rename it"),
        (["plugins=broken.py"], "plugins: broken.py does not import: NameError: name 'nothing' is not defined; fix it"),
        (
            ["plugins=parts/mine.py", "model=needy"],
            "model: needy(num_classes, depth) needs 'depth', and is given channels, config, image_size, num_classes; "
            "take these by name, or give 'depth' a default",
        ),
    ],
)
def test_file_that_cannot_be_used(words, line, mine, photos, tmp_path):
    (tmp_path / "json.py").write_text("")
    (tmp_path / "broken.py").write_text("nothing")
    code, out, err = call(f"data.root={photos}", *words, "image_size=16", cwd=tmp_path)
    assert (code, out, err.splitlines()[-1]) == (2, "", f"effloop: {line}")
    assert err.startswith("Traceback" if "broken.py" in line else "effloop: ")


RAISING = """
import os
from helper import fail
from effloop.data.augment.operation import PixelOperation, bernoulli, operation
from effloop.task import Classification, ClassificationConfig, tasks

@tasks.register("raising", ClassificationConfig)
class Raising(Classification):
    def loss(self, outputs, targets):
        return outputs["x"] if os.environ["WHERE"] == "loss" else super().loss(outputs, targets)

@operation
class Raises(PixelOperation):
    def __init__(self, p: float = 1.0):
        self.p = p

    def draw(self, keys, sizes):
        return bernoulli(keys, self.p)

    def apply_inplace(self, image, drawn, row):
        if os.environ["WHERE"] == "operation":
            fail(row)

    def apply_batch(self, images, drawn):
        return images
"""


@pytest.mark.parametrize(
    ("where", "words", "place"),
    [
        ("loss", [], "raising.py:10, in loss"),
        ("operation", ["engine=threads", "num_workers=1"], "helper.py:2, in fail"),
        ("operation", ["engine=processes", "num_workers=1"], "helper.py:2, in fail"),
        pytest.param("loss", ["parallel=ddp"], "raising.py:10, in loss", marks=pytest.mark.slow),
    ],
)
def test_what_a_plugin_raises(where, words, place, photos, tmp_path, monkeypatch):
    """In the main thread, another one, a worker process or a rank; what is raised elsewhere is a bug."""
    (tmp_path / "raising.py").write_text(RAISING)
    (tmp_path / "helper.py").write_text("def fail(row):\n    raise KeyError(row)\n")
    monkeypatch.setenv("WHERE", where)
    parts = ["plugins=[raising.py]", "task=raising", "+augment.ops.x={op: Raises}", "record.tensorboard=false"]
    code, _, err = call(f"data.root={photos}", *TINY, *parts, *words, cwd=tmp_path)
    assert code == 2
    assert "Traceback (most recent call last)" in err
    assert f"({place}); its traceback is above" in err.splitlines()[-1]
    assert "effloop: bug" not in err

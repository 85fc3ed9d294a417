"""The commands, as a user calls them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from runs import call

import effloop
from effloop.cli.command import options_of, parse
from effloop.cli.main import MODULES, command_named, main
from effloop.config import hydra_setup
from effloop.inference.trained import Trained
from effloop.optim import optimizers, schedules
from effloop.parallel import parallels
from effloop.precision import precisions

commands = {name: command_named(name) for name in MODULES}


def test_help_fits_a_screen(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 46
    assert max(map(len, lines)) <= 80
    for word in ("train", "eval", "resume", "list", "bench", "show", *schedules, *optimizers, *parallels, *precisions):
        assert word in "".join(lines)


@pytest.mark.parametrize("name", commands)
def test_help_of_a_command(name, here, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"effloop {name}")
    assert max(map(len, out.splitlines())) <= 80
    assert commands[name].summary in out
    example = commands[name].example.split()
    assert out.splitlines()[-1] == f"  effloop {commands[name].example}"
    assert example[0] == name
    assert parse(commands[name].options, name, example[1:])
    for option in options_of(commands[name].options):
        assert option.usage in out
        assert option.meaning


def test_version_and_the_module(tmp_path):
    assert call("--version", cwd=tmp_path, forked=False) == (0, f"effloop {effloop.__version__}\n", "")


def test_list_of_a_group(here, capsys):
    assert main(["list", "model"]) == 0
    parts, _, keys = capsys.readouterr().out.partition("\nKeys:\n")
    assert "  model.width " in keys
    names = [line.split()[1] for line in parts.splitlines()]
    assert names == sorted(names)
    assert {"cnn", "small_resnet", "resnet50", "vit_b_16"} <= set(names)


def test_list_of_a_key_says_what_sets_it(here, capsys):
    """A model that brings weights, or an experiment, the user's among them."""
    _write(here / "configs/experiment/mine.yaml", "# @package _global_\ndata: {mean: [0.5, 0.5, 0.5]}\n")
    _write(here / "configs/experiment/broken.yaml", "# @package _global_\ndata: {mean: [0.5,\n")
    assert main(["list", "data.mean"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "default [0.485, 0.456, 0.406] set by [" in out
    assert "[0.49804, 0.49804, 0.49804] (model=efficientnet_lite0)" in out
    assert "[0.5, 0.5, 0.5] (experiment=mine)" in out


def test_list_shows_the_users_configs(here, capsys):
    _write(here / "configs/experiment/night.yaml", "# @package _global_\n# Twelve hours.\nepochs: 9\n")
    text = "# @package _global_\n# Short.\n# score: 9 %,\n#   or 8 %\n# differs: no\n# cost: 3 days [4 GPUs]\n"
    _write(here / "configs/experiment/scored.yaml", text)
    assert main(["list", "experiment"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]  # below the headings
    cells = [re.split("   *", line.rstrip()) for line in rows]
    assert ["night", "Twelve hours."] in cells
    assert ["scored", "Short.", "9 %, or 8 %", "3 days [4 GPUs]"] in cells
    recipes = {path.stem for path in (hydra_setup.config_root() / "experiment").glob("*.yaml")}
    assert [name for name, *_ in cells] == sorted({*recipes, "night", "scored"})


def test_cfg_prints_and_stops(here, capsys):
    assert main(["--cfg", "job", "epochs=7", "model=resnet18"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["epochs"] == 7
    assert (config["model"]["name"], config["model"]["arch"]) == ("torchvision", "resnet18")
    assert not list(here.iterdir())


class TestUsersConfigs:
    def test_experiment(self, here, photos):
        text = "# @package _global_\ndefaults:\n  - override /optim: sgd\nepochs: 1\nmodel:\n  width: 3\n"
        _write(here / "configs/experiment/mine.yaml", text)
        assert main([f"data.root={photos}", "experiment=mine", "image_size=16", "batch_size=8", "run=x"]) == 0
        config = yaml.safe_load((here / "outputs/x/config.yaml").read_text())
        assert (config["epochs"], config["model"]["width"], config["optim"]["name"]) == (1, 3, "sgd")

    @pytest.mark.parametrize("chosen", ["experiment=deep", "model=resnet18"])
    def test_model_by_name(self, here, chosen):
        text = "# @package _global_\ndefaults:\n  - override /model: resnet18\n"
        _write(here / "configs/experiment/deep.yaml", text)
        assert main([chosen, "--cfg", "job"]) == 0
        assert effloop.compose([chosen]).model.name == "torchvision"

    def test_part(self, here):
        _write(here / "configs/augment/weak.yaml", "defaults: [native, _self_]\nops: {crop: {scale: [0.9, 1.0]}}\n")
        augment = effloop.compose(["augment=weak"]).augment
        assert (augment.name, augment.ops["crop"]["scale"]) == ("native", [0.9, 1.0])

    def test_packaged_file_wins(self, here):
        _write(here / "configs/optim/sgd.yaml", "defaults: [sgd_schema, _self_]\nmomentum: 0.123\n")
        _write(here / "configs/train.yaml", "unrelated: true\n")
        assert effloop.compose(["optim=sgd"]).optim.momentum != 0.123


class TestEval:
    @pytest.mark.usefixtures("without_pictures")
    def test_folder_and_file_agree_with_the_run(self, finished, capsys):
        summary = json.loads((finished / "summary.json").read_text())
        for path, which in ((finished, "best"), (finished / "checkpoints/last.ckpt", "last")):
            assert main(["eval", str(path)]) == 0
            out = capsys.readouterr().out
            assert f"epoch {summary[which]['epoch']}, float32, on 13 images in 3 classes" in out
            assert f"{summary[which]['top1']:.2%}" in out
            assert f"{summary[which]['loss']:.4f}" in out

    @pytest.mark.usefixtures("without_pictures")
    @pytest.mark.parametrize(("split", "images"), [("val", 13), ("train", 40), ("test", 13)])
    def test_splits(self, split, images, finished, photos, here, capsys):
        for source, target in (("train", "train"), ("val", "val"), ("val", "test")):
            (here / "photos").mkdir(exist_ok=True)
            (here / "photos" / target).symlink_to(photos / source)
        assert main(["eval", str(finished), f"data.root={here}/photos", f"split={split}"]) == 0
        assert f"on {images} images in 3 classes" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("data=embedded", "has the classes dress, hat"),
            ("model.width=8", "model: the checkpoint holds width 4, not width 8"),
            ("model=small_resnet", "model: the checkpoint holds"),
            ("model.num_classes=4", "4, but the data has 3; set model.num_classes=3"),
            ("tta=fliip", "tta: 'fliip' is not allowed; set flip"),
        ],
    )
    def test_refusals(self, finished, override, words, capsys):
        assert main(["eval", str(finished), override]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1

    @pytest.mark.usefixtures("without_pictures")
    def test_views(self, finished, capsys):
        """Of the image alone, and of several views of it: their mean, computed here."""
        assert main(["eval", str(finished), "tta=flip"]) == 0
        rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line][:2]
        labels, losses = ([row[column].strip() for row in rows] for column in (0, -1))
        assert labels == ["none", "flip"]
        trained = Trained.open(finished)
        summary = json.loads((finished / "summary.json").read_text())
        assert losses[0] == f"{summary['best']['loss']:.4f}"
        found = list(trained.loader().epoch(0))
        targets, images = (torch.cat([getattr(b, name)[b.valid] for b in found]) for name in ("targets", "images"))
        with torch.no_grad():
            shares = (trained.model(images).softmax(1) + trained.model(images.flip(3)).softmax(1)) / 2
        assert losses[1] == f"{float(F.nll_loss(shares.log(), targets)):.4f}"

    def test_leaves_the_run_as_it_was(self, finished, here):
        """All that it writes is in a folder of its own."""

        def files() -> dict[Path, int]:
            found = (path for path in finished.rglob("*") if path.is_file() and "eval" not in path.parts)
            return {path: path.stat().st_mtime_ns for path in found}

        before = files()
        assert main(["eval", str(finished)]) == 0
        assert files() == before
        assert not list(here.iterdir())


def test_nothing_that_runs_what_it_reads():
    forbidden = re.compile(
        r"pickle\.loads?\(|(?<![.\w])eval\(|(?<![.\w])exec\(|yaml\.load\(|weights_only=False|shell=True|allow_pickle=True|os\.(system|popen)\("
    )
    found = [
        f"{path}:{number}"
        for path in Path(effloop.__file__).parent.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if forbidden.search(line)
    ]
    assert not found


@pytest.mark.nightly
def test_compose_inside_of_a_hydra_application(tmp_path):
    (tmp_path / "app.py").write_text(
        "import effloop, hydra\n"
        "@hydra.main(version_base='1.3', config_path=None)\n"
        "def app(config):\n"
        "    print(effloop.compose(['epochs=3']).epochs, hydra.core.hydra_config.HydraConfig.get().job.name)\n"
        "app()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(effloop.__file__).parents[1])}
    command = [sys.executable, "app.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "3 app\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

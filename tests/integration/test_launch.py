"""Files of `launch`: what docs/launch.md shows, words that shells or YAML would take apart, the tools' own parsers."""

import os
import re
import shlex
import shutil
import subprocess
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import yaml

from effloop.cli.launch import TOOLS
from effloop.cli.main import main
from effloop.config.overrides import quoted

PAGE = (Path(__file__).parents[2] / "docs/launch.md").read_text("utf-8")
SHOWN = re.findall(r"```sh\n(effloop launch to=(\w+).*?)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
TEXT = 'it\'s "so":  $HOME $(id) $$(id) $$ `id` \\ # ; &\n  é猫 - {x}, *'
NEEDED = {"skypilot": ["image=i", "storage=s3://b"], "kubernetes": ["image=i", "storage=c"]}


def launched(to: str, *words: str) -> str:
    assert main(["launch", f"to={to}", "file=file", *NEEDED.get(to, []), *words]) == 0
    return Path("file").read_text("utf-8")


@pytest.mark.parametrize(("line", "to", "text"), SHOWN, ids=[to for _, to, _ in SHOWN])
def test_the_page_shows_what_is_written(line, to, text, here, capsys):
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out == text
    file, command = re.fullmatch(r"file: (.*)   submit: (.*)", text.splitlines()[-1]).groups()
    assert text.startswith((here / file).read_text("utf-8"))
    assert command.split()[-1] == file
    assert {to for _, to, _ in SHOWN} == set(TOOLS)


@pytest.fixture
def programs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that write down their arguments, the first of PATH."""
    for name, code in {"srun": 75, "scontrol": 0, "torchrun": 0, "effloop": 0, "sbatch": 3}.items():
        path = here / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" >{name}.args\nexit {code}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")


def arguments(name: str) -> list[str]:
    return Path(f"{name}.args").read_text("utf-8").split("\0")[:-1]


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("to", "nodes"), [*((to, 2) for to in TOOLS), ("skypilot", 1)])
def test_words_arrive_as_they_were_typed(to, nodes, monkeypatch):
    words = [f"record.project={quoted(TEXT)}", "parallel=ddp", "out='/my $outputs'", "run=a/b c", "resume=auto"]
    text = launched(to, f"nodes={nodes}", "gpus=H100:2" if to == "skypilot" else "gpus=2", *words)
    if to == "slurm":
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        subprocess.run(["bash", "file"], check=True)
        found = arguments("srun")
        assert arguments("scontrol") == ["requeue", "7"]
        Path("bin/srun").write_text("#!/bin/sh\nexit 2\n")
        assert subprocess.run(["bash", "file"], check=False).returncode == 2  # the job has failed
    elif to == "skypilot":
        for name, value in {"NUM_NODES": "2", "NODE_RANK": "1", "NODE_IPS": "10.0.0.1\n10.0.0.2"}.items():
            monkeypatch.setenv(f"SKYPILOT_{name}", value)
        subprocess.run(["bash", "-c", yaml.safe_load(text)["run"]], check=True)
        found = arguments("torchrun") if nodes > 1 else ["effloop", *arguments("effloop")]
        assert nodes == 1 or {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--nproc-per-node=2"} <= {*found}
    elif to == "kubernetes":
        expanded = {"$$": "$", "$(id)": "?"}  # as Kubernetes does
        command = yaml.safe_load(text)["spec"]["trainer"]["command"]
        found = [re.sub(r"\$\$|\$\(id\)", lambda match: expanded[match[0]], word) for word in command]
    else:
        assert all(repr(word) in text for word in words)
        return
    assert found[found.index("effloop") + 1 :] == words


@pytest.mark.usefixtures("here")
def test_each_start_finds_the_same_run(monkeypatch, tmp_path):
    """A name that is left to the moment, or has it in it, is fixed; the job's name is one that all tools take."""
    for typed in ([], ["run=a/${now:%H-%M-%S}"]):
        text = launched("slurm", "gpus=0", *typed)
        assert re.search(r"effloop run=[\w/-]+\d\d-\d\d-\d\d resume=auto$", text, re.MULTILINE)
        assert re.search(r"--job-name=[a-z][a-z0-9-]*\d\d-\d\d-\d\d$", text, re.MULTILINE)
        assert "--gpus" not in text
        Path("file").unlink()


@pytest.mark.usefixtures("here")
def test_the_strategy_of_a_recipe_stays():
    assert "parallel=" not in launched("slurm", "gpus=8", "experiment=imagenet_resnet50_8gpu", "data.root=/data/in1k")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("to", "place"), [("kubernetes", ["metadata", "name"]), ("skypilot", ["name"])])
def test_a_run_may_have_the_name_of_a_boolean(to, place):
    found = yaml.safe_load(launched(to, "gpus=0", "run='no'"))
    assert reduce(getitem, place, found) == "no"


@pytest.mark.usefixtures("programs")
def test_submit(capfd, monkeypatch):
    words = ["launch", "to=slurm", "file=my file", "run=x", "options=-p 'a b'", "submit=true"]
    assert main(words) == 3  # sbatch's
    assert arguments("sbatch") == ["-p", "a b", "my file"]
    assert "submit: sbatch -p 'a b' 'my file'" in capfd.readouterr().out
    monkeypatch.setenv("PATH", "/nosuch")
    assert main(words) == 2  # the file is there already, with the same text
    assert "sbatch can't be run here: No such file or directory; install it, or" in capfd.readouterr().err
    assert main([*words, "lr=1"]) == 2
    assert "file: my file is there already, with other text" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_skypilot_accepts_its_file(monkeypatch, tmp_path):
    if not (sky := shutil.which("sky")):
        pytest.skip(
            "needs sky on PATH, in an environment of its own, as it takes no SQLAlchemy 1: pip install skypilot"
        )
    launched("skypilot", "gpus=H100:8", "nodes=2", "cpus=64", "memory=256", f"record.project={quoted(TEXT)}")
    monkeypatch.setenv("HOME", str(tmp_path))
    code = "import sky; [each] = sky.Task.from_yaml('file').resources; print(each.accelerators, each.cpus)"
    python = Path(sky).read_text("utf-8").partition("\n")[0].removeprefix("#!")
    done = subprocess.run([python, "-Ic", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("{'H100': 8} 64+\n")


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_kubeflow_accepts_its_file():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    text = launched("kubernetes", "gpus=8", "nodes=2", "cpus=64", "memory=256", f"record.project={quoted(TEXT)}")
    tree = yaml.safe_load(text)
    assert models.TrainerV1alpha1TrainJob.from_dict(tree).to_dict() == tree  # which has nothing that it doesn't know

"""README.md and docs/: every command and block of Python is run on tiny data, tables and links are complete.

What a block does not run is listed here with its reason: those commands are only composed, or parsed.
"""

import copy
import dataclasses
import functools
import importlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import h5py
import pytest
from folders import make_sweep
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from masked import make_masks
from ranks import environment, free_port
from runs import TINY, once
from stores import make_splits, write_npz

import effloop
from effloop.cli.bench import BENCHMARKS
from effloop.cli.main import MODULES, command_named, main
from effloop.config import Config
from effloop.config.messages import keys_of
from effloop.data.source.storage.writing import writers
from effloop.errors import ConfigError
from effloop.registry import groups, use_plugin_files

registered = {name: command_named(name) for name in MODULES}

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page: page.read_text("utf-8") for page in PAGES}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
LANGUAGES = {"sh", "python", "yaml", "toml", "text", "bash"}
"""`bash` is a script for Slurm, of which only the command is composed."""

ELSEWHERE = {
    "pip": "installs packages",
    "python -m pytest": "is what runs this",
    "python tests/gpu/report.py": "needs a GPU: unit/test_gpu_report.py",
    "effloop resume outputs/pets parallel.processes=4": "starts ranks, of a run that had some: test_virtual.py",
}
COMPOSED = {  # what begins, or is, a word of the commands that are not run but composed -> why
    "torchrun": "starts ranks: test_ranks.py",
    "srun": "needs Slurm",
    "parallel=ddp": "starts ranks: test_ranks.py",
    "parallel=fsdp": "starts ranks: unit/parallel/test_fsdp.py",
    "-m": "starts a process for each job: test_sweep.py",
    "experiment=": "contract/test_experiments.py trains each",
    "model.weights=DEFAULT": "downloads weights",
}
RUN, OTHER = "outputs/2026-11-21/10-52-00", "outputs/again"
ADDED = {"augment=pets"}  # choices which a file in the text adds
REFUSED = {"amp=true precision=fp32", "lr=0.1 optim.lr=0.2", "deterministic=true cudnn_benchmark=true"}
"""Overrides which the pages say contradict each other."""

LONGEST = {  # pages whose commands take three seconds or more
    "README",
    *(
        "audit",
        "augmentation",
        "benchmarks",
        "commands",
        "data",
        "diagnose",
        "evaluate",
        "examples",
        "export",
        "extending",
    ),
    *("gallery", "multi-gpu", "own-source", "own-task", "recipes", "runs", "segmentation", "splits", "start", "step"),
    *("plan", "sweeps", "tasks"),
}

pages = pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page.stem in LONGEST else page for page in PAGES],
    ids=[page.stem for page in PAGES],
)


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(TEXTS[page]) if language in languages]


def spans(page: Path) -> list[str]:
    """What stands between backticks outside of blocks."""
    return [" ".join(span.split()) for span in SPAN.findall(BLOCK.sub("", TEXTS[page]))]


def commands(page: Path) -> Iterator[list[str]]:
    """Every command line, as words."""
    for text in blocks(page, "sh", "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            for command in line.split(" && "):
                if words := shlex.split(command, comments=True):
                    yield words
    for span in spans(page):
        if span.startswith("effloop "):
            words = span.replace("[train]", "train").split()
            yield [word for word in words if word not in ("OVERRIDE", "…", "[GROUP]", "COMMAND")]


@pytest.fixture(scope="module")
def template(photos: Path, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with /data/NAME, a run and a sweep under the names which the pages use; not to be changed."""
    place = tmp_path_factory.mktemp("template")
    (place / "data").mkdir()
    for name in ("pets", "in1k", "digits", "ages", "cifar10"):
        (place / "data" / name).symlink_to(photos)
    make_masks(place / "data" / "nuclei", {"train": 19, "val": 5})
    (place / "data" / "colors.txt").write_text("0 0 0 background\n255 255 255 nucleus\n")
    (place / "data" / "photos").symlink_to(photos / "train")  # classes, and no splits
    names = sorted(path.relative_to(photos) for path in photos.glob("*/*/*.jpg"))
    rows = [f"pets/{name},{name.parts[1]},{name.parts[0]}" for name in names]
    (place / "data" / "labels.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    rows = [f"{name};{name.parts[1]};{name.parts[0]}" for name in names]
    (place / "data" / "survey.csv").write_text("\n".join(["photo;finding;split", *rows]) + "\n")
    for table, target in (("garments", "hat|shoes"), ("houses", "12.5")):  # columns: image, split, target
        rows = [f"pets/{name},{name.parts[0]},{target if n % 3 else target[:3]}" for n, name in enumerate(names)]
        (place / "data" / f"{table}.csv").write_text("\n".join(["image,split,target", *rows]) + "\n")
    assert main(["convert", f"data.root={photos}", "to=lmdb", f"out={place}/data/pets.lmdb"]) == 0
    write_npz(place / "data" / "bloodmnist.npz", make_splits(train=24, val=8))
    with h5py.File(place / "data" / "cells.h5", "w") as file:
        file["pixels"], file["cell_type"] = make_splits(train=40)["train"]
    shutil.copytree(photos / "val" / "a", place / "photos")
    shutil.copy(place / "photos" / "000.jpg", place / "cat.jpg")
    rows = [f"{path.stem},a" for path in (place / "photos").iterdir()]
    (place / "sample_submission.csv").write_text("\n".join(["id,label", *rows]))
    for run in (RUN, OTHER, "outputs/pets"):
        shutil.copytree(finished, place / run)
    make_sweep(place / "outputs/multirun/2026-11-21/10-52-00", {"lr": [0.001, 0.01]})
    for job in make_sweep(place / "outputs/multirun/cv", {"seed": [1, 2]}).glob("?"):
        shutil.copytree(finished, job, dirs_exist_ok=True)
    return place


@pytest.fixture
def scratch(here: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is the current folder."""
    shutil.copytree(template, here, symlinks=True, dirs_exist_ok=True)
    for registry in groups.values():  # parts of these pages are gone afterwards
        monkeypatch.setattr(registry, "_found", {name: registry[name] for name in registry})  # all are imported now
    monkeypatch.setattr(ConfigStore.instance(), "repo", copy.deepcopy(ConfigStore.instance().repo))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for variable in ("EFFLOOP_PLUGINS", "PYTHONPATH"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    for benchmark in BENCHMARKS.values():
        call = functools.wraps(benchmark.call)(lambda *_, **__: Mock())  # of the same options
        monkeypatch.setattr(f"effloop.measure.{benchmark.name}", call)
    monkeypatch.setattr("effloop.measure.loops.TURN_S", 0.0)
    return here


RAN: set[str] = set()  # several pages have the same command


@pages
def test_every_command_and_block_runs(page, scratch, monkeypatch):
    for text in blocks(page, "yaml"):
        file = scratch / re.search(r"^# (configs/\S+\.yaml)", text, re.MULTILINE).group(1)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("/data/", f"{scratch}/data/"))
    with monkeypatch.context() as patch:
        for text in blocks(page, "python"):
            if file := re.match(r"# (\w+\.py)\n", text):
                (scratch / file[1]).write_text(text)
            else:
                run_python(text, scratch, patch)
    for words in commands(page):
        line = " ".join(words)
        if line not in RAN and not any(line.startswith(each) for each in ELSEWHERE):
            run(words, scratch)
            RAN.add(line)


def run_python(text: str, scratch: Path, patch: pytest.MonkeyPatch) -> None:
    """Execute a block with tiny settings; a process group of one, where it wants one."""

    def compose(overrides: list[str]) -> Config:
        return composed([*overrides, *TINY, "epochs=1", "num_workers=1"])

    composed = effloop.compose
    if "parallel=ddp" in text:
        for key, value in environment(0, 1, free_port()).items():
            patch.setenv(key, value)
    with patch.context() as inner:
        inner.setattr(effloop, "compose", compose)
        module = ModuleType("effloop_docs")
        inner.setitem(sys.modules, module.__name__, module)
        exec(compile(text.replace("/data/", f"{scratch}/data/"), "<docs>", "exec"), module.__dict__)


def run(words: list[str], scratch: Path) -> None:
    """Run a command, or compose it where it is one of `COMPOSED`."""
    reasons = [key for word in words[1:] for key in COMPOSED if word.startswith(key) and (key != "-m" or word == key)]
    effloop_at = words.index("effloop")
    args = [placed(word, scratch) for word in words[effloop_at + 1 :]]
    print("$", shlex.join(words))
    if words[0] in COMPOSED or [each for each in reasons if each != "-m"] or "-m" in args:
        only_compose(args)
        return
    assert words[0] == "effloop"
    if (command := loops(args)) and not any(word.startswith(("run=", "out=", "resume=", "plugins=")) for word in args):
        keys = {word if word.partition("=")[0] in {*groups, "data.root"} else word.partition("=")[0] for word in args}
        if keys <= USED.setdefault(command, set()):
            only_compose([word for word in args if re.match(rf"({KEYS})[=.]", word)])
            return
        USED[command] |= keys
    files = [word for word in args if word.startswith("plugins=")]
    use_plugin_files([word.removeprefix("plugins=").strip("[]") for word in files])
    args = [word for word in args if word not in files]
    for option in ("out=", "run="):  # made again
        for word in args:
            if word.startswith(option):
                remove(Path(word.removeprefix(option)) if option == "out=" else Path("outputs", word[4:]))
    assert main(once(*tiny(args, scratch))) == 0


USED: dict[str, set[str]] = {}
"""Command that loads data -> keys and parts that it was run with: the same ones with other values are only composed."""


def loops(args: list[str]) -> str:
    """The command, if it is one of those that load data or train; else empty."""
    if not args or "=" in args[0]:
        return "train"
    return args[0] if args[0] in ("train", "show", "tune", "diagnose", "lr") else ""


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def placed(word: str, scratch: Path) -> str:
    """A word with the pages' placeholders filled in."""
    named = {"RUN": RUN, "out=PATH": "out=/data/new"}.get(word, word).replace("=PATH", "=/data/pets")
    return named.replace("/data/", f"{scratch}/data/")


def tiny(args: list[str], scratch: Path) -> list[str]:
    """The same command with less to do."""
    if loops(args):
        small = [word for word in TINY if not word.startswith(("model.width", "image_size"))]
        own = ("samples", "split", "minutes", "batch=", "seconds", "verify", "top")  # options
        config = effloop.compose([word for word in args if "=" in word and not word.startswith(own)])
        side = 32 if config.amp else 16  # of 16 pixels bf16 convolutions of torch's have a NaN in one of 300 gradients
        small += [f"image_size={side}", "record.tensorboard=false"] + ["model.width=4"] * (config.model.name == "cnn")
        if config.data.name == "auto" and config.data.root is None:
            small.append(f"data.root={scratch}/data/pets")
        if config.profile.name != "none":
            small += ["profile.wait=1", "profile.steps=2"]
        small += {"diagnose": ["seconds=1", "top=1"], "tune": ["minutes=0.01"]}.get(args[0] if args else "", [])
        resumes = config.resume is not None
        return [*args, *small, f"epochs={5 if resumes else max(1, len(config.progressive))}"]
    return [*args, "epochs=4"] if args[0] == "resume" else args


def only_compose(args: list[str]) -> None:
    """Check the overrides of a command which is not run; of a sweep with the last value of each key."""
    kept = []
    for override in OverridesParser.create().parse_overrides([word for word in args if "=" in word]):
        key, value = override.get_key_element(), None
        if override.is_sweep_override():
            value = [*override.sweep_string_iterator()][-1] if override.is_discrete_sweep() else override.value().end
        kept.append(override.input_line if value is None else f"{key}={value}")
    effloop.compose([word for word in kept if not word.startswith("hydra")])
    if any(word.startswith("hydra") for word in kept):
        assert main([*kept, "--cfg", "all"]) == 0


def test_blocks_say_what_they_are():
    found = {(page.name, language) for page in PAGES for language, _ in BLOCK.findall(TEXTS[page])}
    assert {each for each in found if each[1] not in LANGUAGES} == set()


def test_what_is_not_run_is_there():
    everything = "\n".join(TEXTS.values())
    assert [key for key in (*ELSEWHERE, *COMPOSED, *REFUSED) if key not in everything] == []


KEYS = "|".join(field.name for field in dataclasses.fields(Config))
NEEDS = {  # beginning of an override -> what has to be chosen for it
    "parallel.": "parallel=ddp",
    "data=dali": "data.root=.",
    "data=folder": "data.root=.",
    "data=csv": "data.root=.",
    "data.classes": "data=csv data.root=.",
    "data=masks": "data.root=.",
    "data=memmap": "data.root=.",
    "data=cifar": "data.root=.",
    "data=hf": "data.root=.",
    "data=parquet": "data.root=.",
    "data.val_split=null": "data.val=0.2",
    "data.group=copies": "data.val=0.2",
    "checkpoint.best_by=mae": "task=regression",
    "data.targets": "data=csv data.root=.",
    "data=lmdb": "data.root=.",
    "data.checksums": "data=lmdb data.root=.",
    "model.args": "model=resnet18",
    "model.depth": "model=small_resnet",
    "model.drop_path": "model=convnext_tiny",
    "optim.momentum": "optim=sgd",
    "task.sum_classes": "task=classification task.loss=bce",
    "task.loss=huber": "task=regression",
    "task.loss={": "task=segmentation",
    "task.window": "task=segmentation",
    "task.standardise": "task=regression",
}


@pytest.mark.slow
def test_overrides_in_the_text_compose():
    """Every `KEY=VALUE` between backticks, placeholders in capitals aside; many at once, to save time."""
    bundles: list[dict[str, list[str]]] = []
    for span in sorted({span for page in PAGES for span in spans(page)}):  # a set has another order each time
        words = span.split()
        if (
            not all(re.match(rf"({KEYS})(\.[a-z_.]+)?=.", word) for word in words)
            or re.search(r"[A-Z]{3}|…", span)
            or span in ADDED
        ):
            continue
        if span in REFUSED:
            with pytest.raises(ConfigError):
                effloop.compose(words)
            continue
        key = words[0].partition("=")[0]
        needed = [each for start, needs in NEEDS.items() if span.startswith(start) for each in needs.split()]
        bundle = next((each for each in bundles if not {key, root(key)} & {*each, *map(root, each)}), None)
        if bundle is None:
            bundles.append(bundle := {})
        bundle[key] = [*needed, *words]
    for bundle in bundles:
        effloop.compose([word for words in bundle.values() for word in words])


def root(key: str) -> str:
    """What two overrides must not share to be composed at once."""
    related = {"amp": "precision", "deterministic": "cudnn_benchmark", "compile": "parallel", "sweep": "objective"}
    related["checkpoint"] = "task"  # whose scores it names
    related |= {"max_grad_value": "max_grad_norm", "max_grad_ratio": "max_grad_norm"}
    related |= {"image_size": "progressive", "eval_image_size": "progressive", "global_batch": "accumulate"}
    first = key.partition(".")[0]
    return related.get(first, first)


def test_readme_is_short():
    text = TEXTS[ROOT / "README.md"]
    assert len(text.splitlines()) <= 200
    assert len(re.findall(r"!\[", text)) <= 2
    assert (
        re.search(r"^.*python -m pytest.*$", text, re.MULTILINE).group()
        == "pip install -e '.[test]' && python -m pytest"
    )


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_resolve(page):
    text = BLOCK.sub("", page.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)(?: \"[^\"]+\")?\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        assert file.suffix not in (".svg", ".png", ".jpg") or file.stat().st_size < 150_000
        if anchor:
            assert anchor in anchors(file.read_text("utf-8")), target


def anchors(text: str) -> set[str]:
    """The names which GitHub gives headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(name: str) -> list[list[set[str]]]:
    """The table below `<!-- table: NAME -->`: for each row the words between backticks of each cell."""
    [text] = [text for text in TEXTS.values() if f"<!-- table: {name} -->" in text]
    lines = text.partition(f"<!-- table: {name} -->\n")[2].partition("\n\n")[0].splitlines()[2:]
    return [[set(SPAN.findall(cell)) for cell in line.strip("|").split(" | ")] for line in lines]


def test_formats_are_those_of_the_registries():
    rows = table("formats")
    assert {name for row in rows for name in row[0]} == set(groups["data"]) - {"auto", "embedded"}
    assert {name for row in rows for name in row[1]} == set(writers)


def test_groups_are_those_of_the_registries():
    rows = {name: row[1] for row in table("groups") for name in row[0]}
    assert set(rows) == {*Config.GROUPS, "experiment"}
    for group in Config.GROUPS:
        assert rows[group] - {"dali", "resnet50"} == set(groups[group]) - {"dali"}, group


def test_experiments_are_the_files():
    assert {name for row in table("experiments") for name in row[0]} == {
        path.stem for path in (ROOT / "configs/experiment").glob("*.yaml")
    }


def test_recipes_and_root_keys_are_mentioned():
    everything = {word for page in PAGES for span in spans(page) for word in re.split(r"[ =]", span)}
    recipes = {path.stem for path in (ROOT / "configs/augment").glob("*.yaml")}
    keys = {field.name for field in dataclasses.fields(Config)} - {"sweep", "stop"}
    assert (recipes | keys) - everything == set()


def test_keys_are_those_of_the_dataclasses(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    keys = importlib.import_module("keys")
    assert TEXTS[ROOT / "docs/keys.md"] == keys.page(), "run python docs/keys.py"
    assert [key.name for key in keys_of().values() if not key.meaning] == []


def test_commands_are_mentioned():
    text = TEXTS[ROOT / "docs/commands.md"]
    assert {name for name in registered if f"effloop {name}" not in text.replace("[train]", "train")} == set()
    for name in BENCHMARKS:
        assert f"`effloop bench what={name}" in text


def test_the_public_interface_and_the_version_are_said_once():
    [names] = re.findall(r"`effloop\.__all__`: ([^|]*), and the documented", TEXTS[ROOT / "docs/promises.md"])
    assert re.findall(r"`(\w+)`", names) == sorted(effloop.__all__)
    assert f"\nversion: {effloop.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")

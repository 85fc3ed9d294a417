"""Overrides that contradict each other or what a file says, paths in them, and keys that there aren't."""

from typing import Any

import pytest
from plans import line

import effloop
from effloop.config import load, save
from effloop.config.compose import compose_run, in_one_line
from effloop.config.messages import OTHER_NAMES, keys_of, unknown_key
from effloop.config.overrides import REMOVED, RENAMED, refuse_contradictions, with_paths
from effloop.errors import PROGRAM, ConfigError, warn
from effloop.registry import groups


@pytest.mark.parametrize(
    "words",
    [
        "optim.lr=0.1 lr=0.01",
        "lr=0.1 +lr=0.2",
        "epochs=3 epochs=5",
        "optim=sgd optim=adamw",
        "lr=1,2 optim.lr=3",
        "seed=1,2 seed=3",
        "run='a' run=b",
    ],
)
def test_refused(words):
    first, second = words.split()
    with pytest.raises(ConfigError, match=line(f"{second} contradicts {first}; drop one of them")):
        refuse_contradictions([first, second])


def test_a_url_whose_braces_the_shell_has_expanded():
    train, val = "data.root='s3://b/train.tar'", "data.root='s3://b/val.tar'"
    fix = "put a URL with braces in quotes, or drop one of them"
    with pytest.raises(ConfigError, match=line(f"{val} contradicts {train}; {fix}")):
        refuse_contradictions([train, val])


@pytest.mark.parametrize(
    "words",
    ["optim.lr=0.1 lr=1e-1", "lr=null optim.lr=0.1", "lr=${optim.lr} optim.lr=0.1", "run='a' run=a", "seed=1,2 lr=1,2"],
)
def test_taken(words):
    with in_one_line():
        refuse_contradictions(words.split())


def test_from_python_the_last_of_a_key_counts():
    assert effloop.compose(["epochs=2", "epochs=3"]).epochs == 3
    with pytest.raises(ConfigError, match=line("optim.lr=0.2 contradicts lr=0.1; drop one of them")):
        effloop.compose(["lr=0.1", "optim.lr=0.2"])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"run: caf\xe9", "a YAML file is not UTF-8: "),
        (b"defaults: [mine]", "defaults: files of the config refer to each other in a circle"),
        (b"defaults: [other]", "experiment: no choice 'other'; see effloop list"),
        (b"defaults: [override /modle: cnn]", "experiment/mine: 'modle' is no group of the config; have "),
        (b"defaults: [/modle: cnn]", "'modle' is no group of the config; have "),
    ],
)
def test_files_that_cannot_be_read(text, wanted, tmp_path, monkeypatch):
    file = tmp_path / "configs/experiment/mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"# @package _global_\n" + text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        effloop.compose(["experiment=mine"])
    assert str(error.value).replace("python -m effloop", "effloop").startswith(wanted)
    assert ("modle" in wanted) == str(error.value).endswith("; did you mean 'model'?")


def test_what_is_typed_replaces_what_a_file_says(tmp_path, monkeypatch):
    file = tmp_path / "configs/experiment/mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\nlr: 0.5\namp: true\n")
    monkeypatch.chdir(tmp_path)
    config = effloop.compose(["experiment=mine", "optim.lr=0.1", "precision=fp32"])
    assert (config.lr, config.optim.lr, config.amp, config.precision.name) == (0.1, 0.1, None, "fp32")
    save(config, tmp_path / "config.yaml")
    again = load(tmp_path / "config.yaml", ["lr=0.2", "optim=sgd", "amp=true"])
    assert (again.lr, again.optim.lr, again.precision.name) == (0.2, 0.2, "amp")


def test_a_config_changes_no_other():
    changed = effloop.compose(["optim=sgd", "optim.lr=5", "augment.ops.flip.p=0.1", "augment.ops.crop=null"])
    assert changed.optim.lr == 5
    default = effloop.compose(["optim=sgd"])
    assert default.optim.lr != 5
    assert "crop" in default.augment.ops
    assert default.augment.ops["flip"] != changed.augment.ops["flip"]


PATHS = ["my photos (1)", "Größe, b", "a'b", "it's \\ x\\", "1e3", "12", "[x]", "a=b;c&d", "true", "#1", "{a}"]


@pytest.mark.parametrize("path", PATHS)
def test_paths_as_a_shell_hands_them_over(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / path).mkdir(exist_ok=True)
    for sweep in (False, "," not in path):
        words = with_paths([f"data.root=~/{path}", f"model.weights={tmp_path}/{path}", "lr=1,2"], sweep=sweep)
        assert with_paths(words, sweep=sweep) == words
        assert words[2] == "lr=1,2"
    monkeypatch.chdir(tmp_path)
    config = effloop.compose([f"data.root=~/{path}", f"model.weights={path}"])
    assert config.data.root == str(tmp_path / path)
    assert config.model.weights == path
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml", [f"data.root=~/{path}/x"]).data.root == str(tmp_path / path / "x")


def test_a_saved_config_has_whole_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["data=masks", "data.root=set", "data.colors=my colours.txt"]
    save(effloop.compose(words), tmp_path / "config.yaml")
    found: Any = load(tmp_path / "config.yaml").data
    assert (found.root, found.colors) == (str(tmp_path / "set"), str(tmp_path / "my colours.txt"))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("data.root=a,b", "data.root=a,b"),
        ("data.root=~/a,b (1)", "data.root='/home/x/a','b (1)'"),
        ("data.root=choice(a,b)", "data.root=choice(a,b)"),
        ("data.root='a,b'", "data.root='a,b'"),
        ("data.root=${oc.env:HOME}/a", "data.root=${oc.env:HOME}/a"),
        ("data.root=null", "data.root=null"),
        ("data.root=a\\ b", "data.root=a\\ b"),
        ("out=~/runs", "out='/home/x/runs'"),
    ],
)
def test_paths_in_a_sweep(given, wanted, monkeypatch):
    monkeypatch.setenv("HOME", "/home/x")
    assert with_paths([given], sweep=True) == [wanted]


def test_a_comma_in_a_path_and_in_a_sweep(tmp_path):
    (tmp_path / "a,b").mkdir()
    wanted = f"data.root={tmp_path}/a,b: with -m a comma separates values, and this is one path; write "
    with pytest.raises(ConfigError, match=line(f"""{wanted}'data.root="{tmp_path}/a,b"'""")):
        with_paths([f"data.root={tmp_path}/a,b"], sweep=True)
    with pytest.raises(ConfigError, match="add -m"):  # no such path: meant as a sweep
        effloop.compose(["data.root=one,two"])


# What an unknown key probably means.

CHOSEN = {"data": "folder", "optim": "adamw", "engine": "threads"}


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("batchsize", "did you mean 'batch_size'?"),
        ("optim.weight_decy", "did you mean 'optim.weight_decay'?"),
        ("weight_decay", "did you mean 'optim.weight_decay'?"),
        ("momentum", "did you mean 'optim.momentum' of optim=sgd?"),
        ("optimizer", "did you mean 'optim'?"),
        ("max_epochs", "did you mean 'epochs'?"),
        ("model.pretrained", "write model.weights=DEFAULT"),
        ("data_root", "did you mean 'data.root'?"),
        ("data.skip_broken", None),
        ("outputs", None),
        ("max_steps", None),
        ("x", None),
    ],
)
def test_hints(key, hint):
    keys = {name: [*each.defaults] for name, each in keys_of().items()}
    line = f"'{key}' is not a key of the config; {hint or f'see {PROGRAM} list keys'}"
    assert unknown_key(key, keys, CHOSEN) == line


def test_other_names_stand_for_what_is_there_and_are_no_keys_themselves():
    keys = {*keys_of(), *groups}
    assert {key.partition("=")[0] for key in OTHER_NAMES.values()} - keys == set()
    assert keys & {*OTHER_NAMES} == set()
    for override in OTHER_NAMES.values():
        if "=" in override:
            effloop.compose(["model=torchvision", "model.arch=resnet18", override])


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key(key):
    plain = effloop.config.to_dict(effloop.config.compose([]))
    group, name = key.split(".")
    old = {**plain, group: {**plain.get(group, {}), name: None}}
    assert effloop.config.to_dict(effloop.config.from_dict(old, [], "old")) == plain
    with pytest.raises(ConfigError, match=f"'{key}' was removed; "):
        effloop.config.compose([f"{key}=4"])
    old[group][name] = 4
    if group not in ("record", "engine"):
        with pytest.raises(ConfigError, match=f"'{key}' was removed; "):
            effloop.config.from_dict(old, [], "old")
    else:
        assert effloop.config.to_dict(effloop.config.from_dict(old, [], "old")) == plain


@pytest.mark.parametrize("way", ["typed", "experiment", "saved"])
def test_a_deprecated_key(way, tmp_path, capsys):
    """It sets what it is called now, wherever it stands; a new run's config and the list of keys don't have it."""
    (old, (new, version)), value = next(iter(RENAMED.items())), 7.0
    group, name, new_name = *old.split("."), new.partition(".")[2]
    warn.cache_clear()
    if way == "typed":
        config = effloop.config.compose([f"{old}={value}"])
    elif way == "experiment":
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\n{group}:\n  {name}: {value}\n")
        config = compose_run(["--config-dir", str(tmp_path)], ["experiment=mine"]).config
    else:
        plain = effloop.config.to_dict(effloop.config.compose([]))
        del plain[group][new_name]
        config = effloop.config.from_dict({**plain, group: {**plain[group], name: value}}, [], "old")
    saved = effloop.config.to_dict(config)[group]
    assert (saved[new_name], name in saved, old in keys_of()) == (value, False, False)
    said = f"{old} is deprecated, and version {version} will not take it; write {new}={value}"
    assert (said in capsys.readouterr().err) == (way != "saved")  # nobody can write that one again


def test_a_run_that_was_resized_otherwise(capsys):
    plain = effloop.config.to_dict(effloop.config.compose([]))
    old = {**plain, "augment": {**plain["augment"], "resize": "fast"}}
    assert effloop.config.to_dict(effloop.config.from_dict(old, [], "old")) == plain
    assert "augment.resize=fast was removed" in capsys.readouterr().err

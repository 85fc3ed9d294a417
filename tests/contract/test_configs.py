"""Every YAML file and every registered part: it composes, builds, and says what it is."""

import pytest
import torch
from ranks import environment, free_port
from torch import nn

import effloop
from effloop.batch import ImageSize
from effloop.config import Config, finish, from_dict, to_dict
from effloop.config import hydra_setup as search
from effloop.data.augment import augments
from effloop.data.decode import decoders
from effloop.model import models
from effloop.optim import optimizers, schedules
from effloop.parallel import parallels
from effloop.precision import precisions
from effloop.registry import groups

ROOT = search.config_root()
FILES = sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.glob("*/*.yaml"))
PARTS = sorted(f"{group}/{name}" for group, parts in groups.items() for name in parts)
NEEDS = {
    "model/torchvision": ["model.arch=resnet18"],
    "model/timm": ["model.arch=resnet18"],
    "data/beton": ["data.root=."],
    "data/cifar": ["data.root=."],
    "data/folder": ["data.root=."],
    "data/idx": ["data.root=."],
    "data/npz": ["data.root=."],
    "data/zip": ["data.root=."],
    "data/csv": ["data.root=."],
    "data/dali": ["data.root=."],
    "data/lmdb": ["data.root=."],
    "data/hdf5": ["data.root=."],
    "data/hf": ["data.root=."],
    "data/masks": ["data.root=."],
    "data/memmap": ["data.root=."],
    "data/parquet": ["data.root=."],
    "data/pth": ["data.root=."],
    "data/recordio": ["data.root=."],
    "data/tfrecord": ["data.root=."],
    "data/zarr": ["data.root=."],
    "data/tar": ["data.root=."],
    "optim/timm": ["optim.arch=lamb"],
    "optim/torch": ["optim.arch=RAdam"],
    "precision/tf32": [],
}


@pytest.mark.parametrize("name", sorted({*FILES, *PARTS}))
@pytest.mark.slow
def test_composes_and_builds(name):
    group, _, choice = name.partition("/")
    words = [f"{group}={choice}", *NEEDS.get(name, [])]
    tree = search.compose_tree(words)
    config = finish(search.without_hydra(tree), words)
    plain = to_dict(config)
    assert to_dict(from_dict(plain, [], "a saved config")) == plain
    if group == search.EXPERIMENT:
        return
    part = getattr(config, group)
    assert part.name in groups[group]
    assert part.name == choice or name not in PARTS
    if name in PARTS and group in ("optim", "schedule", "augment"):
        optimizer = optimizers.build(config.optim, [nn.Parameter(torch.zeros(1))])
        schedules.build(config.schedule, optimizer, updates=10)
        augments.build(config.augment, size=ImageSize.of(16), train=True)
    if group == "decode":
        decoders.build(config.decode)


def test_groups_and_folders_are_the_same():
    assert set(groups) == set(Config.GROUPS)
    assert {path.name for path in ROOT.iterdir() if path.is_dir()} <= {*groups, "experiment"}


def test_files_and_parts_say_what_they_are():
    for name in FILES:
        lines = (ROOT / f"{name}.yaml").read_text().splitlines()
        comment = lines[1] if lines[0].startswith("# @package") else lines[0]
        assert comment.startswith("# "), name
        assert len(comment) <= 90, name
    for name in PARTS:
        group, _, choice = name.partition("/")
        entry = groups[group][choice]
        assert 10 < len(entry.summary) <= 110, name
        assert entry.config.__doc__, name


@pytest.mark.parametrize("name", parallels.names())
def test_parallel_sums(name, monkeypatch):
    for key, value in environment(0, 1, free_port()).items():
        monkeypatch.setenv(key, value)
    parallel = parallels.build(effloop.compose([f"parallel={name}"]).parallel, torch.device("cpu"))
    assert parallel.rank < parallel.world_size
    assert torch.equal(parallel.sum(torch.ones(3)), torch.full((3,), float(parallel.world_size)))
    parallel.close()


@pytest.mark.parametrize("name", ["fp32", "bf16", "amp"])
def test_precision_trains_on_the_cpu(name):
    config = effloop.compose([f"precision={name}"])
    assert config.precision is not None
    precision = precisions.build(config.precision, torch.device("cpu"))
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with precision.autocast():
        logits = model(torch.ones(3, 4))
    assert logits.dtype == (torch.float32 if name == "fp32" else torch.bfloat16)
    precision.backward(logits.float().sum())
    precision.step(optimizer)
    assert model.weight.dtype == torch.float32
    assert not torch.equal(model.weight, before)
    precision.load_state_dict(precision.state_dict())


def test_every_model_of_torchvision_composes_by_name():
    import torchvision.models as zoo

    lazy = models.named_lazily()
    assert set(lazy) == {*zoo.list_models(module=zoo), *zoo.list_models(module=zoo.segmentation)}
    assert all(config.name == "torchvision" and config.arch == arch for arch, config in lazy.items())
    for arch in ("mobilenet_v3_small", "fcn_resnet50"):
        assert effloop.compose([f"model={arch}"]).model == lazy[arch]


def test_default_is_the_table_of_contents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = effloop.compose()
    assert config.data.name == "auto"
    assert config.precision is not None
    assert config.precision.name == "fp32"
    assert effloop.compose(["amp=true"]).precision.name == "amp"
    assert effloop.compose(["lr=0.5"]).optim.lr == 0.5
    assert effloop.compose(["optim.lr=0.25"]).lr == 0.25

"""Every recipe of configs/experiment: composes, builds, trains two steps and is evaluated, on a CPU and tiny images."""

import math
import re
from pathlib import Path

import pytest
import torch
from masked import make_masks
from plans import line
from runs import call, make_photos, rows

import effloop
from effloop import config as configs
from effloop.assemble.environment import resolved
from effloop.assemble.model import build_model
from effloop.config import hydra_setup as search
from effloop.errors import ConfigError
from effloop.model import parameter_groups
from effloop.optim import scaled_lr

FOLDER = search.config_root() / "experiment"
DOCS = Path(__file__).parents[2] / "docs/recipes.md"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
TITLE = re.compile(r"# .{20,98}")
FACTS = {key: re.compile(rf"(?m)^# {key}: (.+(?:\n#   .+)*)$") for key in ("source", "score", "cost", "differs")}
NARROW = {
    "embedded": ["data=auto", "model.width=4", "image_size=16"],
    "digits": ["model.width=4", "image_size=16"],
    "cifar10_airbench": ["model.width=4", "augment.ops.start={op:Resize,size:32}", "augment.order=[start,crop,flip]"],
    "cifar10_fast": ["image_size=24"],
    "finetune": ["model=cnn", "model.width=4", "image_size=16"],
    "probe": ["model=cnn", "model.width=4", "image_size=16", "probe=1"],
    "nuclei": ["model.width=4", "model.depth=2", "image_size=16"],
    "unet": ["model.width=4", "image_size=32"],
    "deeplabv3": ["model.backbone_weights=null", "image_size=32"],
    "vit_finetune": ["model.arch=vit_tiny_patch16_224", "image_size=32"],
    "imagenet_resnet50_8gpu": ["model=resnet18", "image_size=48", "progressive=[32,48]", "parallel.processes=2"],
}
"""What makes a recipe small enough for a test, where it isn't the size of its images alone; the rest of it stays."""
OF_MASKS = ("nuclei", "unet", "deeplabv3")
VARIANTS = ("rsb_a1", "rsb_a2", "imagewoof", "deit_s", "efficientnetv2_s", "torchvision_resnet50")
PRETRAINED = ("finetune", "probe", "vit_finetune")

every_recipe = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two batches of four, and an evaluation that they don't divide; no side is under 32 pixels."""
    return make_photos(tmp_path_factory.mktemp("photos"), train=8, val=3)


@pytest.fixture(scope="module")
def weights(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state dict of the model that fine-tuning is tried with, for seven classes."""
    config = effloop.compose([f"data.root={root}", "model.width=4", "image_size=16", "seed=7"])
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    torch.save(build_model(resolved(config), 7, torch.device("cpu")).state_dict(), path)
    return path


def given(name: str, weights: Path | None = None) -> list[str]:
    """The recipe, from other weights if it has some."""
    return [
        f"experiment={name}",
        *[f"model.weights={'null' if name == 'vit_finetune' else weights}"]
        * (name in PRETRAINED and weights is not None),
    ]


def tiny(name: str, root: Path, weights: Path) -> list[str]:
    if name in OF_MASKS:
        root = make_masks(root / "masks", {"train": 8, "val": 3})
    few = [
        "batch_size=4",
        "global_batch=null",
        "eval_image_size=null",
        "num_workers=0",
        "device=cpu",
        "record.tensorboard=false",
        "run=run",
        f"data.root={root}",
    ]
    return [*given(name, weights), *few, *NARROW.get(name, ["image_size=32"])]


@every_recipe
def test_says_what_it_is_and_how_to_call_it(name):
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert TITLE.fullmatch(lines[1])
    assert lines[2].startswith(f"# effloop experiment={name}")
    assert max(map(len, lines)) <= 120


@every_recipe
def test_says_where_it_is_from_and_the_docs_say_the_same(name):
    text = (FOLDER / f"{name}.yaml").read_text()
    found = {key: (form.findall(text) or [""])[0] for key, form in FACTS.items()}
    assert all(found.values())
    title = text.splitlines()[1].removeprefix("# ").removesuffix(".")
    assert f"| `{name}` | {title} | {found['score']} | {found['cost']} |" in DOCS.read_text()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in VARIANTS else pytest.mark.slow)
        for name in RECIPES
        if not name.endswith("gpu")
    ],
)
def test_trains_two_steps_and_is_evaluated(name, root, weights, here):
    config = effloop.compose([*tiny(name, root, weights), "epochs=1", "optim.lr=1e-3"])
    config.schedule.warmup_epochs = 0  # of more epochs than one
    trainer = effloop.build_trainer(config)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    scores = trainer.fit()
    assert trainer.progress.step == 2
    assert all(map(math.isfinite, scores.values()))
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("gpu")])
def test_ranks_train_a_step_at_each_size_and_evaluate(name, root, weights, here):
    code, out, err = call(*tiny(name, root, weights), "epochs=2", cwd=here)
    assert code == 0, err
    assert "2 (ranks)" in out
    last = rows(here / "outputs" / "run")[-1]
    assert all(math.isfinite(value) for value in last.values() if isinstance(value, float))


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("embedded", "imagenet_resnet50_8gpu")])
def test_data_has_to_be_given(name, here):
    config = effloop.compose([*given(name), "device=cpu"])
    with pytest.raises(ConfigError, match=line("data.root is missing; data=auto needs it: set data.root=PATH")):
        effloop.build_trainer(config)
    assert not list(here.iterdir())


def test_fine_tuning_has_weights_of_its_own_and_their_normalisation():
    own = effloop.compose(["experiment=finetune"])
    assert (own.model.name, own.model.weights) == ("efficientnet_lite0", "DEFAULT")
    assert own.model.zoo is not None
    assert own.model.zoo.weights("DEFAULT", own.image_size)[1] == (
        tuple(own.data.mean or ()),
        tuple(own.data.std or ()),
    )
    other = effloop.compose(["experiment=finetune", "model=resnet50", "model.weights=DEFAULT"])
    assert (other.data.mean, other.data.std) == (effloop.compose([]).data.mean, effloop.compose([]).data.std)


def test_embedded_is_the_default_run():
    recipe, default = (configs.to_dict(effloop.compose([*words, "run=run"])) for words in ([given("embedded")[0]], []))
    assert (recipe["data"].pop("name"), default["data"].pop("name")) == ("embedded", "auto")
    of_others = dict.fromkeys(("targets", "classes", "image", "label", "mask", "colors", "images"))
    of_others["reduce_zero"] = False
    assert {key: default["data"].pop(key) for key in of_others} == of_others  # of other formats
    assert recipe == default
    one, other = (effloop.build_loader(effloop.compose(words), "val") for words in (given("embedded"), []))
    assert one.plan.source.fingerprint() == other.plan.source.fingerprint()


def test_fine_tuning_starts_from_the_weights_and_leaves_the_head(root, weights, here):
    trainer = effloop.build_trainer(effloop.compose(tiny("finetune", root, weights)))
    with trainer.recorder:
        saved, ours = torch.load(weights, weights_only=True), trainer.model.state_dict()
    assert all(torch.equal(saved[key], ours[key]) for key in saved if not key.startswith("head."))
    assert ours["head.weight"].shape == (3, 32)


@pytest.mark.parametrize(
    ("name", "images", "lr"),
    [  # as their sources have them, and by linear scaling from there
        ("imagenet_resnet50", 256, 0.256),
        ("imagenet_resnet50", 2048, 2.048),
        ("imagenet_resnet50_8gpu", 8 * 512, 1.7),
        ("imagenet_resnet50_8gpu", 4 * 512, 0.85),
        ("cifar10_fast", 512, 0.4),
    ],
)
def test_the_rate_follows_the_images_of_an_update(name, images, lr):
    assert scaled_lr(effloop.compose(given(name)).optim, images) == pytest.approx(lr)


def test_norms_and_biases_do_not_decay():
    config = effloop.compose([*given("finetune"), "model=resnet18", "model.weights=null", "image_size=32"])
    model = build_model(resolved(config), 2, torch.device("cpu"))
    optim = config.optim
    groups = parameter_groups(model, decay_norm_and_bias=optim.decay_norm_and_bias, weight_decay=optim.weight_decay)
    decays = {len(each.shape) > 1: group["weight_decay"] for group in groups for each in group["params"]}
    assert decays == {True: config.optim.weight_decay, False: 0.0}

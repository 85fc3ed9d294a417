"""What is refused beside the list of `test_bad_input.py`: one line, exit code 2, nothing is trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra.errors import MissingConfigException
from runs import TINY, call, make_photos, once

from effloop.cli.main import main
from effloop.config import Config
from effloop.config.messages import in_one_line
from effloop.errors import PROGRAM, ConfigError


class Refusal:
    """Calls the command line and returns its one line of refusal."""

    def __init__(self, photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.photos, self.here, self.capsys = photos, here, capsys

    def __call__(self, *args: str) -> str:
        before = list(self.here.iterdir())
        assert main(list(args)) == 2
        out, err = self.capsys.readouterr()
        assert re.fullmatch(r"effloop: .+\n", err), err  # one line, and no newline but its own
        assert out == ""
        assert list(self.here.iterdir()) == before
        return err

    def of(self, *overrides: str) -> str:
        """The line for a tiny run with these overrides."""
        return self(*once(f"data.root={self.photos}", *TINY, *overrides))


@pytest.fixture
def refused(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    return Refusal(photos, here, capsys)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        pytest.param("batchsize=3", "'batchsize' did you mean 'batch_size'?", id="1-root-key"),
        pytest.param("+momentum=1", "'momentum' did you mean 'optim.momentum' of optim=sgd?", id="1-added-key"),
        pytest.param(
            "+optim._target_=os.system", "optim._target_: a config names no code optim=NAME; have adamw", id="8"
        ),
        pytest.param("engine.start_method=fork", "'engine.start_method' engine=processes has it", id="1-other-part"),
        pytest.param("batch_size=1.5", "batch_size: '1.5' set a whole number", id="2-float-for-int"),
        pytest.param("amp=perhaps", "amp: 'perhaps' set true, false or null", id="2-bool"),
        pytest.param("optim.betas=0.9", "optim.betas: '0.9' set a list of numbers, [0.1,0.2]", id="2-number-for-list"),
        pytest.param("~optim.lr", "~optim.lr: only an entry of a dictionary", id="2-deleted"),
        pytest.param("+optim=sgd", "+optim: 'optim' is set already; leave out the '+'", id="2-added-part"),
        pytest.param("model=???", "model is missing; choose one by model=NAME", id="3-part"),
        pytest.param("run=${run}", "run: in a circle; set run=", id="6-cycle-of-one"),
        pytest.param("lr=${optim.lrr}", "lr: 'optim.lrr' not found", id="6-dangling"),
        pytest.param("batch_size=-8", "batch_size: -8 set a whole number above 0, e.g. 1", id="10-negative"),
        pytest.param("batch_size=64", "batch_size: 64 the 40 samples set batch_size=40", id="10-more-than-samples"),
        pytest.param("accumulate=6", "accumulate: 6 the 5 batches set accumulate=5", id="10-accumulate"),
        pytest.param("num_workers=-1", "num_workers: -1 set auto, 0 or", id="10-workers"),
        pytest.param("optim.lr=inf", "optim.lr: inf set a finite number above 0", id="11-infinite"),
        pytest.param("-m seed=choice()", "seed=choice(): 0 values give at least one", id="12-empty-choice"),
        pytest.param("seed=choice(1,2)", "seed=choice(1,2): add -m", id="12-choice-without-m"),
        pytest.param("-m --cfg job", "-m --cfg job: a single run; leave out -m", id="12-printed"),
        pytest.param("seed=1,2", "seed=1,2: add -m", id="12-sweep-without-m"),
        pytest.param("decode=pilow", "decode: 'pilow' have auto, opencv did you mean 'pillow'?", id="13-decoder"),
        pytest.param("model=resnet51", "model: 'resnet51' did you mean 'resnet50'?", id="13-model"),
        pytest.param("experiment=nope", "experiment: 'nope' have cifar10_fast, digits", id="13-experiment"),
        pytest.param("data=dalli", "data: 'dalli' csv, folder, npz, did you mean 'dali'?", id="13-preset"),
        pytest.param("data=/a/pets", "data: '/a/pets' did you mean data.root=/a/pets?", id="data-is-a-path"),
        pytest.param("data=s3://b/pets", "data: 's3://b/pets' did you mean data.root=s3://b/pets?", id="data-is-a-url"),
        pytest.param("data.root=s3:/b/pets", "'s3:/b/pets' two slashes: data.root=s3://b/pets", id="slash-too-few"),
        pytest.param("data.root=http:h/pets", "'http:h/pets' data.root=http://h/pets", id="slashes-too-few"),
        pytest.param("data.name=memmap", "data.name: 'memmap' by data=memmap", id="13-name-alone"),
        pytest.param("lr=1 optim.lr=2", "optim.lr=2 contradicts lr=1; drop one of them", id="14-two-names"),
        pytest.param("optim=null", "optim=null: GROUP=NAME", id="13-null"),
        pytest.param("precision=tf32 device=cpu", "'tf32' supports fp32, bf16, amp", id="14-tf32"),
        pytest.param("amp=true precision=fp32", "amp: true contradicts precision=fp32", id="14-contradiction"),
        pytest.param("image_size=0", "image_size: 0 [height,width]", id="image-size-0"),
        pytest.param("device=gpu", "device: 'gpu' auto, cpu, cuda", id="device"),
        pytest.param("device=cuda:99", "device: 'cuda:99' set device=cpu", id="device-not-there"),
        pytest.param("data.train_split=lr=3", "'data.train_split=\"lr=3\"'", id="unquoted"),
        pytest.param("seed", "'seed' KEY=VALUE", id="no-value"),
        pytest.param("--batch-size 64", "'--batch-size' write batch_size=64", id="dashes"),
        pytest.param("--data.root=/x", "'--data.root=/x' write data.root=/x", id="dashes-with-value"),
        pytest.param("-b 64", "'-b' write batch_size=64", id="dash"),
        pytest.param("--pretrained", "'--pretrained' write model.weights=DEFAULT", id="dashes-other-name"),
        pytest.param("lr = 0.1", "'=' blanks write lr=0.1", id="blanks"),
        pytest.param("--colour", "'--colour' is not a flag", id="flag"),
        pytest.param("--experimental-rerun=x.pickle", "is not a flag", id="flag-that-unpickles"),
        pytest.param("resume=nope", "'nope' is not there name a run folder", id="resume-missing"),
    ],
)
def test_config(refused: Refusal, override: str, words: str) -> None:
    _has(refused.of(*override.split()), words)


@pytest.mark.slow  # 0.2 s each
@pytest.mark.parametrize(
    ("override", "words"),
    [
        pytest.param("batch_size=[8]", "batch_size: '[8]' set a whole number", id="2-list-for-int"),
        pytest.param("lr=fast", "lr: 'fast' set a number or null", id="2-float"),
        pytest.param("num_workers=1.5", "num_workers: '1.5' set a whole number or auto", id="2-either"),
        pytest.param("data.train_split=null", "data.train_split: 'null' set a text", id="2-null"),
        pytest.param(
            "optim.layer_decay=0", "optim.layer_decay: 0.0 a factor above 0, at most 1, or null", id="layer-decay"
        ),
        pytest.param("optim.layer_decay=1.1", "optim.layer_decay: 1.1 a factor above 0", id="layer-decay-above-1"),
        pytest.param("optim.head_lr=-1", "optim.head_lr: -1.0 a finite number above 0, or null", id="head-lr"),
        pytest.param(
            "probe=1 optim.layer_decay=0.5",
            "optim.layer_decay: a probe trains the last layer only",
            id="layer-decay-probe",
        ),
        pytest.param("sweep=true", "sweep: set sweep.resume=VALUE or sweep.prune=VALUE", id="2-value-for-group"),
        pytest.param("lr.x=1", "'lr.x' is not a key lr takes a number or null", id="2-key-of-a-value"),
        pytest.param("hydra.job.num=x", "hydra.job.num: 'x' set a whole number", id="2-of-hydra"),
        pytest.param("~optim", "~optim: only an entry of a dictionary", id="2-deleted-part"),
        pytest.param("+optim.lr=1", "+optim.lr: 'optim.lr' is set already; leave out the '+'", id="2-added-again"),
        pytest.param("optim@x=sgd", "optim@: write optim=NAME", id="2-placed"),
        pytest.param("optim=[adamw,sgd]", "optim=[adamw,sgd]: write optim=NAME", id="2-two-parts"),
        pytest.param("a..b=1", "'a..b' is not a key", id="2-no-key"),
        pytest.param("model=timm", "'model.width' model=cnn has it", id="3-key-of-other-model"),
        pytest.param("lr=${nope:1}", "lr: nope ${KEY}", id="6-resolver"),
        pytest.param("run=${oc.env:NOT_SET_HERE}", "run: 'NOT_SET_HERE' not found set run=", id="7-in-the-run-folder"),
        pytest.param("epochs=0", "epochs: 0 set a whole number above 0", id="10-epochs"),
        pytest.param("eval_every=0", "eval_every: 0 set a whole number above 0", id="10-eval-every"),
        pytest.param("eval_every=-1", "eval_every: -1 set a whole number above 0", id="10-eval-every-negative"),
        pytest.param("image_size=8", "image_size: 8 set 16 or more", id="10-image-size"),
        pytest.param("threads=0", "threads: 0 set auto or a whole number above 0", id="10-threads"),
        pytest.param("optim.weight_decay=-1", "optim.weight_decay: -1.0 at least 0", id="11-weight-decay"),
        pytest.param("schedule.warmup_ratio=2", "schedule.warmup_ratio: 2.0 a share from 0 to below 1", id="11-warmup"),
        pytest.param("record.samples=-1", "record.samples: -1 set a number from 0 (none) to 64", id="11-samples"),
        pytest.param("record.samples=65", "record.samples: 65 set a number from 0 (none) to 64", id="11-many-samples"),
        pytest.param("seed=-1", "seed: -1 from 0 to", id="11-seed"),
        pytest.param("objective=val/top5", "objective: 'val/top5' val/top1, val/loss", id="13-top5-of-3"),
        pytest.param("checkpoint.best_by=f1", "checkpoint.best_by: 'f1' top1, top5, loss", id="13-enum"),
        pytest.param("experiment=null", "experiment=null: GROUP=NAME", id="13-null-experiment"),
        pytest.param("amp=false precision=bf16", "amp: false contradicts precision=bf16", id="14-other-contradiction"),
        pytest.param("run=a/../../x", "run: 'a/../../x' out=FOLDER", id="16-climbs-out-later"),
        pytest.param("out=", "out: '' e.g. out=outputs", id="16-empty-out"),
        pytest.param("run=", "run: '' out=FOLDER", id="16-empty"),
        pytest.param("data.channels=2", "data.channels: 2 set 3 (RGB) or 1 (grey)", id="channels"),
        pytest.param("data.mean=[0.5]", "data.mean: [0.5] set three finite numbers", id="mean-of-one"),
        pytest.param("data.channels=1 data.std=[1,1]", "data.std: [1.0, 1.0] set one finite number", id="std-of-two"),
        pytest.param("decode.window=[5,5]", "decode.window: [5, 5] set [low,high]", id="window-of-nothing"),
        pytest.param("decode.window=[1,2,3]", "decode.window: [1, 2, 3] set [low,high]", id="window-of-three"),
        pytest.param("decode.window=wide", "decode.window: wide set [low,high] auto or null", id="window-word"),
        pytest.param("image_size=[24]", "image_size: [24] [height,width]", id="image-size-of-one"),
        pytest.param("image_size=[24,40,3]", "image_size: [24, 40, 3] [height,width]", id="image-size-of-three"),
        pytest.param("image_size=[24,4.5]", "image_size: [24, 4.5] [height,width]", id="image-size-float"),
        pytest.param("image_size=wide", "image_size: wide [height,width]", id="image-size-word"),
        pytest.param("progressive=[16,[24]]", "progressive: [24] [height,width]", id="progressive-of-one"),
        pytest.param("data.mean=null data.std=null", "data.mean: null uint8 set data.mean", id="uint8-model"),
        pytest.param("lr= 0.1", "'lr= 0.1' blanks write lr=0.1", id="blank-after"),
        pytest.param("lr =0.1", "'=0.1' blanks write lr=0.1", id="blank-before"),
        pytest.param("--cfg nope", "--cfg: 'nope' have job, hydra, all", id="flag-value"),
    ],
)
def test_other_values(refused: Refusal, override: str, words: str) -> None:
    _has(refused.of(*override.split()), words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "words"),
    [
        pytest.param("augment=nativ", "augment: 'nativ' did you mean 'native'?", id="augment"),
        pytest.param(
            "augment=torchvision_rnd",
            "augment: 'torchvision_rnd' have albumentations, native, torchvision, did you mean 'torchvision_rand'?",
            id="augment-recipe",
        ),
        pytest.param("+augment.flip=0", "'augment.flip' is not a key", id="augment-added-key"),
        pytest.param("augment.opps.flip=null", "'augment.opps' did you mean 'augment.ops'?", id="augment-key"),
        pytest.param("augment.ops.blur.p=1", "augment.ops.blur: 'blur' have CenterCrop", id="augment-operation"),
        pytest.param(
            "augment.ops.flp.p=0.3",
            "augment.ops.flp: 'flp' the recipe has crop, flip; did you mean 'flip'? A new one needs {op: NAME}",
            id="augment-nearest-label",
        ),
        pytest.param(
            "augment.ops.flip.op=RandomHorizontalFlp",
            "augment.ops.flip: 'RandomHorizontalFlp' did you mean 'RandomHorizontalFlip'?",
            id="augment-nearest-operation",
        ),
        pytest.param(
            "augment.ops.crop.scael=[0.1,1]",
            "augment.ops.crop: 'scael' have size, scale, ratio; did you mean 'scale'?",
            id="augment-parameter",
        ),
        pytest.param("augment.ops.crop.scale=[0,1]", "augment.ops.crop.scale: [0, 1] above 0", id="augment-range"),
        pytest.param("augment.ops.crop.scale=[0.9,0.5]", "augment.ops.crop.scale: [0.9, 0.5]", id="augment-order"),
        pytest.param("augment.ops.crop.scale=[0.1,2]", "augment.ops.crop.scale: at most 1", id="augment-area"),
        pytest.param("augment.ops.crop.ratio=wide", "augment.ops.crop.ratio: wide", id="augment-text"),
        pytest.param("augment.ops.flip.p=1.5", "augment.ops.flip.p: 1.5 from 0 to 1", id="augment-probability"),
        pytest.param("augment.ops.flip.p=nan", "augment.ops.flip.p: nan from 0 to 1", id="augment-nan"),
        pytest.param("augment.ops.flip=3", "augment.ops.flip: 3 {op: NAME", id="augment-no-operation"),
        pytest.param("augment.ops.crop=null", "augment.ops: several sizes end it with a crop", id="augment-sizes"),
        pytest.param(
            "augment.ops.crop=null augment.ops.RandomCrop={} image_size=40",
            "augment.ops.RandomCrop.size: 40x40 is more than the 28x30 pixels resize before",
            id="augment-crop-too-large",
        ),
        pytest.param(
            "augment.ops.crop=null augment.ops.end={op:Resize,size:[20,20]}",
            "augment.ops: 20x20 image_size is 16 set image_size=20",
            id="augment-image-size",
        ),
        pytest.param("augment.order=[flip,corp]", "augment.order: 'corp' did you mean 'crop'?", id="augment-label"),
        pytest.param("augment.device=tpu", "augment.device: 'tpu' set cpu or gpu", id="augment-device"),
        pytest.param("augment.eval_ratio=1.2", "augment.eval_ratio: 1.2 at most 1", id="augment-eval-ratio"),
        pytest.param("augment.eval=stretch", "augment.eval: 'stretch' crop, letterbox or squash", id="augment-eval"),
        pytest.param(
            "augment.eval=squash augment.eval_ratio=0.8",
            "augment.eval_ratio: 0.8 squash takes all set augment.eval=crop",
            id="augment-eval-ratio-of-all",
        ),
        pytest.param("augment.eval=letterbox engine=dali", "engine: dali set engine=threads", id="augment-eval-dali"),
        pytest.param("augment.mixup=-1", "augment.mixup: -1.0 0 for none", id="augment-mixup"),
        pytest.param("augment.cutmix=inf", "augment.cutmix: inf", id="augment-cutmix"),
        pytest.param("augment=native_rand engine=dali", "engine: dali set engine=threads", id="augment-dali"),
    ],
)
def test_augmentation(refused: Refusal, override: str, words: str) -> None:
    _has(refused.of(*override.split()), words)


def test_a_rate_for_a_head_that_is_not_there(refused: Refusal) -> None:
    words = (f"data.root={refused.photos}", "model=squeezenet1_0", "image_size=32", "batch_size=8", "num_workers=0")
    line = refused(*words, "optim.head_lr=1")
    _has(line, "optim.head_lr: 1, but this model doesn't end with a linear layer; set optim.head_lr=null")


def _has(line: str, words: str) -> None:
    """Every word stands in the line, in this order."""
    assert re.search(".*?".join(re.escape(word) for word in words.split()), line), line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("trian", "'trian' is not a command; have train, did you mean 'train'?"),
        ("s3://b/pets", "'s3://b/pets' is not a command; did you mean data.root=s3://b/pets?"),
        (
            "verify s3://b/pets",
            "'s3://b/pets' is neither a command nor an override; did you mean data.root=s3://b/pets?",
        ),
        ("--verbose", "'--verbose' is not a flag"),
        ("data=folder", "data.root is missing; set data.root="),
        ("model=torchvision model.arch=resnet51", "model.arch: 'resnet51' did you mean 'resnet50'?"),
        ("model=timm model.arch=resnet51x", "model.arch: 'resnet51x' did you mean"),
        ("model=torchvision", "model.arch is missing"),
        ("=3", "GROUP=NAME"),
        ("list parts", "list: 'parts' have data, decode keys, ops"),
        ("list optim.lrr", "'optim.lrr' did you mean 'optim.lr'?"),
        ("bench what=nothing", "what: 'nothing' set loop"),
        ("bench repeats=0", "repeats: '0' a whole number from 1"),
        ("eval", f"eval needs RUN; see {PROGRAM} eval --help"),
        ("resume seed=1", f"resume needs RUN; see {PROGRAM} resume --help"),
        ("lr = 0.1", "'=' write lr=0.1"),
        ("convert --to lmdb", "'--to' write to=lmdb"),
        ("eval nope", "'nope' is not there; name a run folder or a .ckpt file"),
        ("resume nope", "'nope' is not a run folder"),
    ],
)
def test_commands(refused: Refusal, args: str, words: str) -> None:
    _has(refused(*args.split()), words)


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        pytest.param("epochs: [1,", "mine.yaml, line", id="4-broken"),
        pytest.param("- a", "experiment/mine.yaml: write lines KEY: VALUE", id="4-list"),
        pytest.param("defaults: adamw", "experiment/mine.yaml: defaults [override /GROUP: NAME]", id="4-defaults"),
        pytest.param("defaults:\n  - /optim: sgd", "optim: a second time; write 'override /optim: NAME'", id="4-twice"),
        pytest.param("defaults:\n  - override /optm: sgd", "'optm' is not a group did you mean 'optim'?", id="4-group"),
        pytest.param("optim: sgd", "experiment/mine.yaml: a part in defaults: [override /GROUP: NAME]", id="4-part"),
        pytest.param("epohs: 2", "'epohs' did you mean 'epochs'?", id="1-key"),
        pytest.param("epochs: two", "epochs: 'two' set a whole number", id="2-type"),
        pytest.param("defaults:\n  - override /optim: adam", "optim: 'adam' did you mean 'adamw'?", id="13-choice"),
    ],
)
def test_yaml(refused: Refusal, yaml: str, words: str) -> None:
    _experiment(refused.here, f"# @package _global_\n{yaml}\n")
    _has(refused.of("experiment=mine"), words)
    assert not (refused.here / "pwned").exists()


def test_experiment_without_its_package_line(refused: Refusal) -> None:
    _experiment(refused.here, "epochs: 2\n")
    _has(refused.of("experiment=mine"), "experiment: '# @package _global_'")


def _experiment(here: Path, text: str) -> None:
    folder = here / "configs" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(text)


def test_18_empty_split(refused: Refusal) -> None:
    (refused.here / "data/train").mkdir(parents=True)
    _has(refused.of("data.root=data"), f"{refused.here}/data/train .jpg, .png, .webp, .gif, .tif")


def test_18_no_such_split(refused: Refusal) -> None:
    (refused.here / "data/images").mkdir(parents=True)
    _has(refused.of("data.root=data"), "'data' has no folder 'train'; it has images: set data.train_split")


def test_22_not_an_image(refused: Refusal, tmp_path: Path) -> None:
    data = make_photos(tmp_path / "data", train=24, val=9)
    victim = data / "train" / "b" / "007.jpg"
    victim.write_bytes(b"<html>not found</html>")
    _has(refused.of(f"data.root={data}"), f"{victim} is not an image that Pillow reads b'<html>")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("optim.momentm=1", "'optim.momentm' did you mean 'optim.momentum' of optim=sgd?"),
        ("data.root=nope", "data.root: 'nope' is not there"),
        ("-m lr=1,2 --cfg", "--cfg: ''"),
    ],
)
def test_as_a_process(tmp_path: Path, args: str, words: str) -> None:
    code, out, err = call(*args.split(), cwd=tmp_path)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    _has(err, words)
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback(here: Path) -> None:
    with pytest.raises(Exception, match="batch_size: 0 is not allowed"):
        main(["--debug", "batch_size=0"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lr=interval(0.1,1)"], "lr=interval(0.1,1): an interval is for a search; add hydra/sweeper=optuna"),
        (["seeed=1,2"], "'seeed' is not a key of the config; did you mean 'seed'?"),
        (["sweep.resum=true"], "'sweep.resum' is not a key of the config; did you mean 'sweep.resume'?"),
        (["augment=native,nativ"], "augment: no choice 'nativ'; have "),
        (["seed=1,2", "hydra/launcher=nobodys"], "hydra/launcher: no choice 'nobodys'; have basic, "),
        (["seed=1,2", "objective=val/acc"], "objective: 'val/acc' is not measured; have val/top1, "),
        (["seed=1,2", "sweep.prune=true", "objective=wait"], "sweep.prune: runs are ended early by a validation score"),
        (["seed=1,2", "sweep.resume=true"], "holds no sweep; say which: run=NAME"),
    ],
)
def test_sweeps(overrides: list[str], words: str, refused: Refusal) -> None:
    assert words in refused.of("-m", *overrides)


@pytest.mark.parametrize(("choice", "extra"), [("launcher/ray", "ray"), ("sweeper/optuna", "optuna")])
def test_a_launcher_that_is_not_installed(choice: str, extra: str) -> None:
    """As Hydra tells of it where its package isn't there: here it is."""
    with pytest.raises(ConfigError) as caught, in_one_line(Config):
        raise MissingConfigException("", f"hydra/{choice}", options=["basic"])
    group = choice.partition("/")[0]
    line = f"hydra/{group}={extra} needs a package that isn't installed; pip install 'effloop[{extra}]'"
    assert str(caught.value) == line


def test_debug_may_come_before_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "list", "decode"]) == 0
    assert "pillow" in capsys.readouterr().out

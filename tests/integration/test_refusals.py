"""What is refused beside the list of `test_bad_input.py`: one line, exit code 2, nothing is trained."""

import re
from pathlib import Path

import pytest
from runs import TINY, call, once

from effloop.cli.main import main
from effloop.errors import PROGRAM


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


ROWS = [
    ("+momentum=1", "'momentum' did you mean 'optim.momentum' of optim=sgd?"),
    ("engine.start_method=fork", "'engine.start_method' was removed; workers are forked"),
    ("optim.betas=0.9", "optim.betas: '0.9' set a list of numbers, [0.1,0.2]"),
    ("+optim=sgd", "Multiple values for optim"),
    ("lr=${optim.lrr}", "lr: 'optim.lrr' not found"),
    ("batch_size=64", "batch_size: 64 the 40 samples set batch_size=40"),
    ("-m seed=choice()", "seed=choice(): 0 values give at least one"),
    ("-m --cfg job", "-m --cfg job: a single run; leave out -m"),
    ("seed=1,2", "seed=1,2: add -m"),
    ("data=s3://b/pets", "data: 's3://b/pets' did you mean data.root=s3://b/pets?"),
    ("data.root=s3:/b/pets", "'s3:/b/pets' two slashes: data.root=s3://b/pets"),
    ("parallel.virtual=0", "parallel.virtual: 0 is not allowed; set a whole number above 0, or null"),
    ("parallel.virtual=2 parallel=dp", "parallel: dp contradicts parallel.virtual=2 set parallel=none or ddp"),
    ("parallel.virtual=2 accumulate=3", "accumulate: 3 parallel.virtual=6 accumulate=1"),
    ("parallel.virtual=2 parallel=ddp parallel.sync_batchnorm=true", "parallel.sync_batchnorm: true contradicts"),
    ("parallel.virtual=2 compile=auto", "compile: auto contradicts parallel.virtual=2 set true or false"),
    ("parallel.virtual=2 cudnn_benchmark=true", "cudnn_benchmark: true contradicts parallel.virtual=2"),
    ("parallel.virtual=3 global_batch=8", "global_batch: 8 among parallel.virtual=3; set global_batch=9"),
    ("parallel.virtual=8", "batch_size: 64 the 40 samples set batch_size=5"),
    ("parallel.virtual=2 probe=1", "parallel.virtual: is for training on images set parallel.virtual=null"),
    ("data.name=memmap", "data.name: 'memmap' by data=memmap"),
    ("lr=1 optim.lr=2", "optim.lr=2 contradicts lr=1; drop one of them"),
    ("model=[resnet18,resnet50]", "model=[resnet18,resnet50]: one part is chosen; write model=NAME"),
    ("optim=null", "optim=null: GROUP=NAME"),
    ("data.train_split=lr=3", "'data.train_split=\"lr=3\"'"),
    ("seed", "'seed' KEY=VALUE"),
    ("--batch-size 64", "'--batch-size' write batch_size=VALUE"),
    ("--pretrained", "'--pretrained' write model.weights=DEFAULT"),
    ("--experimental-rerun=x.pickle", "is not a flag"),
]
SLOW = [  # 0.2 s each
    ("optim.lr_factors=[a]", "optim.lr_factors: '[a]' a dictionary, {KEY:VALUE}"),
    ("optim.layer_decay=0", "optim.layer_decay: 0.0 a factor above 0, at most 1, or null"),
    ("a..b=1", "'a..b' is not a key"),
    ("model=timm", "'model.width' model=cnn has it"),
    ("lr=${nope:1}", "lr: nope ${KEY}"),
    ("run=${oc.env:NOT_SET_HERE}", "run: 'NOT_SET_HERE' not found set run="),
    ("schedule.warmup_ratio=2", "schedule.warmup_ratio: 2.0 a share from 0 to below 1"),
    ("objective=val/top5", "objective: 'val/top5' val/top1, val/loss"),
    ("data.mean=[0.5]", "data.mean: [0.5] set three finite numbers"),
    ("decode.window=[1,2,3]", "decode.window: [1, 2, 3] set [low,high]"),
    ("image_size=[24,40,3]", "image_size: [24, 40, 3] [height,width]"),
    ("progressive=[16,[24]]", "progressive: [24] [height,width]"),
    ("data.mean=null data.std=null", "data.mean: null uint8 set data.mean"),
    ("--cfg nope", "--cfg: 'nope' job, hydra or all"),
    ("augment.ops.blur.p=1", "augment.ops.blur: 'blur' have CenterCrop"),
    ("augment.ops.flp.p=0.3", "augment.ops.flp: 'flp' did you mean 'flip' of the recipe? A new one needs {op: NAME}"),
    ("augment.ops.crop.scael=[0.1,1]", "augment.ops.crop: 'scael' have size, scale, ratio; did you mean 'scale'?"),
    ("augment.ops.crop.scale=[0.9,0.5]", "augment.ops.crop.scale: [0.9, 0.5]"),
    ("augment.ops.flip=3", "augment.ops.flip: 3 {op: NAME"),
    (
        "augment.ops.crop=null augment.ops.RandomCrop={} image_size=40",
        "augment.ops.RandomCrop.size: 40x40 is more than the 28x30 pixels resize before",
    ),
    (
        "augment.ops.crop=null augment.ops.end={op:Resize,size:[20,20]}",
        "augment.ops: 20x20 image_size is 16 set image_size=20",
    ),
    ("augment.order=[flip,corp]", "augment.order: 'corp' did you mean 'crop'?"),
    ("augment=native_rand engine=dali", "engine: dali set engine=threads"),
]


@pytest.mark.parametrize(
    ("override", "words"), [*ROWS, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_config(refused, override, words):
    _has(refused.of(*override.split()), words)


def test_a_rate_for_a_head_that_is_not_there(refused):
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
        ("data=folder", "data.root is missing; set data.root="),
        ("model=torchvision model.arch=resnet51", "model.arch: 'resnet51' did you mean 'resnet50'?"),
        ("=3", "GROUP=NAME"),
        ("list optim.lrr", "'optim.lrr' did you mean 'optim.lr'?"),
        ("eval", f"eval needs RUN; see {PROGRAM} eval --help"),
        ("resume nope", "'nope' is not a run folder"),
        ("launch lr=1", "launch needs to=slurm|skypilot|kubernetes|ray"),
        ("launch to=slrm", "to: 'slrm' did you mean 'slurm'?"),
        ("launch to=slurm nodes=0", "nodes: '0' from 1 to"),
        ("launch to=slurm gpus=x8", "gpus: x8 set N or TYPE:N"),
        ("launch to=slurm time=1d", "time: 1d set [DAYS-]HH:MM:SS"),
        ("launch to=slurm time=0-00:03:00", "time: 0-00:03:00 set 4 minutes or more"),
        ("launch to=slurm image=i", "image: to=slurm doesn't take it; set to=skypilot or to=kubernetes"),
        ("launch to=kubernetes image=i", "to=kubernetes needs storage="),
        ("launch to=kubernetes image=i storage=c gpus=H100:2", "gpus: H100:2 set N for Kubernetes"),
        ("launch to=skypilot image=i storage=s3://b", "gpus: 1 set TYPE:N for SkyPilot"),
        ("launch to=slurm gpus=2 parallel=dp", "parallel=dp nodes=1 gpus=2 are 2 ranks; set parallel=ddp"),
        ("launch to=slurm resume=outputs/x", "resume: not from outputs/x; leave it out"),
        ("launch to=ray", "out: 'outputs' would be in Ray's copy of this folder; set out=/FOLDER"),
        ("launch to=slurm -m lr=1,2", "launch: -m: a single run"),
        ("launch to=slurm options='", "options: ' is not what a shell takes: No closing quotation"),
        ("launch to=slurm data.root=/\x1b", "data.root= a character"),
        ("launch to=slurm file=/nosuch/x", "file: /nosuch/x can't be written: No such file"),
        ("launch to=slurm optm.lr=1", "'optm' did you mean 'optim'?"),
    ],
)
def test_commands(refused, args, words):
    _has(refused(*args.split()), words)


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        pytest.param("epochs: [1,", "mine.yaml, line", id="4-broken"),
        pytest.param("- a", "experiment/mine", id="4-list"),
        pytest.param("defaults:\n  - /optim: sgd", "optim override 'override optim: sgd'", id="4-twice"),
        pytest.param("defaults:\n  - override /optm: sgd", "'optm' did you mean 'optim'?", id="4-group"),
        pytest.param("optim: sgd", "experiment/mine", id="4-part"),
        pytest.param("epohs: 2", "'epohs' did you mean 'epochs'?", id="1-key"),
    ],
)
def test_yaml(refused, yaml, words):
    _experiment(refused.here, f"# @package _global_\n{yaml}\n")
    _has(refused.of("experiment=mine"), words)
    assert not (refused.here / "pwned").exists()


def _experiment(here: Path, text: str) -> None:
    folder = here / "configs" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(text)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("optim.momentm=1", "'optim.momentm' did you mean 'optim.momentum' of optim=sgd?"),
        ("-m lr=1,2 --cfg", "--cfg: ''"),
    ],
)
def test_as_a_process(tmp_path, args, words):
    code, out, err = call(*args.split(), cwd=tmp_path)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    _has(err, words)
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback(here):
    with pytest.raises(Exception, match="batch_size: 0 is not allowed"):
        main(["--debug", "batch_size=0"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lr=interval(0.1,1)"], "lr=interval(0.1,1): an interval is for a search; add hydra/sweeper=optuna"),
        (["seeed=1,2"], "'seeed' is not a key of the config; did you mean 'seed'?"),
        (["seed=1,2", "hydra/launcher=nobodys"], "hydra/launcher: no choice 'nobodys'; have basic, "),
        (["seed=1,2", "sweep.prune=true", "objective=wait"], "sweep.prune: runs are ended early by a validation score"),
        (["seed=1,2", "sweep.resume=true"], "holds no sweep; say which: run=NAME"),
    ],
)
def test_sweeps(overrides, words, refused):
    assert words in refused.of("-m", *overrides)

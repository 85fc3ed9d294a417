"""What the golden test pins: how each number comes about, and what it depends on.

Only EffLoop's public interface is used here, so that all behind it may be rebuilt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from images import encode, exif, photo
from runs import TINY, call, make_photos, once

import effloop
from effloop.cli.main import main

GOLDEN = Path(__file__).with_name("golden.json")

RECIPES = sorted(path.stem for path in Path(__file__).parents[2].glob("configs/augment/*.yaml"))

# What numbers depend on. `photos` and `kinds` stand for Pillow's encoders and NumPy's generators, which made images.
DECODING = ("photos", "numpy", "pillow", "opencv-python-headless", "torch", "capability")
LIBRARIES = {
    "native": DECODING,
    "torchvision": (*DECODING, "torchvision"),
    "albumentations": (*DECODING, "albumentations", "albucore"),
}
DALI = (*DECODING, "nvidia-dali-cuda120")
RECODING = DECODING
LEARNING = (*DECODING, "processor", "instructions")  # oneDNN chooses its kernels by the processor
WRITING = {
    "hdf5": ("photos", "h5py"),
    "lmdb": ("photos", "lmdb"),
    "parquet": ("photos", "pyarrow"),
    "pth": ("photos", "torch"),
}
PACKAGES = (
    *("albucore", "albumentations", "h5py", "lmdb", "numpy", "nvidia-dali-cuda120", "opencv-python-headless"),
    *("pillow", "pyarrow", "torchvision"),
)

FORMATS = ("folder", "hdf5", "lmdb", "memmap", "n5", "parquet", "pth", "recordio", "tar", "tfrecord", "zarr", "zarr2")
READ_BY = {"zarr2": "zarr", "n5": "zarr"}
UINT8 = ("data.mean=null", "data.std=null")
RUN = (*TINY, "epochs=3", "device=cpu", "record.log_every=1", "record.tensorboard=false")


class Lab:
    """A folder with tiny photographs, and with what is made of them as soon as a case asks for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.photos = make_photos(root / "photos", train=19, val=5)
        self.kinds = _make_kinds(root / "kinds")

    @functools.cached_property
    def environment(self) -> dict[str, str | None]:
        """All that numbers depend on, as it is here."""
        return {
            "photos": _sha256(repr(files(self.photos)).encode()),
            "kinds": _sha256(repr(files(self.kinds)).encode()),
            "torch": torch.__version__,
            **{package: _version(package) for package in PACKAGES},
            "capability": torch.backends.cpu.get_cpu_capability(),
            **_processor(),
        }

    @functools.cache  # noqa: B019  a lab lives as long as the process
    def converted(self, to: str, *options: str) -> Path:
        """The photographs in another format."""
        out = self.root / "-".join(("set", to, *options)).replace("=", "")
        assert main(["convert", f"data.root={self.photos}", f"to={to}", f"out={out}", *options]) == 0
        return out


def _make_kinds(root: Path) -> Path:
    """One image of each kind that decoders tell apart."""
    pixels, grey = photo(40, 50), photo(40, 50)[:, :, 0]
    kinds = {
        "full.jpg": encode(pixels, "JPEG", subsampling=0),
        "progressive.jpg": encode(pixels, "JPEG", progressive=True),
        "grey.jpg": encode(grey, "JPEG"),
        "cmyk.jpg": encode(pixels, "JPEG", mode="CMYK"),
        "turned.jpg": encode(pixels, "JPEG", exif=exif(6)),
        "plain.png": encode(pixels, "PNG"),
        "palette.png": encode(pixels, "PNG", mode="P"),
        "alpha.png": encode(pixels, "PNG", mode="RGBA"),
        "deep.png": encode(grey.astype("uint16") * 257, "PNG"),
        "lossy.webp": encode(pixels, "WEBP"),
        "plain.bmp": encode(pixels, "BMP"),
        "plain.ppm": encode(pixels, "PPM"),
    }
    for name, data in kinds.items():
        path = root / "val" / name.partition(".")[2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> dict[str, str | None]:
    """The name alone is no more than `Intel Xeon Processor` on many virtual machines."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    name = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.MULTILINE)
    vectors = sorted(flag for flag in flags[1].split() if re.match(r"avx|amx|fma|sve|asimd", flag)) if flags else []
    return {"processor": name[1] if name else platform.machine(), "instructions": " ".join(vectors)}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def files(root: Path) -> dict[str, str]:
    """Path below `root` -> SHA-256 of the content; of a single file too."""
    found = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): _sha256(path.read_bytes()) for path in found}


def composed(*overrides: str) -> effloop.Config:
    """A config; its engine is composed apart, so that several share the rest."""
    engine = [word for word in overrides if word.startswith(("engine", "num_workers="))]
    config = _composed(*(word for word in overrides if word not in engine))
    if not engine:
        return config
    chosen = _composed(*engine)
    return dataclasses.replace(config, engine=chosen.engine, num_workers=chosen.num_workers)


@functools.cache
def _composed(*overrides: str) -> effloop.Config:
    """Composed once for all cases: each takes 0.2 s."""
    some = ("image_size=24", "batch_size=8", "num_workers=0", "device=cpu", "data.check=0")
    return effloop.compose([*some, *overrides])


def loader(place: Path | None, split: str, *overrides: str) -> Any:
    """The batches of some data; None takes the embedded photographs."""
    return effloop.build_loader(composed(f"data.root={place}" if place else "data=embedded", *overrides), split)


def batches(root: Callable[[Lab], Path | None], split: str, *overrides: str, most: int = 4) -> Callable[[Lab], Any]:
    """Dtype, layout and bytes of the first batches of two epochs, hashed field by field."""

    def compute(lab: Lab) -> dict[str, str]:
        hashes = {field: hashlib.sha256() for field in ("images", "targets", "ids", "valid")}
        with contextlib.closing(loader(root(lab), split, *overrides)) as made:
            for epoch in (0, 1):
                for batch in itertools.islice(made.epoch(epoch), most):
                    for field, sha in hashes.items():
                        tensor = getattr(batch, field)
                        sha.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
                        sha.update(tensor.contiguous().numpy().tobytes())
        return {field: sha.hexdigest() for field, sha in hashes.items()}

    return compute


def fingerprint(root: Callable[[Lab], Path | None], *overrides: str) -> Callable[[Lab], Any]:
    """What a run folder says of its data."""

    def compute(lab: Lab) -> dict[str, Any]:
        loaders = {split: loader(root(lab), split, *overrides) for split in ("train", "val")}
        return {split: made.plan.source.fingerprint() for split, made in loaders.items()}

    return compute


def metrics(*commands: tuple[str, ...], photos: bool = True, apart: bool = False) -> Callable[[Lab], Any]:
    """`metrics.jsonl` after one or several commands: its SHA-256, and its end, which says by how much it differs.

    Args:
        commands: of which all but `resume` get the run's name and the data.
        photos: whether to train on the tiny ones instead of the embedded ones.
        apart: in a process of their own.
    """

    def compute(lab: Lab) -> dict[str, str]:
        folder = Path(lab.root, "runs", _sha256(repr(commands).encode())[:8])
        folder.mkdir(parents=True)
        for words in commands:
            if words[0] != "resume":
                words = ("train", "run=x", *([f"data.root={lab.photos}"] if photos else []), *words)
            if apart:
                code, _, said = call(*words, cwd=folder)
            else:
                with contextlib.chdir(folder), contextlib.redirect_stderr(io.StringIO()) as err:
                    code, said = main(once(*words)), err.getvalue()
            assert code == 0, said
        data = (folder / "outputs/x/metrics.jsonl").read_bytes()
        return {"sha256": _sha256(data), "end": data.decode().splitlines()[-1]}

    return compute


@dataclass(frozen=True)
class Case:
    """A value that must stay what it is.

    Attributes:
        key: where golden.json has it; cases that share a key have to agree.
        needs: the parts of the environment that it depends on.
        compute: the value, of JSON's types.
        slow: takes more than ten seconds.
    """

    key: str
    needs: tuple[str, ...]
    compute: Callable[[Lab], Any]
    slow: bool = False


def photos(lab: Lab) -> Path:
    return lab.photos


def kinds(lab: Lab) -> Path:
    return lab.kinds


def nowhere(lab: Lab) -> None:
    """The embedded photographs."""


def converted(to: str, *options: str) -> Callable[[Lab], Path]:
    return lambda lab: lab.converted(to, *options)


def written(to: str, *options: str) -> Callable[[Lab], Any]:
    return lambda lab: files(lab.converted(to, *options))


def _recipes() -> dict[str, Case]:
    """Whichever engine loads them, samples look the same; on the device they may differ by rounding."""
    cases = {}
    for recipe in RECIPES:
        needs, augment = LIBRARIES.get(recipe.split("_")[0], DECODING), f"augment={recipe}"
        engines = {"inline": ("engine=inline",), "threads": ("engine=threads", "num_workers=2", "engine.prefetch=1")}
        if "_" not in recipe:
            engines["processes"] = ("engine=processes", "num_workers=2")
        for engine, words in engines.items():
            cases[f"{recipe} {engine}"] = Case(recipe, needs, batches(photos, "train", augment, *UINT8, *words))
        cases[f"{recipe} val"] = Case("val", needs, batches(photos, "val", augment, *UINT8, *engines["inline"]))
        if recipe.split("_")[0] not in ("albumentations", "torchvision"):  # which run on the host only
            key, words = f"{recipe} on the device", ("augment.device=gpu", *UINT8)
            cases[key] = Case(key, needs, batches(photos, "train", augment, *words))
    return cases


def _engines() -> dict[str, Case]:
    """Processes and threads evaluate as inline does. DALI's pixels are its own; it takes recipes that only crop, resize
    and flip, by native operations, and others of which no more than that is left to the host.
    """
    val = {name: (f"engine={name}", "num_workers=2", *UINT8) for name in ("threads", "processes", "dali")}
    cases = {
        "val threads": Case("val", DECODING, batches(photos, "val", *val["threads"])),
        "val processes": Case("val", DECODING, batches(photos, "val", *val["processes"])),
        "val dali": Case("val dali", DALI, batches(photos, "val", *val["dali"])),
        "native dali": Case("native dali", DALI, batches(photos, "train", *val["dali"])),
        "native data=dali": Case("native dali", DALI, batches(photos, "train", "data=dali", *UINT8)),
    }
    for recipe in ("colour", "rand", "resize_crop", "resize_crop_jitter", "trivial"):
        key, words = f"native_{recipe} dali on the device", (f"augment=native_{recipe}", "augment.device=gpu")
        cases[key] = Case(key, DALI, batches(photos, "train", *words, *val["dali"]))
    return cases


def _options() -> dict[str, Case]:
    """What else changes batches, and what must not."""
    make = partial(batches, photos, "train")
    same = ("data.cache=bytes", "data.cache=pixels", "decode=turbojpeg")
    cases = {f"native {word}": Case("native", DECODING, make(word, *UINT8)) for word in same}
    several = ("engine.run_length=3", "num_workers=2", *UINT8)
    cases["native engine.run_length=3"] = Case("native", DECODING, make(*several))
    mixed = ("augment.mixup=0.2", "augment.cutmix=1.0")
    own = {
        "decode=opencv": ("decode=opencv", *UINT8),  # equal to `native` where all bring the same libjpeg-turbo
        "decode=pillow": ("decode=pillow", *UINT8),
        "decode.dct_scaling": ("decode.dct_scaling=true", "image_size=8", *UINT8),
        "seed=1": ("seed=1", *UINT8),
        "tail=wrap": ("data.tail=wrap", *UINT8),
        "channels_last=false": ("channels_last=false", *UINT8),
        "normalised": (),
        "mixup": mixed[:1],
        "cutmix": mixed[1:],
        "mixup and cutmix": mixed,
        "mixup and cutmix, uint8": (*mixed, *UINT8),
        "erasing": ("augment.ops.erase={op:RandomErasing,p:0.5}", *UINT8),
        "blur, affine": (
            "augment.ops.blur={op:GaussianBlur,kernel_size:3}",
            "augment.ops.affine={op:RandomAffine,degrees:20}",
            *UINT8,
        ),
    }
    cases |= {key: Case(key, RECODING if "pillow" in key else DECODING, make(*words)) for key, words in own.items()}
    needs = ("kinds", *RECODING[1:])
    for decoder in ("auto", "opencv", "pillow", "turbojpeg"):
        key = f"all kinds, decode={decoder}"
        cases[key] = Case(key, needs, batches(kinds, "val", f"decode={decoder}", "decode.exif=false", *UINT8))
    cases["normalised val"] = Case("normalised val", DECODING, batches(photos, "val"))
    cases["embedded"] = Case("embedded", DECODING[1:], batches(nowhere, "train", *UINT8))
    cases["embedded val"] = Case("embedded val", DECODING[1:], batches(nowhere, "val", *UINT8))
    return cases


def _formats() -> dict[str, Case]:
    """All formats give the same batches and the same fingerprint. No file that `convert` writes has a time, a version
    of EffLoop or a path in it, so all are hashed whole; three libraries write what is their own version's.
    """
    cases = {
        "fingerprint": Case("fingerprint", ("photos",), fingerprint(photos, *UINT8)),
        "fingerprint embedded": Case("fingerprint embedded", (), fingerprint(nowhere, *UINT8)),
    }
    for to in FORMATS:
        data = f"data={READ_BY.get(to, to)}"
        cases[f"files {to}"] = Case(f"files {to}", WRITING.get(to, ("photos",)), written(to))
        cases[f"native {to}"] = Case("native", DECODING, batches(converted(to), "train", data, *UINT8))
        cases[f"val {to}"] = Case("val", DECODING, batches(converted(to), "val", data, *UINT8))
        cases[f"fingerprint {to}"] = Case("fingerprint", ("photos",), fingerprint(converted(to), data, *UINT8))
    anew = (
        ("memmap", "max_side=24", "quality=80"),
        ("tar", "quality=source"),
        ("memmap", "restart=1"),
        ("lmdb", "payload=raw"),
        ("recordio", "color=gray"),
    )
    for to, *words in anew:
        name = " ".join((to, *words))
        needs = (*RECODING, *WRITING.get(to, ())[1:])
        cases[f"files {name}"] = Case(f"files {name}", needs, written(to, *words))
        cases[f"native {name}"] = Case(f"native {name}", needs, batches(converted(to, *words), "train", *UINT8))
        cases[f"fingerprint {name}"] = Case(f"fingerprint {name}", needs, fingerprint(converted(to, *words), *UINT8))
    return cases


def _runs() -> dict[str, Case]:
    """Sums are divided by threads: there is one."""
    steady = (*RUN, "schedule=constant", "schedule.warmup_ratio=0")
    computed = {
        "plain": metrics(RUN),
        "amp, 2 ranks": metrics((*RUN, "batch_size=4", "parallel=ddp", "parallel.processes=2", "amp=true"), apart=True),
        "accumulate and ema": metrics((*RUN, "accumulate=2", "optim.ema=0.9")),
        "resumed": metrics((*RUN, "epochs=1"), ("resume", "outputs/x", "epochs=3")),
        "progressive, mixed": metrics((*RUN, "progressive=[16,24]", "augment.mixup=0.2", "augment.cutmix=1.0")),
        "sgd, smoothed, cut": metrics((*RUN, "optim=sgd", "task.label_smoothing=0.1", "max_grad_norm=1.0")),
        "constant": metrics(steady),
    }
    cases = {f"metrics {key}": Case(f"metrics {key}", LEARNING, compute) for key, compute in computed.items()}
    halves = metrics((*steady, "epochs=1"), ("resume", "outputs/x", "epochs=3"))
    cases["metrics constant, resumed"] = Case("metrics constant", LEARNING, halves)
    needs = tuple(need for need in LEARNING if need != "photos")
    cases["metrics default"] = Case("metrics default", needs, metrics(("device=cpu",), photos=False), slow=True)
    return cases


CASES = {**_recipes(), **_engines(), **_options(), **_formats(), **_runs()}


def golden() -> dict[str, Any]:
    """What was recorded: `environment` and `values`."""
    return json.loads(GOLDEN.read_text())

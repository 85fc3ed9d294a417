"""Fields that every data source has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from omegaconf import MISSING

from effloop.data.remote.location import check_root, is_remote
from effloop.errors import ConfigError, check_value
from effloop.registry import PartConfig


class Tail(Enum):
    """What happens to the samples that don't fill the last global batch."""

    drop = "drop"  # left out of this epoch
    wrap = "wrap"  # the batch is filled from the beginning of the epoch
    pad = "pad"  # the batch is filled with images that don't count (`Batch.valid`); for evaluation


class Cache(Enum):
    """What is kept in memory after it was first read, one copy per machine."""

    none = "none"
    bytes = "bytes"  # the encoded image
    pixels = "pixels"  # the decoded image


class Index(Enum):
    """What is done with entropy indexes of JPEGs that have no restart markers."""

    auto = "auto"  # used, and built where they are missing
    read = "read"  # used where they are there
    none = "none"


@dataclass
class DataConfig(PartConfig):
    """Fields that every source has.

    Attributes:
        root: path of the dataset, or a URL: s3://BUCKET/PATH, gs://, az://, https:// and what fsspec reads, of a
            folder or a file, with braces and wildcards if wanted: s3://BUCKET/in1k-{train,val}-{000..127}.tar.
        train_split, val_split: names of the two splits in the dataset. `train` also stands for training, and `val` for
            valid, validation, dev, eval or, where there is nothing else, test. A `val_split` of null is none, for
            `val` and `folds`.
        val: share of the training samples that are held out for validation, by class, chosen by a hash of their names;
            null: the data has a validation split.
        folds, fold: instead, into how many folds the training samples are divided, by class, and which one of them
            validates, from 0. Without `folds` a column `fold` in the data says it.
        group: what isn't divided by `val` or `folds`, such as a patient: a column in the data, a regular expression for
            the names, with what to group by in parentheses, or copies, for those that `effloop audit` has found.
        split_seed: of the hash by which `val` and `folds` choose.
        exclude: a table with the names of samples that are left out, such as the CSV that `effloop audit` writes: a
            column `name`, and if wanted `split`, and `exclude` with 1 for those to leave out. `val` and `folds` divide
            before, so that all other samples stay on their sides.
        balance: from 0, where each class is trained on as often as it is in the data, to 1, where all classes are
            trained on equally often: its share is its number of samples to the power of 1 - `balance`, over the sum.
        repeats: how often each image comes in a row, each time augmented otherwise (repeated augmentation). An epoch is
            as long as ever, so that with 3 it sees a third of the images.
        tail: what training does with the samples that don't fill the last global batch: drop or wrap.
        check: number of samples per split, evenly spaced, whose header and end of file are checked before the
            first step; and of images of the same size that are read to find those that both splits have. 0 is none.
        cache: what is kept in memory, one copy per machine: none, bytes (encoded) or pixels (decoded).
        index: entropy indexes, with which only what a crop needs of a baseline JPEG is decoded: read uses those that
            `effloop index` or an earlier run has kept in the cache folder, auto also builds what is missing while data
            is read, in a sixth of the workers' time at most, none does neither. They take up to 3 % of the images'
            bytes. The pixels are the same to the bit.
        allow_missing_classes: a split may lack classes that the other one has, or have empty class folders. Labels then
            follow the training split; classes that only the validation split has come after.
        cache_gb: GB (10^9 bytes) for the cache of both splits; what doesn't fit is read from disk. null is half of
            the free memory.
        download_dir: folder for the files behind a URL, which runs share, and for what `effloop convert` writes to
            one; null is $XDG_CACHE_HOME/effloop/remote or ~/.cache/effloop/remote.
        download_gb: GB (10^9 bytes) that this folder may have; data that no run uses is removed for it. null is 80 % of
            the free disk.
        index_dir: folder for what is found out about data and kept: indexes of files that have none, copies of what
            can't be read in place, divisions, entropy indexes; null is $XDG_CACHE_HOME/effloop or ~/.cache/effloop.
        channels: 3 is RGB. 1 is grey, from the decoder to the model, in a third of the memory: of a colour JPEG its
            luminance as it is stored, of other colours Pillow's formula (0.299 R + 0.587 G + 0.114 B).
        mean, std: (R, G, B) in units of 0-1, used to normalize on the device; by default ImageNet's. Pretrained weights
            expect those of their training, which the line `weights` at the beginning of a run names. If both are null,
            images stay uint8. With `channels=1` one number each; three are averaged.
    """

    root_is_path: ClassVar[bool] = True  # whether `root` is a path, or a URL, rather than a name

    url_keys: ClassVar[tuple[str, ...]] = ("root",)  # names of the fields that may be URLs of data

    root: str | None = MISSING
    train_split: str = "train"
    val_split: str | None = "val"
    val: float | None = None
    folds: int | None = None
    fold: int | None = None
    group: str | None = None
    split_seed: int = 0
    exclude: str | None = None
    balance: float = 0.0
    repeats: int = 1
    tail: Tail = Tail.drop
    check: int = 2000  # 1,856 photographs of 27 KB take 0.1 s
    index: Index = Index.auto
    allow_missing_classes: bool = False
    cache: Cache = Cache.none
    cache_gb: float | None = None
    download_dir: str | None = None
    download_gb: float | None = None
    index_dir: str | None = None
    channels: int = 3
    mean: list[float] | None = field(default_factory=lambda: [0.485, 0.456, 0.406])  # ImageNet's
    std: list[float] | None = field(default_factory=lambda: [0.229, 0.224, 0.225])

    def __post_init__(self) -> None:
        for key in self.url_keys:
            check_root(getattr(self, key) or "", key)
        check_value("data.check", self.check, self.check >= 0, "0 (none) or a number above it")
        for key, limit in (("cache_gb", self.cache_gb), ("download_gb", self.download_gb)):
            check_value(f"data.{key}", limit, limit is None or 0 < limit < math.inf, "a number above 0, or null")
        if self.tail is Tail.pad:
            raise ConfigError("data.tail: pad is for evaluation, BatchNorm would see the padding; set drop or wrap")
        if (self.mean is None) != (self.std is None):
            raise ConfigError("data.mean, data.std: one is null and the other isn't; set both or neither")
        check_value("data.channels", self.channels, self.channels in (1, 3), "3 (RGB) or 1 (grey)")
        self._check_normalisation()
        if self.channels == 1 and self.mean is not None and self.std is not None:
            self.mean, self.std = ([round(sum(each) / len(each), 6)] for each in (self.mean, self.std))
        check_value("data.balance", self.balance, 0 <= self.balance <= 1, "a number from 0 to 1")
        if self.repeats < 1 or (self.repeats > 1 and self.balance):
            fix = f"1, or data.balance={self.balance:g} to 0" if self.repeats > 1 else "a whole number above 0"
            raise ConfigError(f"data.repeats: {self.repeats} is not allowed here; set {fix}")
        self._check_division()

    def _check_normalisation(self) -> None:
        finite, positive = "one finite number", "a number above 0"
        if self.channels == 3:
            finite, positive = "three finite numbers, for R, G, B", "three numbers above 0"
        for key, values in (("mean", self.mean), ("std", self.std)):
            good = values is None or (len(values) in (3, self.channels) and all(map(math.isfinite, values)))
            check_value(f"data.{key}", values, good, finite)
        check_value("data.std", self.std, self.std is None or min(self.std) > 0, positive)

    @property
    def urls(self) -> dict[str, str]:
        """{name of a field: the URL that it is}."""
        values = {key: getattr(self, key) for key in self.url_keys if self.root_is_path or key != "root"}
        return {key: value for key, value in values.items() if is_remote(value)}

    def found(self) -> DataConfig:
        """The config of the source that reads the data: this one, unless it only says how to find that.

        Raises:
            ConfigError, DataError: it can't be found.
        """
        return self

    def pinned(self) -> Mapping[str, Any]:
        """Values that a run keeps for keys whose meaning may change, such as the commit that a branch is now.

        Raises:
            ConfigError, DataError: they can't be found.
        """
        return {}

    @property
    def divides(self) -> bool:
        """Whether the validation split is made of training samples."""
        return self.val is not None or self.fold is not None

    def fix_split(self, split: str, name: str = "NAME") -> str:
        """What to do about a split that isn't there, where others are listed."""
        if split not in (self.train_split, self.val_split):  # that a command was given
            return "set split to one of them"
        return f"set data.{'val_split' if split == self.val_split else 'train_split'}={name}"

    def _check_division(self) -> None:
        val, folds, seed = self.val, self.folds, self.split_seed
        check_value("data.val", val, val is None or 0 < val < 1, "a share above 0 and below 1, e.g. 0.2")
        check_value("data.folds", folds, folds is None or folds > 1, "a whole number above 1, e.g. 5")
        if self.val is not None and (self.fold is not None or self.folds is not None):
            key = "fold" if self.fold is not None else "folds"
            raise ConfigError(f"data.val: {self.val} contradicts data.{key}={getattr(self, key)}; drop one of them")
        if self.folds is not None and self.fold is None:
            raise ConfigError(
                f"data.folds: {self.folds} needs the one that validates; set data.fold=0 to {self.folds - 1}, or all "
                f"of them: -m data.fold={','.join(map(str, range(min(self.folds, 10))))}"
            )
        if self.fold is not None and not 0 <= self.fold < (self.folds or math.inf):
            end = f" to {self.folds - 1}, as data.folds={self.folds}" if self.folds else ""
            raise ConfigError(f"data.fold: {self.fold} is not allowed; set a whole number from 0{end}")
        if self.group is not None and self.val is None and self.folds is None:
            raise ConfigError(f"data.group: '{self.group}' needs data.val or data.folds; set data.val=0.2, or drop it")
        check_value("data.split_seed", seed, 0 <= seed < 2**63, "a whole number from 0")
        if self.val_split is None and not self.divides:
            raise ConfigError("data.val_split: null needs data.val or data.folds; set a name, or data.val=0.2")

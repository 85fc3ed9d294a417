"""Parts of a command's samples, by any processes on any machines: `part=3/64`; and of a conversion, `merge=true`.

A part of a conversion is a dataset of a run of the samples, whose files have the names that they have in the whole, in
OUT.parts/3-of-64. Its `part.json` says of which data and options it is, and what is in its files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from effloop.convert.work import WorkFolder
from effloop.data.source.base import Source
from effloop.data.source.storage.columns import crc32c_of_file
from effloop.data.source.storage.indexed import index_path, join_indexes
from effloop.data.source.view import View
from effloop.errors import ConfigError, DataError
from effloop.system.hardware import in_threads
from effloop.system.progress import Meter


@dataclass(frozen=True)
class Part:
    """One of several parts of a command's samples: `3/64`, from 1."""

    number: int
    of: int
    form: ClassVar = "I/N"
    allowed: ClassVar = "I/N, the part I, from 1 to N, of N parts, such as 3/64"

    @classmethod
    def parse(cls, text: str) -> Part:
        """The part that a text names, or a ValueError."""
        part = cls(*map(int, text.split("/", 1))) if "/" in text else cls(0, 0)
        if not 0 < part.number <= part.of < 100_000 or str(part) != text:
            raise ValueError
        return part

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def share(self, count: int) -> range:
        """Which of so many samples or files it takes."""
        return range(count * (self.number - 1) // self.of, count * self.number // self.of)

    def samples(self, source: Source) -> Source:
        """Its samples of a split."""
        return source if self.of == 1 else View(source, np.array(self.share(len(source)), np.int64))

    def folder(self, out: Path) -> Path:
        """Where its files are until `out` is made of them."""
        return out.with_name(f"{out.name}.parts") / f"{self.number}-of-{self.of}"


ALL = Part(1, 1)

_ABOUT = "part.json"
_PACKAGES = ("effloop", "numpy", "opencv-python-headless", "pillow", "protobuf", "pyarrow", "torch")
"""Of which another version might write other bytes."""


def plan_of(asked: Mapping[str, Any], splits: Mapping[str, Source]) -> dict[str, Any]:
    """What all parts have in common: options, data, and versions of packages."""
    plan = {**asked, "classes": next(iter(splits.values())).classes}
    for split, source in splits.items():
        plan |= {f"{split}.{key}": value for key, value in source.fingerprint().items()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            plan[name] = version(name)
    return dict(json.loads(json.dumps(plan)))


def describe(folder: Path, part: Part, plan: Mapping[str, Any]) -> None:
    """Write what a part is of, and what is in its files: {name: [size, CRC-32C]}."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {str(path.relative_to(folder)): [path.stat().st_size, crc32c_of_file(path)] for path in paths}
    (folder / _ABOUT).write_text(json.dumps({"part": str(part), "plan": plan, "files": files}))


def _read(folder: Path) -> dict[str, Any]:
    """What `describe` wrote, with the part and its folder."""
    try:
        found = json.loads((folder / _ABOUT).read_bytes())
        of = {"plan": dict(found["plan"]), "files": dict(found["files"])}
        if any({"/", ".."} & {*Path(name).parts} for name in of["files"]):  # outside of it
            raise ValueError
        return {"part": Part.parse(found["part"]), "folder": folder, **of}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        raise DataError(f"{folder} is no part of a conversion, or its {_ABOUT} is damaged; remove it") from None


def is_written(out: Path, part: Part, plan: Mapping[str, Any]) -> bool:
    """Whether a part is there, which is then said; it is an error if it is another one, or all of `out` is there."""
    WorkFolder([out]).check_absent()
    if not (folder := part.folder(out)).exists():
        return False
    if (there := _read(folder)["plan"]) != plan:
        raise ConfigError(f"part: {folder} is there already, with {_difference(there, plan)}; remove it")
    print(f"{folder} is there already")
    return True


def _difference(plan: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    key = next(key for key in {**wanted, **plan} if plan.get(key) != wanted.get(key))
    return f"{key}={str(plan.get(key))[:80]}, should be {str(wanted.get(key))[:80]}"


def merge(out: Path, asked: Mapping[str, Any], threads: int) -> None:
    """Make a dataset of its parts, which are then removed, once each is there once, of the options that are asked for,
    and as it was written. Files are linked, or copied where the file system has no links, so a merge that was killed
    can be repeated.

    Raises:
        ConfigError, DataError: parts are missing, there twice, damaged, or of other data or options.
    """
    folder, merged, work = ALL.folder(out).parent, out.with_name(f".{out.name}.merged"), WorkFolder([out])
    if not (merged.is_dir() and out.exists()):  # or else a merge was killed after it published
        work.check_absent()
        with work.held():
            if merged.is_dir():  # of a merge that was killed before it published
                if folder.exists():
                    raise ConfigError(f"merge: {folder} was written while {merged} has all parts; remove one of them")
                merged.rename(folder)
            parts = _parts(out, asked)
            _check_files(parts, threads)
            _join(parts, work.writing(out))
            folder.rename(merged)
            work.publish()
    shutil.rmtree(work.path, ignore_errors=True)
    with suppress(FileNotFoundError):  # another merge removes it
        shutil.rmtree(merged)
    print(f"{out} is written")


def _parts(out: Path, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is said of each part, in order."""
    folder = ALL.folder(out).parent
    there = [_read(path) for path in sorted(folder.glob("[!.]*"))]
    if not there:
        raise ConfigError(f"merge: {folder} has no parts; give the same command with part=1/N, ..., part=N/N before")
    of = Counter(each["part"].of for each in there).most_common(1)[0][0]
    plan = json.loads(Counter(json.dumps(each["plan"]) for each in there).most_common(1)[0][0])
    found = {each["part"]: each for each in there}
    if extra := [each["folder"].name for each in there if each["folder"] != Part(each["part"].number, of).folder(out)]:
        raise ConfigError(
            f"merge: {folder} has {_few(extra)}, which is none of its {of:,} parts, or one twice; remove it"
        )
    wrong = {}
    for part in (wanted := [Part(number, of) for number in range(1, of + 1)]):
        if part not in found:
            wrong[part] = f"{part.folder(out)} is missing"
        elif found[part]["plan"] != plan:
            wrong[part] = f"{found[part]['folder']} has {_difference(found[part]['plan'], plan)} as in others"
    _refuse(wrong)
    asked = plan | {key: value for key, value in asked.items() if key != "shards" or value}
    if plan != (asked := json.loads(json.dumps(asked))):
        raise ConfigError(f"merge: {folder} has {_difference(plan, asked)}; give the options of its parts")
    return [found[part] for part in wanted]


def _check_files(parts: list[dict[str, Any]], threads: int) -> None:
    """Compare all files with their checksums."""

    def wrong(file: tuple[Part, Path, int, int]) -> str:
        _, path, size, checksum = file
        meter.advance(size)
        try:
            if (found := path.stat().st_size) == size and crc32c_of_file(path) == checksum:
                return ""
            return f"{path} is cut or damaged: it has {found:,} of {size:,} bytes, or not its checksum"
        except OSError as error:
            return f"{path} can't be read: {error.strerror}"

    files = [(each["part"], each["folder"] / name, *said) for each in parts for name, said in each["files"].items()]
    with Meter(in_bytes=True) as meter:
        meter.begin("checking", total=sum(size for _, _, size, _ in files))
        lines = [*in_threads(wrong, files, threads)]
    _refuse({part: line for (part, *_), line in zip(files, lines, strict=True) if line})


def _refuse(wrong: Mapping[Part, str]) -> None:
    """Say what is wrong with a part, if anything is, and how to write all such parts again."""
    for line in wrong.values():
        again = _few([f"part={part}" for part in wrong])
        raise DataError(f"merge: {line}; remove what is there of it and give the same command with {again}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8:,} more" if len(names) > 8 else "")


def _join(parts: list[dict[str, Any]], root: Path) -> None:
    indexes = {split: str(index_path(Path(), split)) for split in parts[0]["plan"]["split"]}
    for each in reversed(parts):  # of README.md the last part's, which has files of every split
        for name in each["files"].keys() - {*indexes.values()}:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(each["folder"] / name, root / name)
            except FileExistsError:
                pass
            except OSError:
                shutil.copyfile(each["folder"] / name, root / name)
    for split, name in indexes.items():
        join_indexes([each["folder"] for each in parts if name in each["files"]], split, root)

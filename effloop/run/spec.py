"""What a run is: all that another process needs to carry it out; and how a run is resumed."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from effloop import config as configs
from effloop.checkpoint import files
from effloop.config import Config
from effloop.config.overrides import key_of
from effloop.errors import PROGRAM, CheckpointError, ConfigError
from effloop.registry import plugin_words
from effloop.runs.folder import TIMESTAMP, check_free, check_no_run, has_checkpoints, holds_run
from effloop.runs.reader import CONFIG, JOB, PLACE, SWEEP, differing_values, format_value
from effloop.system.files import write_text


@dataclass(frozen=True)
class RunSpec:
    """A run: a new one, or what is left of one."""

    config: Config  # of the run
    overrides: Sequence[str]  # what it was composed from, or is changed by
    folder: Path  # the run folder; a new one that is named after the time gets `-2` where it is taken
    resume: bool = False  # whether to continue in that folder; from its beginning, where it has no checkpoint
    note: str = ""  # a line for the log
    checkpoint: Path | None = None  # of that folder, to continue from; None is the last one

    @property
    def start(self) -> Path | None:
        """What to continue from in the run's own folder: a checkpoint, or the folder itself, to begin again."""
        if not self.resume or self.checkpoint:
            return self.checkpoint
        return files.find(self.folder, "last") if has_checkpoints(self.folder) else self.folder

    def to_plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "config": configs.to_dict(self.config),
            "overrides": list(self.overrides),
            "folder": str(self.folder),
            "resume": self.resume,
            "note": self.note,
            "checkpoint": str(self.checkpoint or ""),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RunSpec:
        """What `to_plain` gave."""
        config = configs.from_dict(plain["config"], (), "the config of this run")
        checkpoint = Path(plain["checkpoint"]) if plain["checkpoint"] else None
        return cls(config, plain["overrides"], Path(plain["folder"]), plain["resume"], plain["note"], checkpoint)


# What goes on in a run folder: by `resume RUN`, by `resume=auto`, or in another start of a sweep's job.

AUTO = "auto"
"""What `resume=` takes to start a run, or to resume it where it has been started."""
_MEASURED = ("compile", "channels_last", "cudnn_benchmark")
"""Keys that a run folder has with the value that `auto` became."""


def resumed(place: Path, overrides: Sequence[str]) -> RunSpec:
    """What is left of a run: from its last or a named checkpoint, or from its beginning."""
    checkpoint = place if place.is_file() else None
    if place.suffix == ".ckpt" and not place.exists():
        files.peek(place)  # which names another one
    folder = _folder_of(place) if checkpoint else place
    if not folder.is_dir():
        raise CheckpointError(f"'{place}' is not a run folder; name the folder that holds config.yaml")
    if (folder / SWEEP).is_file():
        raise ConfigError(
            f"resume: '{folder}' is a sweep; type its command again, with sweep.resume=true, or name a job"
        )
    check_free(folder)
    config = configs.load(folder / CONFIG, overrides)
    checkpoint = folder / "checkpoints" / place.name if checkpoint else None
    if checkpoint or has_checkpoints(folder):
        files.peek(checkpoint or files.find(folder, "last"))  # early, without its tensors
    return RunSpec(config, overrides, folder, resume=True, checkpoint=checkpoint)


def _folder_of(checkpoint: Path) -> Path:
    """The run folder that a checkpoint is in."""
    folder = checkpoint.absolute().parent.parent
    if checkpoint.absolute().parent.name != "checkpoints" or not (folder / CONFIG).is_file():
        raise ConfigError(
            f"resume: {checkpoint} is not in a run folder, to go on there; start a new run from it: "
            f"{PROGRAM} resume={shlex.quote(str(checkpoint))}"
        )
    return folder if checkpoint.is_absolute() else Path(os.path.relpath(folder))


def planned(spec: RunSpec) -> RunSpec:
    """A new run, as it was composed; with `resume=auto`, what is left of it where it was begun already."""
    if spec.config.resume != AUTO:
        if not TIMESTAMP.search(spec.folder.as_posix()):
            check_free(spec.folder)
            check_no_run(spec.folder)
        return spec
    typed = any(each.startswith("run=") and "${now" not in each for each in spec.overrides)
    if TIMESTAMP.search(spec.folder.as_posix()) and not typed:  # each start has another one
        raise ConfigError(
            f"resume: auto finds the run by its name, and {spec.folder} is another one with each start; set run=NAME"
        )
    overrides = [each for each in spec.overrides if each.partition("=")[0].lstrip("+") != "resume"]
    spec = replace(spec, config=replace(spec.config, resume=None), overrides=overrides)
    check_free(spec.folder)
    if not holds_run(spec.folder):
        return spec
    config = configs.load(spec.folder / CONFIG)
    now = spec.config
    if not any(key_of(each) == "decode.exif" for each in overrides):  # whose default was false
        now = replace(now, decode=replace(now.decode, exif=config.decode.exif))
    if config.parallel.virtual and config.parallel.virtual == now.parallel.virtual:
        config = replace(config, parallel=now.parallel)  # any number of ranks goes on
    _check_same(config, now, spec.folder)
    return from_newest_checkpoint(replace(spec, config=config))


def from_newest_checkpoint(spec: RunSpec) -> RunSpec:
    """What is left of a run that was begun: from its newest whole checkpoint, or from its beginning."""
    newest = files.newest_whole(spec.folder) if has_checkpoints(spec.folder) else None
    return replace(spec, overrides=[] if newest else spec.overrides, resume=True, checkpoint=newest)


def _check_same(begun: Config, now: Config, folder: Path) -> None:
    """Refuse to go on with other values than a run has."""
    trees = [configs.to_dict(begun), configs.to_dict(now)]
    for key in _MEASURED:
        if trees[1][key] in ("auto", None):
            trees[1][key] = trees[0][key]
    differ = {key: values for key, values in differing_values(trees).items() if key not in (*PLACE, "optim.lr")}  # lr
    if not differ:
        return
    shown = ", ".join(
        f"{key} ({format_value(one)} there, {format_value(two)} here)" for key, (one, two) in differ.items()
    )
    words = [f"{key}={format_value(value)}" for key, (_, value) in differ.items()]
    raise ConfigError(
        f"resume: {folder} was begun with other values: {shown}; go on with these by "
        f"{PROGRAM} {shlex.join(['resume', str(folder), *words, *plugin_words()])}, or set run=ANOTHER_NAME"
    )


@dataclass(frozen=True)
class JobState:
    """Writes a job's job.json."""

    folder: str  # of the job
    number: int  # counted from 0
    overrides: list[str]  # what makes it this job

    def write(self, state: str, reason: str = "", **more: Any) -> None:
        """Write job.json, whole or not at all."""
        fields = {"number": self.number, "overrides": self.overrides, "state": state, "reason": reason, **more}
        write_text(Path(self.folder, JOB), json.dumps(fields, indent=2) + "\n")

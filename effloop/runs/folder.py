"""The files of a run folder that describe its run, so that it can be understood and repeated."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from effloop import config as configs
from effloop.checkpoint import files
from effloop.config import Config
from effloop.errors import PROGRAM, ConfigError, EffLoopError
from effloop.model import weights_file
from effloop.runs import compare
from effloop.runs.environment import Checkout, describe_environment, find_checkouts
from effloop.runs.reader import STATE
from effloop.system.files import numbered, write_text
from effloop.system.processes import describe_process

TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d(/\d+)?$")  # the number is a sweep job's

RESUMED = "resumed.json"
"""File of a run folder: how the run was resumed with other overrides or in another environment."""

_MAX_DIFF_BYTES = 5_000_000


def claim_run_dir(path: Path) -> Path:
    """Create a run folder for this run alone.

    A folder named after the time gets `-2`, `-3`, … if another run started in the same second.

    Raises:
        ConfigError: the folder has another name and holds a run already, or can't be made.
    """
    candidates = numbered(path)
    while True:
        candidate = next(candidates)
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            (candidate / "config.yaml").touch(exist_ok=False)  # the process that creates the file owns the folder
        except FileExistsError:
            if not TIMESTAMP.search(path.as_posix()):
                resume = f"{PROGRAM} resume {shlex.quote(str(path))}"
                raise ConfigError(
                    f"run: {path} holds a run already; continue it ({resume}) or set run=ANOTHER_NAME"
                ) from None
        except OSError as error:
            raise ConfigError(f"run: {candidate} can't be made: {error.strerror}; set out=FOLDER") from None
        else:
            return candidate


@dataclass(frozen=True)
class RunInfo:
    """What is written about a run.

    Attributes:
        config: of the run.
        overrides: those that it was composed from, or is resumed with.
        data: {split: its fingerprint}, and the names of the `classes`.
        ranks: number of processes that train.
    """

    config: Config
    overrides: Sequence[str]
    data: Mapping[str, Any]
    ranks: int = 1


def write_run_info(run_dir: Path, info: RunInfo) -> None:
    """Write config.yaml, overrides.yaml, environment.json and data.json.

    Uncommitted changes of the working directory's checkout go to changes.diff; those of EffLoop's, if it is another
    one, to effloop.diff.
    """
    checkouts = find_checkouts(info.config.out)
    configs.save(info.config, run_dir / "config.yaml")
    _write_overrides(run_dir, info.overrides)
    _write_json(run_dir / "environment.json", describe_environment(checkouts, info.ranks))
    _write_json(run_dir / "data.json", {**info.data, **initial_files(info.config)})
    named = (("effloop.diff", checkouts["effloop"]), ("changes.diff", checkouts["git"]))  # the latter if they are equal
    for name, checkout in {each.root: (name, each) for name, each in named if each}.values():
        if checkout.facts["dirty"]:
            (run_dir / name).write_bytes(_changes(checkout))


def record_resume(run_dir: Path, info: RunInfo, epoch: int) -> None:
    """Update the folder of a run that is resumed at `epoch`.

    Overrides are added to config.yaml and overrides.yaml. If they or the environment may change the rest of the run,
    resumed.json gets an entry: the `epoch`, the `overrides`, and how the environment `differs`.
    """
    try:
        then = json.loads((run_dir / "environment.json").read_text("utf-8"))
    except (OSError, ValueError):  # no reason to refuse
        then = {}
    differs = compare.environments(then, describe_environment(find_checkouts(info.config.out), info.ranks))
    if info.overrides:
        _write_overrides(run_dir, [*read_overrides(run_dir), *info.overrides])
        configs.save(info.config, run_dir / "config.yaml")
    if info.overrides or differs:
        entry = {"epoch": epoch, "overrides": list(info.overrides), "differs": differs}
        _write_json(run_dir / RESUMED, [*read_resumes(run_dir), entry])


def record_start(run_dir: Path) -> None:
    """Write to state.json that this process trains the run."""
    _write_state(run_dir, "running")


@contextmanager
def state_recorded(run_dir: Path) -> Iterator[None]:
    """Around the training: write to state.json how it ended."""
    state, reason = "done", ""
    try:
        yield
    except KeyboardInterrupt:
        state, reason = "stopped", "interrupted"
        raise
    except BaseException as error:
        state, reason = "failed", str(error) if isinstance(error, EffLoopError) else f"{type(error).__name__}: {error}"
        raise
    finally:
        with suppress(OSError):  # a full disk, of which there is another line
            _write_state(run_dir, state, reason.partition("\n")[0])


def record_failure(run_dir: Path, reason: str) -> None:
    """Write to state.json why the run's ranks have ended, which the first of them may not know."""
    with suppress(OSError):
        _write_state(run_dir, "failed", reason)


def _write_state(run_dir: Path, state: str, reason: str = "") -> None:
    facts = {"state": state, "reason": reason, **describe_process()}
    write_text(run_dir / STATE, json.dumps(facts, indent=2) + "\n")


def read_overrides(run_dir: Path) -> list[str]:
    """The overrides that a run was composed from and resumed with; empty if they can't be read."""
    try:
        found = yaml.safe_load((run_dir / "overrides.yaml").read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    return [str(each) for each in found] if isinstance(found, list) else []


def read_resumes(run_dir: Path) -> list[dict[str, Any]]:
    """The entries of resumed.json: each has `epoch`, `overrides`, `differs`.

    Raises:
        ConfigError: it can't be read.
    """
    path = run_dir / RESUMED
    try:
        found = json.loads(path.read_text("utf-8"))
        return [{"epoch": int(e["epoch"]), **{k: list(e[k]) for k in ("overrides", "differs")}} for e in found]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} can't be read: {error}; it was not written by EffLoop, or is damaged") from None


def file_fingerprint(path: Path) -> dict[str, Any]:
    """`path`, `bytes` and `sha256` of a file; takes 2 s for 1 GB."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"path": os.path.abspath(path), "bytes": file.tell(), "sha256": digest}


def initial_files(config: Config) -> dict[str, Any]:
    """Fingerprints of the files that a run starts from: the checkpoint of `resume`, the file of `model.weights`, and
    the checkpoint of `distill.teacher`.
    """
    found = {"resume": files.find(Path(config.resume), "last")} if config.resume else {}
    weights = weights_file(config.model.weights) if config.model.weights and not config.resume else None
    found |= {"weights": weights} if weights else {}
    found |= {"teacher": files.find(Path(config.distill.teacher), "best")} if config.distill.teacher else {}
    return {name: file_fingerprint(path) for name, path in found.items()}


def _changes(checkout: Checkout) -> bytes:
    """The diff of a checkout for `git apply`, which skips the comment lines before it."""
    diff, untracked = checkout.diff, checkout.untracked
    head = [f"# {checkout.root} at {checkout.commit}", *(f"# not tracked, not in here: {name}" for name in untracked)]
    if len(diff) > _MAX_DIFF_BYTES:
        head.append(f"# cut: {len(diff):,} bytes, of which the first {_MAX_DIFF_BYTES:,} are here")
    return "\n".join(head).encode("utf-8", "surrogateescape") + b"\n" + diff[:_MAX_DIFF_BYTES]


def _write_overrides(run_dir: Path, overrides: Sequence[str]) -> None:
    OmegaConf.save(OmegaConf.create(list(overrides)), run_dir / "overrides.yaml")


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")

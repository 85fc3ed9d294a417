"""What a run folder says of its run, so that it can be understood and done again."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf

from effloop import config as configs
from effloop.config import Config
from effloop.errors import ConfigError
from effloop.hardware import available_cores

STAMP = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d(/\d+)?$")  # and a sweep's job number


def claim_run_dir(path: Path) -> Path:
    """Make a run folder that is this run's alone.

    A folder named after the time gets `-2`, `-3`, … where another run started in the same second.

    Raises:
        ConfigError: a named folder holds a run already, or it can't be made.
    """
    number = 1
    while True:
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            (candidate / "config.yaml").touch(exist_ok=False)  # whoever makes the file owns the folder
        except FileExistsError:
            if not STAMP.search(path.as_posix()):
                raise ConfigError(
                    f"run: {path} holds a run already; go on with it (python -m effloop resume {path}) "
                    "or set run=ANOTHER_NAME"
                ) from None
            number += 1
        except OSError as error:
            raise ConfigError(f"run: {candidate} can't be made: {error.strerror}; set run=NAME elsewhere") from None
        else:
            return candidate


def write(run_dir: Path, config: Config, overrides: Sequence[str], data: Mapping[str, Any]) -> None:
    """Write config.yaml, overrides.yaml, environment.json and data.json."""
    configs.save(config, run_dir / "config.yaml")
    OmegaConf.save(OmegaConf.create(list(overrides)), run_dir / "overrides.yaml")
    (run_dir / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
    (run_dir / "data.json").write_text(json.dumps(data, indent=2) + "\n")


def rewrite(run_dir: Path, config: Config, overrides: Sequence[str]) -> None:
    """Bring config.yaml and overrides.yaml up to what a run goes on with."""
    path = run_dir / "overrides.yaml"
    try:
        earlier = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError):
        earlier = []
    OmegaConf.save(OmegaConf.create([*(earlier or []), *overrides]), path)
    configs.save(config, run_dir / "config.yaml")


def environment() -> dict[str, Any]:
    """Packages, Python, commit and hardware of this process; the machine's name is left out."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "git": _git(),
        "hardware": {
            "processor": _processor(),
            "cores": available_cores(),
            "torch_threads": torch.get_num_threads(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "gpus": gpus,
            "cuda": torch.version.cuda if gpus else None,
        },
        "packages": _packages(),
    }


def _packages() -> dict[str, str]:
    found = [(d.metadata["Name"], d.version) for d in distributions()]
    return dict(sorted((name.lower(), version) for name, version in found if name))  # none: half uninstalled


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def _git() -> dict[str, Any] | None:
    """Commit of the folder the run was started in, and whether it had changes; None outside of git."""

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None

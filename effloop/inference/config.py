"""The config that a trained model is used by."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from effloop import config as configs
from effloop.config import Config
from effloop.config.typed import key_of
from effloop.data.remote.location import is_remote
from effloop.data.source import Source
from effloop.data.source.splits import undivided
from effloop.errors import EffLoopError, warn
from effloop.runs import compare


def config_of(facts: Mapping[str, Any], overrides: Sequence[str], path: Path) -> Config:
    """The config that a model was trained by, with overrides, for a single process that doesn't compile.

    Other data than the run's isn't divided as the run's is, unless an override says so, nor read in windows if it is
    on this machine.

    Raises:
        ConfigError: it is none, or an override is invalid.
    """
    alone = {**facts["config"], "parallel": {"name": "none"}, "compile": False, "resume": None}
    keys = {key_of(override) for override in overrides}
    if alone["data"].get("window") and "data.root" in keys and "data.window" not in keys:
        whole = {**alone, "data": {**alone["data"], "window": None}}
        if not is_remote(configs.from_dict(whole, overrides, f"the config in {path}").data.root or ""):
            alone = whole
    config = configs.from_dict(alone, overrides, f"the config in {path}")
    if not config.data.divides or "data.root" not in keys or keys & {"data.val", "data.folds", "data.fold"}:
        return config
    trained_on = facts.get("data") or facts.get("provenance", {}).get("data") or {}
    if same_path(config.data.root, alone["data"]["root"]) or _is_data_of(trained_on, config):
        return config
    data = {**alone["data"], **dict.fromkeys(("val", "folds", "fold", "group"))}
    data["val_split"] = data["val_split"] or "val"
    return configs.from_dict({**alone, "data": data}, overrides, f"the config in {path}")


def check_divided_alike(config: Config, facts: Mapping[str, Any], source: Source) -> None:
    """Warn of a validation part that isn't the one that the run validated on.

    Args:
        config: of the run, changed by overrides.
        facts: of the run, with the fingerprints in `data`.
        source: the validation split, with the run's classes.
    """
    trained_on = (facts.get("data") or {}).get("val")
    if not (config.data.divides and trained_on):
        return
    for line in compare.inputs({"val": trained_on}, {"val": source.fingerprint()}):
        warn(f"{source.where} may have images that were trained on: the data is not divided as for the run ({line})")


def same_path(one: str | None, other: str | None) -> bool:
    """Whether two values of `data.root` are the same place."""
    paths = [root and os.path.realpath(os.path.expanduser(root)) for root in (one, other)]
    return paths[0] == paths[1]


def _is_data_of(trained_on: Mapping[str, Any], config: Config) -> bool:
    """Whether the data, as far as its number of samples and bytes tell, is what a run was trained on, elsewhere now."""
    with suppress(EffLoopError):
        found = undivided(config.data).fingerprint()
        return bool(trained_on) and all(
            found[key] == sum(trained_on[split][key] for split in ("train", "val")) for key in ("samples", "bytes")
        )
    return False

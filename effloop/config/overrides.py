"""Overrides and flags as typed: paths in them, and which contradict each other."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from effloop.errors import PROGRAM, ConfigError, warn
from effloop.registry import either, groups

FLAGS: dict[str, tuple[str, ...]] = {
    "-m": (),
    "--multirun": (),
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--config-dir": (),
}
"""Hydra's flags that are supported -> their allowed values. `--experimental-rerun` isn't: it unpickles a file."""


def is_sweep(words: Collection[str]) -> bool:
    """Whether flags, or other words, ask for a sweep."""
    return "-m" in words or "--multirun" in words


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The last value that was given to a flag."""
    given = [value for flag, value in pairwise(flags) if flag == name]
    return given[-1] if given else None


def only_shows(flags: Sequence[str]) -> bool:
    """Whether flags make Hydra print something instead of starting a job."""
    return "--cfg" in flags or "--info" in flags


def parse_flags(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into Hydra's flags with their values, and overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(args)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        if not arg.startswith("-"):
            overrides.append(arg)
        elif is_sweep([flag]):
            flags.append(flag)
        else:
            value, allowed = value if equals else next(rest, ""), FLAGS[flag]
            if not value or (allowed and value not in allowed):
                raise ConfigError(f"{flag}: '{value}' is not allowed; give it {either(allowed or ['a FOLDER'])}")
            flags += [flag, value]
    if is_sweep(flags) and only_shows(flags):
        raise ConfigError(f"{' '.join(flags)}: what is printed is of a single run; leave out -m and several values")
    return flags, overrides


REMOVED = {  # key that EffLoop had -> what to do instead
    "data.window": "all files behind a URL are fetched before training: set data.download_gb high enough for them, or "
    "read shards as a stream, by MosaicML's streaming or WebDataset, in a loop of your own",
    "augment.resize": "crops are always resized by the antialiased filter, which is faster: leave it out",
    "data.labels": "write the LMDB again, as pickles of (image, label)",
    "data.coarse": "write a table of the images with their coarse classes, and read that by data=csv",
    "record.samples": f"{PROGRAM} show draws the samples",
    "distill.teacher": "write a model that gives its teacher's outputs, and a task with a loss of them, as plugins",
    "engine.start_method": "workers are forked: leave it out, or set engine=threads where a library can't be forked",
    "stop.minutes": "type timeout 30m effloop ..., whose signal saves the run",
}


RENAMED = {"checkpoint.patience_s": ("checkpoint.stop_timeout_s", "0.4")}
"""Deprecated key, whose field is null unless it is set -> its name now, and the version that will no longer take it."""


_SHORT = {"lr": "optim.lr"} | {old: new for old, (new, _) in RENAMED.items()}  # short key -> the key that it stands for
_REPLACES = {"optim.lr": "lr", "amp": "precision", "precision": "amp"}
"""Key -> the one that would override it, or contradict it, if an experiment or a saved config has set that."""
PATHS = frozenset(
    """
    data.root data.val_root data.images data.colors data.exclude data.index_dir data.download_dir model.weights
    model.backbone_weights resume out
    """.split()  # noqa: SIM905
)
_AS_IT_IS = re.compile(r"""['"]|(choice|glob|range|sort|shuffle|interval|tag)\(|.*\$\{""")
"""The beginning of values that Hydra reads: quoted, a function of its grammar, an interpolation."""
_OUTSIDE_BRACES = re.compile(r",(?![^{}]*\})")
"""The commas of a sweep's paths: those in braces are of one URL, `s3://bucket/{train,val}.tar`."""


def parsed(overrides: Sequence[str]) -> list[Override]:
    """The overrides, parsed; Hydra's OverrideParseException where one can't be."""
    return OverridesParser.create().parse_overrides([*overrides])


def by_key(overrides: Sequence[Override]) -> dict[str, Override]:
    """{key: override}; of several with a key the last counts."""
    return {each.get_key_element(): each for each in overrides}


def quoted(text: str) -> str:
    """Quote any text for the value of an override."""
    # Hydra takes backslashes as they are, except in front of a quote.
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + (found[2] and "\\'"), text) + "'"


def key_of(override: str) -> str:
    """The key of an override; empty for any other word."""
    return override.partition("=")[0].lstrip("+~") if "=" in override or override.startswith("~") else ""


def with_paths(overrides: Sequence[str], *, sweep: bool = False) -> list[str]:
    """The overrides, with paths quoted that Hydra's grammar doesn't take as they are, and their `~` expanded.

    So a path is given as for any other program: `data.root=~/my photos (1)`. Doing it twice changes nothing. In a sweep
    a comma separates values; otherwise it is a part of a path that exists.
    """
    return [_with_path(override, sweep) if key_of(override) in PATHS else override for override in overrides]


def _with_path(override: str, sweep: bool) -> str:
    key, _, value = override.partition("=")
    path = os.path.expanduser(value)
    if not value or _AS_IT_IS.match(value):
        return override
    if sweep and "," in value and os.path.exists(path):
        raise ConfigError(
            f"{override}: with -m a comma separates values, and this is one path; write '{key}=\"{path}\"'"
        )
    try:
        found = parsed([override])[0]
        if found.is_sweep_override():
            keep = sweep or not (os.path.exists(path) or key == "out")
        else:
            keep = found.value() is None or isinstance(found.value(), str)
    except HydraException:
        keep = False
    parts = map(os.path.expanduser, _OUTSIDE_BRACES.split(value)) if sweep else [path]
    return override if keep else f"{key}={','.join(map(quoted, parts))}"


def refuse_contradictions(overrides: Sequence[str]) -> None:
    """Check that no two overrides that are typed give a key different values; `lr` is `optim.lr`, too."""
    given: dict[str, tuple[Any, Override]] = {}
    for override in parsed(overrides):
        key, value = override.key_or_group, override.input_line if override.is_sweep_override() else override.value()
        value = value.text if isinstance(value, QuotedString) else value
        if key in groups and isinstance(value, list):  # of which Hydra would take the last
            raise ConfigError(f"{override.input_line}: one part is chosen; write {key}=NAME")
        if override.is_delete() or (isinstance(value, str) and "${" in value) or (key in _SHORT and value is None):
            continue  # what depends on other keys may be the same
        before, earlier = given.setdefault(_SHORT.get(key, key), (value, override))
        if before is not value and before != value:  # nan is itself
            shell = "put a URL with braces in quotes, or " if "://" in f"{value}" else ""
            raise ConfigError(f"{override.input_line} contradicts {earlier.input_line}; {shell}drop one of them")


def unset_replaced(tree: DictConfig, overrides: Sequence[str]) -> None:
    """Unset what an experiment or a saved config has set for a typed key's counterpart, which isn't typed."""
    typed = {key for override in overrides for key in (key_of(override), key_of(override).partition(".")[0])}
    for key, other in _REPLACES.items():
        if key in typed and other not in typed:
            tree[other] = None


def take_renamed(tree: DictConfig) -> None:
    """Move values of deprecated keys to the keys' new names, with a warning."""
    for old, (new, version) in RENAMED.items():
        if (value := OmegaConf.select(tree, old)) is not None:
            warn(f"{old} is deprecated, and version {version} will not take it; write {new}={value}")
            OmegaConf.update(tree, new, value)
            OmegaConf.update(tree, old, None)

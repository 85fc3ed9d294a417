"""The whole config: its typed tree, how it is composed, checked and kept."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import MISSING, DictConfig, OmegaConf

from effloop import explain, registry
from effloop.checkpoint import CheckpointConfig
from effloop.data.augment import AugmentConfig
from effloop.data.decode import DecodeConfig
from effloop.data.engine import EngineConfig
from effloop.data.source import DataConfig
from effloop.errors import ConfigError
from effloop.model import ModelConfig
from effloop.optim import OptimConfig, ScheduleConfig
from effloop.parallel import ParallelConfig
from effloop.precision import PrecisionConfig, precisions
from effloop.record import RecordConfig
from effloop.registry import PartConfig
from effloop.runs import check_objective
from effloop.search import check_run_name, compose_tree


@dataclass
class SweepConfig:
    """How the jobs of a sweep are treated; without meaning for a single run.

    Attributes:
        resume: go on with the sweep in its folder: what is done is left alone, what was begun goes on.
        prune: end a run early whose validation score is worse than the median of the others' at the same epoch.
    """

    resume: bool = False
    prune: bool = False


@dataclass
class Config:
    """The root: one field per config group, and short names for what people sweep.

    Attributes:
        batch_size: images per rank and step; the global number is printed.
        num_workers: threads or processes that load, per split in use; `auto` is the cores this
            rank may use; 0 loads in the loop's own thread.
        epochs: how often the training split is gone through.
        lr: learning rate at the schedule's height; null takes `optim.lr`.
        seed: of the order, of every sample's random numbers and of the weights.
        amp: true is short for precision=amp, false for precision=fp32; null leaves it to `precision`.
        compile: compile the model with torch.compile; `auto` measures whether that is faster.
        channels_last: memory layout of images and weights; `auto` measures which is faster.
        cudnn_benchmark: let cuDNN try its algorithms for each shape and keep the fastest; null is yes, unless
            `deterministic`; `auto` measures whether that is faster.
        deterministic: only algorithms that give the same bits every time, which some GPU operations lack.
        reuse_memory: keep freed memory for the next step and the next image instead of giving it back; from the
            first loader or run that sets it, for as long as the process lives. Worker processes always do.
        accumulate: batches whose gradients make one update.
        max_grad_norm: what an update's gradients are scaled down to, if their L2 norm is above it; null is no limit.
        image_size: height and width of what the model sees, in pixels.
        progressive: image sizes to train at, for equally many epochs each, in this order; empty is `image_size`
            throughout. Evaluation is always at `image_size`.
        device: auto, cpu, cuda or cuda:N.
        resume: a run folder or checkpoint file to go on from, in a new run folder.
        run: name of the run folder below `outputs/`.
        objective: what the runs of a sweep are compared by, and what a search is for.
        sweep: how the jobs of a sweep are treated.
    """

    data: DataConfig = MISSING
    decode: DecodeConfig = MISSING
    augment: AugmentConfig = MISSING
    engine: EngineConfig = MISSING
    model: ModelConfig = MISSING
    optim: OptimConfig = MISSING
    schedule: ScheduleConfig = MISSING
    parallel: ParallelConfig = MISSING
    precision: PrecisionConfig | None = None
    record: RecordConfig = MISSING
    checkpoint: CheckpointConfig = MISSING
    batch_size: int = 32
    num_workers: int | str = "auto"
    epochs: int = 1
    lr: float | None = None
    seed: int = 0
    amp: bool | None = None
    compile: bool | str = False
    channels_last: bool | str = True
    cudnn_benchmark: bool | str | None = None
    deterministic: bool = False
    reuse_memory: bool = True
    accumulate: int = 1
    max_grad_norm: float | None = None
    image_size: int = 64
    progressive: list[int] = field(default_factory=list)
    device: str = "auto"
    resume: str | None = None
    run: str = "unnamed"
    objective: str = "val/top1"
    sweep: SweepConfig = field(default_factory=SweepConfig)

    GROUPS: ClassVar[tuple[str, ...]] = (
        "data",
        "decode",
        "augment",
        "engine",
        "model",
        "optim",
        "schedule",
        "parallel",
        "precision",
        "record",
        "checkpoint",
    )

    def __post_init__(self) -> None:
        for key in ("batch_size", "epochs", "accumulate", "image_size"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}: {getattr(self, key)} is not allowed; set a whole number above 0, e.g. 1")
        for key in ("lr", "max_grad_norm"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{key}: {value} is not allowed; set a finite number above 0")
        workers = self.num_workers
        if workers != "auto" and (not isinstance(workers, int) or workers < 0):
            raise ConfigError(f"num_workers: {workers!r} is not allowed; set auto, 0 or a whole number above it")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed: {self.seed} is not allowed; set a whole number from 0 to 2**63 - 1")
        check_run_name(self.run)
        check_objective(self.objective)
        if self.sweep.prune and not self.objective.startswith("val/"):
            raise ConfigError(
                f"sweep.prune: runs are ended early by a validation score, not by objective={self.objective}; "
                "set objective=val/top1"
            )
        self._check_speed()
        self._check_sizes()

    def _check_speed(self) -> None:
        """Refuse words other than `auto` where true or false belongs, and wishes that contradict each other."""
        for key in ("compile", "channels_last", "cudnn_benchmark"):
            if isinstance(getattr(self, key), str) and getattr(self, key) != "auto":
                raise ConfigError(f"{key}: {getattr(self, key)!r} is not allowed; set true, false or auto")
        if self.deterministic and self.cudnn_benchmark:
            raise ConfigError(
                f"deterministic: true contradicts cudnn_benchmark={_word(self.cudnn_benchmark)}, whose choices differ "
                "from run to run; drop one of them"
            )

    def _check_sizes(self) -> None:
        """Refuse image sizes that can't be, or too many for the epochs."""
        for size in self.progressive:
            if size < 1:
                raise ConfigError(f"progressive: {size} is not a size in pixels; set whole numbers above 0")
        if len(self.progressive) > self.epochs:
            raise ConfigError(
                f"progressive: {len(self.progressive)} sizes for epochs={self.epochs}; set at least as many epochs"
            )


def _word(value: bool | str) -> str:
    """A value as it is typed."""
    return str(value).lower()


def compose(overrides: Sequence[str] = ()) -> Config:
    """The config that `python -m effloop OVERRIDES` would use.

    It is checked, and its short names are carried out, here: to change it, compose again.

        cfg = effloop.compose(["data.root=/data/in1k", "batch_size=256"])

    Args:
        overrides: as on the command line: `group=choice`, `key=value`, `+key=value`.

    Raises:
        ConfigError: an override, a YAML file or a value can't be taken; one line says why.
    """
    with explain.in_one_line(Config, overrides):
        tree = compose_tree(Config, list(overrides))
    return finish(tree, overrides)


def finish(tree: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """A composed tree as plain dataclasses, checked, with the short names carried out.

    Raises:
        ConfigError: a value is missing, wrong or contradicts another.
    """
    with explain.in_one_line(Config, overrides, tree):
        explain.refuse_unknown_keys(tree)
        config: Any = OmegaConf.to_object(tree)
        assert isinstance(config, Config)
        for group in Config.GROUPS:
            _check_part(group, getattr(config, group))
    _resolve_precision(config)
    if config.parallel.name == "dp" and config.compile:
        raise ConfigError(
            f"compile: {_word(config.compile)} contradicts parallel=dp, which copies the model in every step; "
            "set parallel=ddp or compile=false"
        )
    config.lr = config.optim.lr = config.optim.lr if config.lr is None else config.lr
    return config


def _check_part(group: str, part: PartConfig | None) -> None:
    if part is not None and type(part) is not registry.groups[group][part.name].config:
        raise ConfigError(f"{group}.name: '{part.name}' can't be set alone; choose the part by {group}={part.name}")


def _resolve_precision(config: Config) -> None:
    """`amp` decides where `precision` is unset; the two must not contradict each other."""
    wanted = {True: "amp", False: "fp32", None: "fp32"}[config.amp]
    if config.precision is None:
        config.precision = cast("PrecisionConfig", precisions[wanted].config(name=wanted))
    if config.amp is not None and config.amp != config.precision.mixed:
        raise ConfigError(f"amp: {_word(config.amp)} contradicts precision={config.precision.name}; drop one of them")


def save(config: Config, path: Path) -> None:
    """Write a config as YAML, complete and resolved."""
    OmegaConf.save(OmegaConf.create(to_dict(config)), path)


def to_dict(config: Config) -> dict[str, Any]:
    """A config as plain dicts, lists and values, for a run folder or checkpoint; paths absolute."""
    plain: Any = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    for key in ("root", "index_dir"):
        if plain["data"].get(key):
            plain["data"][key] = os.path.abspath(os.path.expanduser(plain["data"][key]))
    if plain["resume"]:
        plain["resume"] = os.path.abspath(os.path.expanduser(plain["resume"]))
    weights = os.path.expanduser(plain["model"]["weights"] or "")
    if os.path.exists(weights):  # else it is the name of some that are known
        plain["model"]["weights"] = os.path.abspath(weights)
    return {str(key): value for key, value in plain.items()}


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """A config that `save` wrote, with overrides.

    What is read is not trusted: plain YAML, no interpolation, parts only from the registries.

    Raises:
        ConfigError: not such a file, or an override can't be taken.
    """
    try:
        plain = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"'{path}' is not there; name a run folder") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a config that EffLoop wrote: {str(error).splitlines()[0]}") from None
    return from_dict(plain, overrides, str(path))


def from_dict(plain: Any, overrides: Sequence[str], where: str) -> Config:
    """A config from `to_dict`'s plain values, with overrides; `where` names it in errors.

    Raises:
        ConfigError: not such values, or an override can't be taken.
    """
    parts = [plain.get(group) for group in Config.GROUPS] if isinstance(plain, dict) else [None]
    if not all(isinstance(part, dict) and "name" in part for part in parts):
        raise ConfigError(f"{where} is not a config that EffLoop wrote")
    if "${" in yaml.safe_dump(plain):
        raise ConfigError(f"{where} is refused: it holds an interpolation, and a saved config has none")
    with explain.in_one_line(Config, overrides):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        for override in parsed:
            if override.is_sweep_override():
                raise ConfigError(f"{override.input_line}: several values are a sweep, which only training takes")
        choices = [override for override in parsed if override.key_or_group in Config.GROUPS]
        chosen = _chosen(choices)
        tree: Any = OmegaConf.structured(Config)
        for group in Config.GROUPS:
            tree[group] = OmegaConf.structured(registry.groups[group][str(plain[group]["name"])].config)
        tree = OmegaConf.merge(tree, plain)
        for group, part in chosen.items():
            tree[group] = part
        for override in parsed:
            if override.is_delete():
                _delete(tree, override)
            elif override not in choices:
                OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)
            # The saved half of a pair must not speak against the new one.
            for key, other in (("amp", "precision"), ("precision", "amp"), ("optim", "lr"), ("optim.lr", "lr")):
                if override.key_or_group == key:
                    tree[other] = None
    assert isinstance(tree, DictConfig)
    return finish(tree, overrides)


def _delete(tree: Any, override: Override) -> None:
    """Carry out `~KEY`.

    Raises:
        ConfigError: nothing is there.
    """
    parent, _, key = override.key_or_group.rpartition(".")
    node = OmegaConf.select(tree, parent)
    if not isinstance(node, DictConfig) or key not in node or OmegaConf.get_type(node) is not dict:
        raise ConfigError(f"{override.input_line}: there is no such entry to delete; ~augment.ops.LABEL deletes one")
    del node[key]


def _chosen(choices: Sequence[Override]) -> dict[str, Any]:
    """{group: its tree} by overrides `group=choice`; a preset (data=dali) chooses for other groups, too."""
    if not choices:
        return {}
    default, composed = compose_tree(Config, []), compose_tree(Config, [str(each.input_line) for each in choices])
    named = {each.key_or_group for each in choices}
    return {group: composed[group] for group in Config.GROUPS if group in named or composed[group] != default[group]}

"""Whether a checkpoint fits what a run is told to do with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from effloop import config as configs
from effloop.config import Config
from effloop.errors import PROGRAM, ConfigError, DataError
from effloop.runs import compare
from effloop.task import Labelled

_NOT_THE_NETWORK = {"num_classes", "weights", "backbone_weights", "freeze", "checkpointing"}
"""Fields of a model's config that change neither the names nor the shapes of its parameters."""


def trained_names(state: Mapping[str, Any]) -> tuple[str, ...]:
    """What a checkpoint's outputs are of: classes, or numbers that have names."""
    return tuple(state.get("target_names") or state["classes"])


def check_trained_on(state: Mapping[str, Any], source: Labelled) -> None:
    """Refuse data of other classes, or other numbers, than the checkpoint's.

    Raises:
        DataError: with both lists of names.
    """
    names, trained = list(source.target_names), list(trained_names(state))
    if names != trained:
        what = "classes" if source.classes else "numbers"
        raise DataError(
            f"{source.where} has the {what} {', '.join(names[:8])}, "
            f"the checkpoint was trained on {', '.join(trained[:8])}; "
            f"set data.root to data of the same {what}"
            + ", or data.allow_missing_classes=true"
            * (bool(source.classes) and set(names) < set(trained))
        )


def check_resumable(config: Config, state: Mapping[str, Any], *, world_size: int, in_place: bool) -> None:
    """Refuse to resume with what the optimizer's state, or the schedule's position, doesn't fit.

    Args:
        config: of the run to continue.
        state: the checkpoint.
        world_size: ranks that continue.
        in_place: whether in the same run folder.

    Raises:
        ConfigError: another model, optimizer or size of an update; or nothing is left to do.
    """
    check_same_model(config, state)
    now, then = configs.to_dict(config), state["config"]
    _check_same("accumulate", then["accumulate"], now["accumulate"])  # the schedule's position counts updates
    _check_same_batch(config, state, world_size)
    _check_same("probe", then.get("probe", 0), now["probe"])  # it decides what is trained, and the updates of an epoch
    # The optimizer's state goes by the place among what is trained, and by groups, whose rates may differ.
    _check_same("model.freeze", then["model"]["freeze"], now["model"]["freeze"])
    _check_same("optim", then["optim"]["name"], now["optim"]["name"])
    key = "decay_norm_and_bias"
    _check_same(f"optim.{key}", then["optim"][key], now["optim"][key])
    for key in ("layer_decay", "head_lr"):
        was, new = then["optim"].get(key), now["optim"][key]  # older checkpoints have none
        if (was is None) != (new is None):
            _check_same(f"optim.{key}", was, new)
    epoch = state["progress"]["epoch"]
    if epoch >= config.epochs and not in_place:
        raise ConfigError(
            f"epochs: {config.epochs}, but {config.resume} has done {epoch}; set epochs={epoch + 1} or more"
        )


def _check_same(key: str, was: Any, now: Any) -> None:
    if was != now:
        was, now = compare.format_value(was), compare.format_value(now)
        raise ConfigError(
            f"{key}: the checkpoint was trained with {was}, not {now}; keep {key}={was}, or start a run of its own "
            "from the weights alone: model.weights=RUN"
        )


def _check_same_batch(config: Config, state: Mapping[str, Any], world_size: int) -> None:
    """Refuse another global batch size."""
    was, ranks = state["config"]["batch_size"], state["world_size"]
    if was * ranks != config.batch_size * world_size:
        ours, theirs = (f" on {_ranks(count)}" * (max(ranks, world_size) > 1) for count in (world_size, ranks))
        fits, rest = divmod(was * ranks, world_size)
        raise ConfigError(
            f"batch_size: the checkpoint was trained with {was}{theirs}, not {config.batch_size}{ours}; "
            + (f"keep {_ranks(ranks)}" if rest else f"keep batch_size={fits}{ours}")
        )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def check_same_data(state: Mapping[str, Any], data: Mapping[str, Any], *, in_place: bool) -> list[str]:
    """Refuse to continue with other data in the same run folder; in a new one a line for each split says so.

    Args:
        state: the checkpoint.
        data: {split: its fingerprint} of the run to continue; files behind a URL are compared with those of a URL.
        in_place: whether in the same run folder.

    Raises:
        DataError: with both fingerprints.
    """
    then = dict(state.get("data", data))
    on_one_side = {key for key in then.keys() ^ data.keys() if key.startswith("remote")}
    known = ({key: value for key, value in each.items() if key not in on_one_side} for each in (then, data))
    lines = compare.inputs(*known)
    if lines and in_place:
        raise DataError(
            f"the data is not what the run was trained on: {'; '.join(lines)}; put it back, "
            f"or continue with it in a new run: {PROGRAM} resume=RUN OVERRIDE ..."
        )
    return [f"data   not what the checkpoint was trained on: {line}" for line in lines]


def check_same_model(config: Config, state: Mapping[str, Any]) -> None:
    """Refuse another task or another network than the checkpoint's.

    Raises:
        ConfigError: with what differs.
    """
    trained_for = state["config"]["task"]["name"]
    if trained_for != config.task.name:
        raise ConfigError(f"task: the checkpoint was trained with task={trained_for}, not {config.task.name}; keep it")
    was, now = state["config"]["model"], configs.to_dict(config)["model"]
    differ = [key for key in sorted({*was, *now} - _NOT_THE_NETWORK) if was.get(key) != now.get(key)]
    if differ:
        raise ConfigError(
            f"model: the checkpoint holds {', '.join(f'{key} {was.get(key)}' for key in differ)}, "
            f"not {', '.join(f'{key} {now.get(key)}' for key in differ)}; keep the model"
        )


def check_position(state: Mapping[str, Any], samples: int) -> None:
    """Refuse to continue behind an epoch's end.

    Args:
        state: the checkpoint.
        samples: of an epoch of the run to continue.

    Raises:
        ConfigError: with both numbers.
    """
    if (seen := state["progress"]["samples_seen"]) > samples:
        raise ConfigError(
            f"resume: the checkpoint is {seen} samples into an epoch, which has {samples} here; continue with the data "
            "and batch_size that it was trained with, or from the weights alone: model.weights=RUN"
        )


def check_same_tensors(model: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Refuse weights of other names or shapes than a model's.

    Raises:
        ConfigError: with the first five, and how many there are.
    """
    own = model.state_dict()
    shapes = {name: tuple(getattr(each, "shape", ())) for name, each in tensors.items()}
    wrong = [f"{name} is missing" for name in own if name not in tensors]
    wrong += [f"{name} is none of the model's" for name in tensors if name not in own]
    wrong += [
        f"{name} is {shapes[name]}, not {tuple(each.shape)}"
        for name, each in own.items()
        if name in tensors and shapes[name] != tuple(each.shape)
    ]
    if wrong:
        rest = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ConfigError(
            f"model: {len(wrong)} of the checkpoint's tensors are not this model's: {'; '.join(wrong[:5])}{rest}; "
            "use the checkpoint of this config"
        )


@contextmanager
def fitting(command: str) -> Iterator[None]:
    """Around loading a state: turns what doesn't fit into a `ConfigError`."""
    try:
        yield
    except (LookupError, RuntimeError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:600]
        raise ConfigError(f"{command}: the checkpoint doesn't fit this config: {reason}") from error

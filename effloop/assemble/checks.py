"""Whether a checkpoint fits the config and the data that a run resumes with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from effloop import config as configs
from effloop.assemble.environment import Resolved, batches_of_update
from effloop.config import Config
from effloop.errors import PROGRAM, ConfigError, DataError
from effloop.record.rows import flatten
from effloop.registry import groups
from effloop.runs.reader import format_value
from effloop.task import Labelled

_NOT_THE_NETWORK = {"num_classes", "weights", "backbone_weights", "freeze", "checkpointing", "drop_path"}
"""Fields of a model's config that change neither the names nor the shapes of its parameters."""


def trained_names(state: Mapping[str, Any]) -> tuple[str, ...]:
    """What a checkpoint's outputs are of: classes, or numbers that have names."""
    return tuple(state.get("target_names") or state["classes"])


def check_trained_on(state: Mapping[str, Any], source: Labelled) -> None:
    """Raise a DataError for data of other classes, or other numbers, than the checkpoint's."""
    names, trained = list(source.target_names), list(trained_names(state))
    if names != trained:
        what = "classes" if source.classes else "numbers"
        fewer = ", or data.allow_missing_classes=true" * (bool(source.classes) and set(names) < set(trained))
        raise DataError(
            f"{source.where} has the {what} {', '.join(names[:8])}, the checkpoint was trained on "
            f"{', '.join(trained[:8])}; set data.root to data of the same {what}{fewer}"
        )


def check_resumable(config: Resolved, state: Mapping[str, Any], *, world_size: int, in_place: bool) -> None:
    """Raise a ConfigError for what the optimizer's state, or the schedule's position, doesn't fit: another model,
    optimizer or size of an update; or, in another run folder, nothing is left to do.
    """
    check_same_model(config, state)
    now = flatten(configs.to_dict(config))
    then = {"probe": 0, "optim.decay_norm": True, **flatten(state["config"])}
    # The schedule's position counts updates; the optimizer's state goes by the place among what is trained, and by
    # groups, whose rates may differ, but not whether there are any.
    keys = ["probe", "model.freeze", "optim.name", "optim.decay_norm_and_bias", "optim.decay_norm"]
    for each in (then, now):  # an optimizer of a library has two names
        each["optim.name"] += f" optim.arch={arch}" if (arch := each.get("optim.arch")) else ""
    same = {key: (then.get(key, now[key]), now[key]) for key in keys}
    for key in ("optim.layer_decay", "optim.head_lr"):
        if (then.get(key) is None) != (now[key] is None):
            same[key] = then.get(key), now[key]
    factors = state["config"]["optim"].get("lr_factors", {}), config.optim.lr_factors
    if [*factors[0]] != [*factors[1]]:
        same["optim.lr_factors"] = factors
    virtual, whole = then.get("parallel.virtual"), then.get("global_batch")
    ranks, world_size = virtual or state["world_size"], config.parallel.virtual or world_size
    values: dict[str, Any] = {key: then.get(key, now[key]) for key in ("batch_size", "accumulate")}
    values["parallel"] = replace(config.parallel, virtual=virtual)
    batch, accumulate = batches_of_update(replace(config, global_batch=whole, **values), ranks)
    if virtual:
        same["parallel.virtual"] = virtual, config.parallel.virtual
    kept = whole and whole == config.global_batch  # on any number of ranks
    if not kept:
        same["accumulate"] = accumulate, 1 if config.parallel.virtual else config.accumulate
    if not kept and batch * ranks != config.batch_size * world_size and virtual in (None, config.parallel.virtual):
        several = max(ranks, world_size) > 1
        ours, theirs = (f" on {count} rank{'s' * (count != 1)}" * several for count in (world_size, ranks))
        fits, rest = divmod(batch * ranks, world_size)
        keep = theirs.removeprefix(" on ") if rest else f"batch_size={fits}{ours}"
        raise ConfigError(
            f"batch_size: the checkpoint was trained with {batch}{theirs}, not {config.batch_size}{ours}; keep {keep}"
        )
    for key, (was, new) in same.items():
        if was != new:
            key, was, new = key.removesuffix(".name"), format_value(was), format_value(new)
            raise ConfigError(
                f"{key}: the checkpoint was trained with {was}, not {new}; keep {key}={was}, or start a run of its own "
                "from the weights alone: model.weights=RUN"
            )
    epoch = state["progress"]["epoch"]
    if epoch >= config.epochs and not in_place:
        raise ConfigError(
            f"epochs: {config.epochs}, but {config.resume} has done {epoch}; set epochs={epoch + 1} or more"
        )


def check_same_data(state: Mapping[str, Any], data: Mapping[str, Any], *, in_place: bool) -> list[str]:
    """Refuse other data than the checkpoint's, {split: its fingerprint}, in its folder; in a new one, say so."""
    then = dict(state.get("data", data))
    on_one_side = {key for key in then.keys() ^ data.keys() if key.startswith("remote")}
    known = ({key: value for key, value in each.items() if key not in on_one_side} for each in (then, data))
    from effloop.runs.compare import inputs  # only where there is something to compare

    lines = inputs(*known)
    if lines and in_place:
        it = "it, or the table of data.exclude," if state["config"]["data"].get("exclude") else "it"
        raise DataError(
            f"the data is not what the run was trained on: {'; '.join(lines)}; put {it} back, "
            f"or continue with it in a new run: {PROGRAM} resume=RUN OVERRIDE ..."
        )
    return [f"data   not what the checkpoint was trained on: {line}" for line in lines]


def check_same_model(config: Config, state: Mapping[str, Any]) -> None:
    """Raise a ConfigError for another task or another network than the checkpoint's."""
    trained_for = state["config"]["task"]["name"]
    if trained_for != config.task.name:
        raise ConfigError(f"task: the checkpoint was trained with task={trained_for}, not {config.task.name}; keep it")
    was, now = state["config"]["model"], configs.to_dict(config)["model"]
    if (held := _model_words(was)) != (asked := _model_words(now)):
        fix = f"keep {held}" if was["name"] in groups["model"] else "give its module to build_trainer(model=)"
        raise ConfigError(f"model: the checkpoint holds {held}, not {asked}; {fix}")
    was, now = ({"args": {}, **each} for each in (was, now))  # an earlier release's has none
    differ = [key for key in sorted({*was, *now} - _NOT_THE_NETWORK) if was.get(key) != now.get(key)]
    if differ:
        raise ConfigError(
            f"model: the checkpoint holds {', '.join(f'{key} {was.get(key)}' for key in differ)}, "
            f"not {', '.join(f'{key} {now.get(key)}' for key in differ)}; keep the model"
        )


def _model_words(model: Mapping[str, Any]) -> str:
    """What to type for a model: `model=cnn`, `model=resnet18`, `model=timm model.arch=resnet18`."""
    name, arch = model["name"], model.get("arch")
    return f"model={arch or name}" if name == "torchvision" or not arch else f"model={name} model.arch={arch}"


def changed_values(config: Config, state: Mapping[str, Any]) -> list[str]:
    """A line about keys of which a resumed run has another value than its checkpoint; empty if there are none."""
    from effloop.runs import compare  # only where there is something to compare

    now, saved = configs.to_dict(config), state["config"]
    given = now["model"]["name"] not in groups["model"]  # a module, which no config describes
    saved = {**saved, "model": {"name": "cnn"}} if given else saved
    then = configs.to_dict(configs.from_dict(saved, (), "the checkpoint's config"))  # with keys new since
    then |= {"resume": now["resume"]} | ({"model": now["model"]} if given else {})
    found = "; ".join(compare.configs(then, now))
    return [f"config not what the checkpoint was trained with: {found}"] if found else []


def check_position(state: Mapping[str, Any], samples: int) -> None:
    """Raise a ConfigError for a position behind the end of an epoch, which has so many samples."""
    if (seen := state["progress"]["samples_seen"]) > samples:
        raise ConfigError(
            f"resume: the checkpoint is {seen} samples into an epoch, which has {samples} here; continue with the data "
            "and batch_size that it was trained with, or from the weights alone: model.weights=RUN"
        )


def check_same_tensors(model: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Raise a ConfigError for weights of other names or shapes than a model's: the first five, and how many."""
    own = model.state_dict()
    wrong = [f"{name} is missing" for name in own if name not in tensors]
    wrong += [f"{name} is none of the model's" for name in tensors if name not in own]
    for name, tensor in tensors.items():
        found = tuple(getattr(tensor, "shape", ()))
        if name in own and found != (shape := tuple(own[name].shape)):
            wrong.append(f"{name} is {found}, not {shape}")
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
        why = " ".join(str(error).split())[:600]
        raise ConfigError(f"{command}: the checkpoint doesn't fit this config: {why}") from error

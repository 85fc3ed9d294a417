"""Whether a checkpoint fits what a run is told to do with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from effloop import config as configs
from effloop.config import Config
from effloop.errors import PROGRAM, ConfigError, DataError
from effloop.runs import compare

_NOT_THE_NETWORK = {"num_classes", "weights", "freeze", "checkpointing"}
"""Fields of a model's config that change neither the names nor the shapes of its parameters."""


def check_trained_on(state: Mapping[str, Any], classes: Sequence[str], where: str) -> None:
    """Refuse data of other classes than the checkpoint's.

    Raises:
        DataError: with both lists of classes.
    """
    if list(classes) != state["classes"]:
        raise DataError(
            f"{where} has the classes {', '.join(classes[:8])}, "
            f"the checkpoint was trained on {', '.join(state['classes'][:8])}; "
            "set data.root to data of the same classes"
            + ", or data.allow_missing_classes=true"
            * (set(classes) < set(state["classes"]))
        )


def check_resumable(config: Config, state: Mapping[str, Any], *, world_size: int, in_place: bool) -> None:
    """Refuse to continue in another way than a run began.

    Args:
        config: of the run to continue.
        state: the checkpoint.
        world_size: ranks that continue.
        in_place: whether in the same run folder.

    Raises:
        ConfigError: another model, optimizer or size of an update; or nothing is left to do.
    """
    check_same_model(config, state)
    if state["config"]["accumulate"] != config.accumulate:  # the schedule's position counts updates
        was, now = state["config"]["accumulate"], config.accumulate
        raise ConfigError(f"accumulate: the checkpoint was trained with {was}, not {now}; keep accumulate={was}")
    _check_same_batch(config, state, world_size)
    probed = state["config"].get("probe", 0)
    if probed != config.probe:  # it decides what is trained, and how many updates an epoch has
        raise ConfigError(
            f"probe: the checkpoint was trained with {probed}, not {config.probe}; keep it, or begin a run of its own "
            "from the weights alone: model.weights=RUN"
        )
    frozen, freeze = state["config"]["model"]["freeze"], config.model.freeze
    if frozen != freeze:  # the optimizer's state goes by the place among what is trained
        raise ConfigError(
            f"model.freeze: the checkpoint was trained with {frozen}, not {freeze}; keep it, or begin a run of its own "
            "from the weights alone: model.weights=RUN"
        )
    decayed, decay = state["config"]["optim"]["decay_norm_and_bias"], config.optim.decay_norm_and_bias
    if decayed != decay:  # the optimizer's groups depend on it
        words = (str(decayed).lower(), str(decay).lower())
        raise ConfigError(
            f"optim.decay_norm_and_bias: the checkpoint was trained with {words[0]}, not {words[1]}; keep it"
        )
    optim, epoch = state["config"]["optim"]["name"], state["progress"]["epoch"]
    if optim != config.optim.name:
        raise ConfigError(f"optim: the checkpoint was trained by optim={optim}, not {config.optim.name}; keep it")
    if epoch >= config.epochs and not in_place:
        raise ConfigError(
            f"epochs: {config.epochs}, but {config.resume} has done {epoch}; set epochs={epoch + 1} or more"
        )


def _check_same_batch(config: Config, state: Mapping[str, Any], world_size: int) -> None:
    """Refuse another global batch size."""
    was, ranks = state["config"]["batch_size"], state["world_size"]
    if was * ranks != config.batch_size * world_size:
        ours, theirs = (f" on {count} ranks" if max(ranks, world_size) > 1 else "" for count in (world_size, ranks))
        fits, rest = divmod(was * ranks, world_size)
        raise ConfigError(
            f"batch_size: the checkpoint was trained with {was}{theirs}, not {config.batch_size}{ours}; "
            + (f"keep {ranks} ranks" if rest else f"keep batch_size={fits}{ours}")
        )


def check_same_data(state: Mapping[str, Any], data: Mapping[str, Any], *, in_place: bool) -> list[str]:
    """Refuse to continue with other data in the same run folder; in a new one a line for each split says so.

    Args:
        state: the checkpoint.
        data: {split: its fingerprint} of the run to continue.
        in_place: whether in the same run folder.

    Raises:
        DataError: with both fingerprints.
    """
    lines = compare.inputs(state.get("data", data), data)
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


@contextmanager
def fitting(command: str) -> Iterator[None]:
    """Around loading a state: turns what doesn't fit into a `ConfigError`."""
    try:
        yield
    except (KeyError, RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{command}: the checkpoint doesn't fit this config: {reason}") from error

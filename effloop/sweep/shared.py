"""What all jobs of a sweep share: their overrides, and the config that these make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from effloop.config import Config, finish, hydra_app, hydra_setup, messages
from effloop.config.task_of_data import follow_data
from effloop.data.source import ScanError
from effloop.errors import ConfigError


def shared_overrides(parsed: Iterable[Override]) -> dict[str, str]:
    """{key: override} of what all jobs of a sweep have; of several with a key the last counts."""
    last = {each.get_key_element(): each for each in parsed}
    return {key: str(each.input_line) for key, each in last.items() if not each.is_sweep_override()}


def compose_shared(flags: Sequence[str], parsed: Sequence[Override]) -> tuple[Any, Config]:
    """Hydra's own config, and that of what all jobs share; of the first job where keys need a value that is swept."""
    shared = shared_overrides(parsed)
    try:
        return _compose(flags, list(shared.values()))
    except (ConfigError, ScanError):  # e.g. model=resnet18,resnet50 model.pretrained=true: the default model hasn't
        swept = {each.get_key_element(): each for each in parsed if each.is_choice_sweep() or each.is_range_sweep()}
        first = [f"{key}={next(iter(each.sweep_string_iterator()))}" for key, each in swept.items()]
        return _compose(flags, [*shared.values(), *first])


def _compose(flags: Sequence[str], overrides: list[str]) -> tuple[Any, Config]:
    with messages.in_one_line(Config, overrides):
        tree = hydra_setup.compose_tree(Config, [*overrides, *hydra_app.searchpath(flags)], with_hydra=True)
        alone = hydra_app.without_hydra(tree)
        return tree.hydra, finish(alone, [*overrides, *follow_data(alone, overrides)])

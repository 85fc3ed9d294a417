"""The task that suits the data, where the user has chosen none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from effloop.config.hydra_setup import chosen_names, compose_tree
from effloop.config.schema import Config
from effloop.config.typed import key_of
from effloop.data.source import DataConfig, Kind, ScanError, kind_of, source_config
from effloop.errors import EffLoopError
from effloop.task.kinds import TASK_OF


def follow_data(tree: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Choose the task by what the targets of the data are, or tell the data what a chosen task takes.

    Only data is opened whose format leaves open what its targets are. What is wrong with it is reported by building, or
    now where that has taken a scan of it.

    Args:
        tree: composed, of `Config`; it is changed.
        overrides: that it is composed of.

    Returns:
        `task=NAME`, as if it had been typed; nothing where the task is chosen, or the targets are classes.

    Raises:
        ScanError: no split of the data can be opened.
    """
    chosen = chosen_names("task", overrides) or any(key_of(each).partition(".")[0] == "task" for each in overrides)
    with _left_to_building(), flag_override(tree, ["readonly", "struct"], False):
        data: Any = OmegaConf.to_object(tree.data)
        if not isinstance(data, DataConfig):
            return []
        if not chosen and (kind := kind_of(data)) is not Kind.classes:
            word = f"task={TASK_OF[kind.value]}"
            tree.task = compose_tree(Config, [word]).task
            return [word]
        taken = next((kind for kind, name in TASK_OF.items() if name == tree.task.name), None)
        if chosen and taken and getattr(source_config(data), "targets", "") is None:
            tree.data.targets = taken
    return []


@contextmanager
def _left_to_building() -> Iterator[None]:
    try:
        yield
    except ScanError:
        raise
    except (EffLoopError, OmegaConfBaseException):
        pass

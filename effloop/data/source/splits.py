"""The splits of a dataset: found by their names, or made of one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from effloop.data.source.base import USUAL, WHOLE, Kind, NoSplitError, Source, sources
from effloop.data.source.config import Cache, DataConfig
from effloop.data.source.storage.kept import once, opening_once
from effloop.data.source.view import View
from effloop.errors import ConfigError, DataError, EffLoopError

_TEST = "test"  # taken for validation where nothing else is there


def open_split(config: DataConfig, split: str, classes: Sequence[str] | None = None) -> Source:
    """Open a split; with `data.allow_missing_classes`, its labels count the classes of all splits.

    These are the classes of the training split, then those that only the validation split has, then any other.

    Args:
        config: of the data.
        split: train, val, or the name of another one in the data.
        classes: what comes first instead, such as the classes that a checkpoint was trained on.
    """
    source = open_part(config, split)
    if not (config.allow_missing_classes and source.classes) or source.kind is Kind.masks:
        return source
    found = dict.fromkeys(classes or ())
    for name in () if classes else ("train", "val"):
        with suppress(EffLoopError):  # there is no such split
            found.update(dict.fromkeys(open_part(config, name).classes))
    found.update(dict.fromkeys(source.classes))
    return source if tuple(found) == source.classes else View(source, classes=[*found])


@opening_once()
def open_part(config: DataConfig, split: str) -> Source:
    """As `open_split`, with the classes that the split itself has."""
    source = whole_of(config, split)
    if config.divides and split in USUAL:
        from effloop.data.source.division import part_of

        source = part_of(source, config, split)
    if config.exclude is None:
        return source
    from effloop.data.source.exclude import without

    return without(source, config, split, partial(whole_of, config))


def whole_of(config: DataConfig, split: str) -> Source:
    """The samples of a split before they are divided, and some are left out."""
    if split not in USUAL:
        return sources.build(config, split)
    return undivided(config) if config.divides else find_split(config, split)


def undivided(config: DataConfig) -> Source:
    """The samples that `data.val` or `data.fold` divides; a ConfigError if there is a validation split already."""
    _refuse_validation(config)
    return find_split(config, "train")


def find_split(config: DataConfig, split: str) -> Source:
    """The split that is called so, or else has one of the usual names, which its `note` then says.

    Raises:
        NoSplitError: there is none.
        ConfigError, DataError: it can't be opened, or there are several.
    """
    found = config.found()
    key = repr(replace(found, cache=Cache.none, check=0))  # these are for what is around it
    return once(("split", key, split), lambda: _find_split(found, split))


def _find_split(config: DataConfig, split: str) -> Source:
    name = config.train_split if split == "train" else config.val_split
    assert name is not None
    try:
        return sources.build(config, name)
    except NoSplitError as error:
        missing = error
    if name != split:  # a name that was set isn't guessed about
        raise missing
    there = _there(config, split, USUAL[split]) or (_there(config, split, [_TEST]) if split == "val" else {})
    if split == "train" and not there and config.divides and not _there(config, "val", ["val", *USUAL["val"], _TEST]):
        there = _there(config, split, [WHOLE])
    if len(there) > 1:
        raise NoSplitError(f"{missing}; of {', '.join(there)}, set data.{split}_split to one")
    if not there:
        fix = "data.val=0.2" + (", a fifth of the training samples" if split == "val" else " if it has no splits")
        raise NoSplitError(str(missing) if config.divides else f"{missing}, or {fix}")
    ((found, source),) = there.items()
    what = "the whole data" if found == WHOLE else f"'{found}'"
    source.note = f"data.{split}_split: there is no '{name}', so {what} is used: {source.where}"
    return source


def has_splits(config: DataConfig) -> bool:
    """Whether the data has a split of a usual name."""
    return any(_there(config, split, [split, *USUAL[split]]) for split in USUAL)


def _there(config: DataConfig, split: str, names: Sequence[str]) -> dict[str, Source]:
    """{name: split} for those of some names that the data has."""
    there = {}
    for name in names:
        with suppress(NoSplitError):
            train, val = (name, config.val_split) if split == "train" else (config.train_split, name)
            there[name] = sources.build(replace(config, train_split=train, val_split=val), name)
    return there


def _refuse_validation(config: DataConfig) -> None:
    """Refuse to divide data that has a validation split already."""
    name = config.val_split
    if name is None:
        return
    if there := _there(config, "val", [name] if name != "val" else ["val", *USUAL["val"]]):
        key = next(key for key in ("val", "folds", "fold") if getattr(config, key) is not None)
        source = next(iter(there.values()))
        raise ConfigError(
            f"data.{key}: {getattr(config, key)} divides the training split, but there is a validation split, "
            f"{source.where}; drop data.{key}, or set data.val_split=null to leave that out"
        )


def check_same_classes(train: Source, val: Source) -> None:
    """Refuse splits with different classes or another order of them: every score would be wrong."""
    if train.kind is not val.kind:
        raise DataError(
            f"train and val have different targets: {train.where} has {train.kind.value}, {val.where} has "
            f"{val.kind.value}; give both the same"
        )
    if train.target_names == val.target_names:
        return
    only = {
        "train": sorted(set(train.target_names) - set(val.target_names)),
        "val": sorted(set(val.target_names) - set(train.target_names)),
    }
    differences = "; ".join(f"only in {split}: {', '.join(names[:8])}" for split, names in only.items() if names)
    what = "classes" if train.classes or val.classes else "numbers"
    fix = ", or set data.allow_missing_classes=true" if what == "classes" else ""
    raise DataError(
        f"train and val have different {what} ({train.where}, {val.where}): "
        f"{differences or 'same names, other order'}; give both the same {what}{fix}"
    )

"""Tensors of images and labels as other people save them by `torch.save`: (images, labels), or a dict with names.

A file is loaded with `weights_only`, which runs nothing in it. What torch 1.6 and later wrote is mapped, not read.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from effloop.data.source.formats.array_names import ArrayNames, ArraysConfig
from effloop.data.source.formats.array_records import contents_of
from effloop.data.source.formats.stored_array import HeldArray
from effloop.data.source.root import begins_with
from effloop.data.source.storage.imported import Contents
from effloop.errors import DataError

LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""How files of torch up to 1.5 begin: a pickle of a number."""

_PAIR = ("images", "labels")
_DEEPEST = 4  # dicts in dicts
_MOST_NAMES = 4096


def arrays_in(files: Sequence[Path], split: str, config: ArraysConfig) -> Contents:
    """What is to be copied of a split: from one file, or from several in a folder.

    Raises:
        DataError, NoSplitError: as `array_records.contents_of`.
    """
    found: dict[str, HeldArray] = {}
    for path in files:
        before = "" if len(files) == 1 else f"{path.name}/"
        for name, value in _named(load(path, mapped=not begins_with(path, LEGACY)), "", 0):
            array = _values(value)
            if array is not None and len(found) < _MOST_NAMES:
                found[before + name] = HeldArray(f"{path}:{name}", array)
    names = ArrayNames([*found], str(config.root), config)
    return contents_of(names, split, config, found.__getitem__)


def load(path: Path, device: str = "cpu", *, mapped: bool = False) -> Any:
    """What a file of `torch.save` holds: tensors, numbers, text, and lists and dicts of these.

    Raises:
        DataError: it holds anything else, or is damaged.
    """
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")  # the DataError is the only line to print
            return torch.load(path if mapped else file, device, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        raise DataError(
            f"{path} holds more than tensors, numbers and text, and is not run; save tensors of images and labels "
            "alone, or convert the images again"
        ) from None
    except Exception as error:  # a damaged or crafted pickle can raise anything
        text = " ".join(str(error).split())[:200]
        raise DataError(f"{path} is damaged: torch.load says: {text}; convert the images again") from None


def _named(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """(name, value) of all that a file holds; of a pair, the first are the images."""
    before = f"{name}/" if name else ""
    pair = isinstance(value, tuple | list) and len(value) == len(_PAIR) and isinstance(value[0], torch.Tensor)
    items = zip(_PAIR, value, strict=True) if pair else value.items() if isinstance(value, Mapping) else None
    if items is None and name:
        yield name, value
    elif items is not None and depth < _DEEPEST:
        for key, each in items:
            if isinstance(key, str):
                yield from _named(each, before + key, depth + 1)


def _values(value: Any) -> NDArray[Any] | None:
    """A dense tensor, or a list of numbers or of text; None for anything else."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized and value.dim():
        try:
            return value.detach().numpy()
        except (TypeError, RuntimeError):  # of a dtype that numpy hasn't
            return None
    if isinstance(value, tuple | list) and value and (kind := type(value[0])) in (int, float, bool, str):
        same = all(type(each) is kind for each in value)
        try:
            return np.array(value, object if kind is str else None) if same else None
        except OverflowError:
            return None
    return None

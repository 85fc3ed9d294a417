"""Initial weights of a model or of its backbone: of a run, of a file, of torchvision or timm."""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from effloop.errors import ConfigError, optional_package, reason
from effloop.lazy import Tensor, nn, torch
from effloop.model.base import Normalisation, Zoo
from effloop.registry import choices
from effloop.system.untrusted import ForeignFileError, check_archive, opened

_KEY, _BACKBONE_KEY = "model.weights", "model.backbone_weights"

_HOLDERS = ("model", "state_dict")  # keys of weights in a checkpoint: EffLoop's own, and many others'
_IMAGENET: Normalisation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # the defaults of `data.mean` and `data.std`

_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")  # prefixes by DataParallel, DDP and torch.compile

# Prefixes of what is the backbone in some networks: torchvision's MobileNets have `features`, smp's of timm `model`.
_BEFORE = re.compile(r"^(?:module\.|_orig_mod\.|backbone\.|encoder\.|model\.|features\.)+")

# `norm.1.weight` in torchvision's own files is `norm1.weight` in its DenseNets.
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")

_COUNTER = "num_batches_tracked"  # A buffer of BatchNorm that files of torch 0.4 lack


def load_weights(
    model: nn.Module,
    weights: str,
    zoo: Zoo | None = None,
    image_size: Any = 224,
    normalisation: Normalisation = _IMAGENET,
) -> str:
    """Load weights into a model; the head, the last layers, stays as initialised if its number of classes differs.

    Args:
        model: changed in place.
        weights: a run folder of EffLoop (its best checkpoint, else the last), a .ckpt file, a file by `torch.save`
            or safetensors that holds a state dict, or the name of weights of `zoo`.
        zoo: the package that has weights for this model, if one has.
        image_size: as in the config, to which timm resamples position embeddings.
        normalisation: mean and std of the run's images; the line for users says where the weights expect others.
    """
    found, where, expects = _found(weights, zoo, image_size, normalisation)
    tensors, own = _renamed(found, model), model.state_dict()
    summed = _sum_over_rgb(own, tensors)
    differ = [name for name in own if name in tensors and tensors[name].shape != own[name].shape]
    head = differ if _is_head(differ, own, tensors) else []
    wrong = [_sizes(name, tensors, own) for name in differ if name not in head]
    for name in differ:
        del tensors[name]
    try:
        result = model.load_state_dict(tensors, strict=False)
    except (RuntimeError, ValueError) as error:  # from a module with its own loading code, such as MNASNet
        raise ConfigError(f"model.weights: {where} can't be taken: {reason(error)}; use another file") from None
    wrong += [f"{name} is missing there" for name in result.missing_keys if name not in differ]
    wrong += [f"{name} is unknown here" for name in result.unexpected_keys]
    _refuse(wrong, _KEY, where, "choose the model that it was saved from")
    left = f"; {', '.join(head)} not loaded: another number of classes" if head else ""
    return f"weights: {len(own) - len(head)} tensors from {where}{summed}{left}{expects}"


def load_backbone(
    model: nn.Module, weights: str, zoo: Zoo | None, image_size: Any, normalisation: Normalisation
) -> str:
    """Load weights of a model of images into the `backbone` or `encoder` of one of pixels, whose heads stay as
    initialised; arguments, line and errors as of `load_weights`.
    """
    children = dict(model.named_children())
    backbone = children.get("backbone", children.get("encoder"))
    if backbone is None:
        raise ConfigError(
            f"{_BACKBONE_KEY}: {weights}, but this model has no backbone; set {_BACKBONE_KEY}=null, or model.weights"
        )
    try:
        found, where, expects = _found(weights, zoo, image_size, normalisation)
    except ConfigError as error:
        raise ConfigError(str(error).replace(_KEY, _BACKBONE_KEY)) from error
    own, names = backbone.state_dict(), {_BEFORE.sub("", name): name for name in found}
    pairs = {name: names.get(_BEFORE.sub("", name)) for name in own}
    tensors = {name: found[theirs] for name, theirs in pairs.items() if theirs is not None}
    summed = _sum_over_rgb(own, tensors)
    wrong = [f"{name} is missing there" for name in own if name not in tensors and not name.endswith(_COUNTER)]
    wrong += [_sizes(name, tensors, own) for name, each in tensors.items() if each.shape != own[name].shape]
    _refuse(wrong, _BACKBONE_KEY, where, "name weights of the network that the model is built on")
    backbone.load_state_dict(tensors)
    return f"weights: {len(tensors)} tensors of the backbone from {where}{summed}{expects}"


def _found(
    weights: str, zoo: Zoo | None, image_size: Any, normalisation: Normalisation
) -> tuple[Mapping[str, Tensor], str, str]:
    """Weights by their names where they are from, and in words where that is and what mean and std they expect."""
    path = weights_file(weights)
    names = zoo.names() if zoo and path is None else []
    expected: Normalisation | None
    if zoo and weights in names:
        where, (found, expected) = f"{zoo.package}'s {weights}", zoo.weights(weights, image_size)
    elif path is not None:
        content = _read(path)
        where, found, expected = str(path), _tensors(content, path), _normalisation(content)
    else:
        known = f"; or a name that {zoo.package} has for {zoo.arch}: {choices(weights, names)}" if zoo and names else ""
        raise ConfigError(f"{_KEY}: '{weights}' is not there; name a run folder or a file{known}")
    if expected is None:
        return found, where, ""
    if len(normalisation[0]) == 1:
        of_grey = [(round(sum(values) / len(values), 6),) for values in expected]  # as `data.mean` is
        expected = of_grey[0], of_grey[1]
    mean, std = (f"[{','.join(map(str, values))}]" for values in expected)
    pair = f"data.mean={mean} data.std={std}"
    if expected == normalisation:
        return found, where, f"; images are normalised for them, by {pair}"
    return found, where, f"; images aren't normalised for them: set {pair}"


def _normalisation(content: Any) -> Normalisation | None:
    """The mean and std that a checkpoint of EffLoop's was trained with; None if the file has none."""
    config = content.get("config") if isinstance(content, Mapping) else None
    data = config.get("data") if isinstance(config, Mapping) else None
    if not isinstance(data, Mapping) or not data.get("mean") or not data.get("std"):
        return None
    return tuple(data["mean"]), tuple(data["std"])


def weights_file(weights: str) -> Path | None:
    """The file to read weights from; None if it isn't an existing path."""
    path = Path(weights).expanduser()
    if not path.is_dir():
        return path if path.exists() else None
    for name in ("best", "last"):
        checkpoint = path / "checkpoints" / f"{name}.ckpt"
        if checkpoint.is_file():
            return checkpoint
    raise ConfigError(f"model.weights: '{path}' has no checkpoints/best.ckpt or last.ckpt; name a run folder or a file")


def _refuse(wrong: Sequence[str], key: str, where: str, fix: str) -> None:
    if wrong:
        first = "; ".join(wrong[:5]) + ("; …" if len(wrong) > 5 else "")
        raise ConfigError(f"{key}: tensors of {where} that don't match: {len(wrong)} ({first}); {fix}")


def _sizes(name: str, found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    return f"{name} is {tuple(found[name].shape)} there, {tuple(own[name].shape)} here"


def _sum_over_rgb(own: Mapping[str, Tensor], found: dict[str, Tensor]) -> str:
    """Make a convolution of RGB one of grey where the model has that, as `take_grey` does; says so for users."""
    summed = ""
    for name, tensor in own.items():
        if tensor.ndim == 4 and tensor.shape[1] == 1 and name in found:
            rgb = found[name]
            if rgb.shape == (len(rgb), 3, *tensor.shape[2:]):
                found[name] = rgb.sum(1, keepdim=True)
                summed += f"; {name} summed over R, G, B"
    return summed


def _is_head(differ: Sequence[str], own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> bool:
    """Whether tensors of other shapes are the last ones of the network, or of each child of it that they are in, and
    differ only in the first dimension, all by the same numbers.
    """
    for child in {name.partition(".")[0] for name in differ}:
        in_child, everything = [name for name in own if name.partition(".")[0] == child], list(own)
        tail = [name for name in differ if name in in_child]
        if tail not in (in_child[-len(tail) :], everything[-len(tail) :]):
            return False
    classes = {(found[name].shape[:1], own[name].shape[:1]) for name in differ}
    return len(classes) == 1 and all(found[name].shape[1:] == own[name].shape[1:] and own[name].ndim for name in differ)


def _renamed(found: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A new dict of the tensors by the model's names, without prefixes of wrappers."""
    own = model.state_dict().keys()
    names = {name: name if name in own else _WRAPPERS.sub("", name) for name in found}
    renamed: Any = OrderedDict((_OLD_DENSENET.sub(r"\1\2", new), found[name]) for name, new in names.items())
    versions = getattr(found, "_metadata", None)  # versions of modules, which MNASNet needs
    if versions is not None:
        renamed._metadata = {_WRAPPERS.sub("", f"{name}.").removesuffix("."): each for name, each in versions.items()}
    tensors: dict[str, Tensor] = renamed
    return tensors


def _read(path: Path) -> Any:
    """A file's content, mapped on the CPU: a checkpoint's optimizer, twice the weights, is then never read."""
    try:
        if path.suffix == ".safetensors" and path.is_file():
            reader = optional_package("safetensors.torch", "model.weights=FILE.safetensors", "safetensors")
            return reader.load_file(path)
        with opened(path) as file:
            check_archive(file)
        return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(f"model.weights: {path} is refused: it holds more than tensors ({reason(error)})") from None
    except ConfigError:
        raise
    except ForeignFileError:
        raise ConfigError(
            f"model.weights: {path} is not a file by torch.save since torch 1.6; "
            "name such a file, of a state dict, or a run folder"
        ) from None
    except Exception as error:
        raise ConfigError(f"model.weights: {path} can't be read: {reason(error)}; use another file") from None


def _tensors(content: Any, path: Path) -> Mapping[str, Tensor]:
    if isinstance(content, Mapping) and content:
        if all(isinstance(value, torch.Tensor) for value in content.values()):
            return content
        average = content.get("average")
        if isinstance(average, Mapping) and "model" in average:  # EffLoop's checkpoints of format 2, with an EMA
            return _tensors(average, path)
        for key in _HOLDERS:
            if key in content:
                return _tensors(content[key], path)
    raise ConfigError(f"model.weights: {path} holds no state dict, alone or as {', '.join(_HOLDERS)}; torch.save one")

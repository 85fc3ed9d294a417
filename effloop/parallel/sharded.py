"""Weights, gradients and optimizer state that are split among ranks, and their checkpoints."""

from __future__ import annotations

import pickle
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from effloop.errors import CheckpointError, ConfigError, reason
from effloop.parallel.ddp import Ddp
from effloop.system.untrusted import check_archive, opened


class Fsdp(Ddp):
    """As ddp, with weights, gradients and optimizer state split among ranks: torch's `fully_shard`.

    A block's weights are gathered while it computes.
    """

    def shard(
        self, model: nn.Module, blocks: Callable[[nn.Module], list[nn.Module]], dtype: torch.dtype | None
    ) -> None:
        if dtype == torch.float16:
            raise ConfigError("precision: float16 can't be used with parallel=fsdp; set precision=bf16 or fp32")
        with self._watchdog.waiting("to begin with the same weights"), torch.no_grad():
            for each in chain(model.parameters(), model.buffers()):
                each.data = each.data.contiguous()  # as torch demands
                dist.broadcast(each, 0)
        # BatchNorm takes no weights in bfloat16; autocast casts the others where they are used.
        norms = any(isinstance(each, _BatchNorm) for each in model.modules())
        policy = MixedPrecisionPolicy(None if norms else dtype, torch.float32)
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for part in (*blocks(model), model):  # the rest is a part of its own, freed after the forward pass, too
            fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=policy)

    def wrap_step(self, step: nn.Module, *, find_unused: bool) -> nn.Module:
        del find_unused
        return step

    def local(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]

    def all_ranks(self, flag: Tensor) -> Tensor:
        flag = flag.to(self.device).byte()  # a rank that has no gradients has its flag on the host
        with self._watchdog.waiting("for the check of the gradients"):
            dist.all_reduce(flag, dist.ReduceOp.MIN)
        return flag.bool()

    def whole(self, state: dict[str, Any], folder: Path) -> dict[str, Any]:
        split, rest = dict[str, Tensor](), dict[int, dict[str, Any]]()
        for number, own in state["optimizer"]["state"].items():
            split |= {f"{number}.{name}": each for name, each in own.items() if isinstance(each, DTensor)}
            rest[number] = {name: each for name, each in own.items() if not isinstance(each, DTensor)}
        state = {**state, "optimizer": {**state["optimizer"], "state": rest}}
        shards = folder / f"shards-{self.gather(time.time_ns())[0]}"
        with self._watchdog.waiting("for the weights of a checkpoint"):
            for weights in (state[key] for key in ("model", "trained") if key in state):
                for name, each in weights.items():
                    if isinstance(each, DTensor):
                        full = each.full_tensor()
                        weights[name] = None if self.rank else full.cpu()
            if split:
                state |= {"shards": {"folder": shards.name, "crc32": _write(split, shards)}}
        return state

    def own(self, values: Mapping[Any, Any], like: Mapping[Any, Any]) -> Mapping[Any, Any]:
        return {key: self._own(value, like.get(key)) for key, value in values.items()}

    def _own(self, value: Any, like: Any) -> Any:
        if isinstance(value, Mapping):
            return self.own(value, dict.fromkeys(value, like))
        if type(value) is not Tensor or not isinstance(like, DTensor) or value.shape != like.shape:
            return value
        return distribute_tensor(value.contiguous(), like.device_mesh, like.placements, src_data_rank=None)


# What stays split is written and read by torch.distributed.checkpoint (DCP), for any number of ranks.


def _write(split: dict[str, Tensor], folder: Path) -> int:
    """Write tensors, as all ranks do; on rank 0, which writes the index last, its checksum."""
    try:
        save(split, checkpoint_id=folder)
        return 0 if dist.get_rank() else zlib.crc32((folder / ".metadata").read_bytes())
    except (CheckpointException, OSError) as error:
        raise CheckpointError(
            f"{folder} could not be written: {_reason(error)}; what was saved before is untouched; look at the disk, "
            "and resume"
        ) from None


def with_shards(
    state: Mapping[int, Mapping[str, Any]], shards: Mapping[str, Any], parameters: Sequence[Tensor]
) -> dict[int, dict[str, Any]]:
    """A checkpoint's state of an optimizer, by parameter, with what is in `shards`, split as the parameters are now.

    Raises:
        CheckpointError: they aren't there, or not as they were written.
    """
    folder, found = Path(shards["folder"]), {number: dict(each) for number, each in state.items()}
    try:
        if not re.fullmatch(r"shards-\d+", folder.name):
            raise ValueError("it has another name")
        reader = _Reader(folder, shards["crc32"])
        values = dict[str, Tensor]()
        for key, entry in reader.read_metadata().state_dict_metadata.items():
            number, _, name = key.partition(".")
            like = parameters[int(number)]
            values[key] = torch.empty_like(like, dtype=entry.properties.dtype, requires_grad=False)
            found[int(number)][name] = values[key]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(values, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # whatever their bytes lead to
        raise CheckpointError(
            f"{folder} can't be read: {_reason(error)}; use another checkpoint, or start from the weights alone: "
            "model.weights=RUN"
        ) from None
    return found


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return reason(error)


_INDEX = re.compile(
    r"torch\.(Size|b?float\d+|serialization\._get_layout)|pathlib(\._local)?\.PosixPath|"
    r"torch\.distributed\.checkpoint\.(metadata\._?[A-Z]\w+|filesystem\._StorageInfo)"
)
"""What DCP's index, a pickle, may hold."""


class _Index(pickle.Unpickler):
    """Reads it without running code."""

    def find_class(self, module: str, name: str) -> Any:
        if not _INDEX.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"its index holds {module}.{name}")
        return super().find_class(module.removesuffix("._local"), name)  # Python 3.13's name, which 3.12 doesn't know


class _Reader(FileSystemReader):
    """DCP's files, each record of which is checked before it is used."""

    def __init__(self, folder: Path, crc32: int) -> None:
        super().__init__(folder)
        self._crc32 = crc32

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with opened(Path(self.path) / ".metadata") as file:
            data = file.read()
        if zlib.crc32(data) != self._crc32:
            raise ValueError("its index is damaged")
        return _Index(BytesIO(data)).load()

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        view = super()._slice_file(file, sinfo)
        record = BytesIO(view.read(sinfo.length))
        check_archive(record)
        record.seek(0)
        return record

"""What a training step takes of a GPU's memory, part by part, and the largest batch that fits."""

from __future__ import annotations

from bisect import bisect_right

from effloop.assemble.environment import Resolved
from effloop.plan.trace import Trace
from effloop.system.memory import USABLE, step_parts

CONTEXT = 820_000_000
"""Bytes of a process on a GPU beside torch's tensors: the driver's, kernels, and what libraries allocate themselves. On
an H100 with torch 2.11 and CUDA 13 it was 804 to 846 MB after steps of 49 models; older ones, which load
all kernels, take 1.5 GB on an RTX 3090 (pytorch issue 49877), and timm's batches are compared with that."""


def gpu_memory(trace: Trace, config: Resolved, batch: int, ratio: float, gpus: int = 1) -> dict[str, int]:
    """What each part of a run takes of one GPU's memory when most is in use; the sum is what the GPU has to have.

    DDP adds nothing: its buckets are the gradients (`gradient_as_bucket_view`). NCCL's own buffers aren't counted.

    Args:
        trace: of the model at `config.size`, in the precision of the GPU.
        config: optimizer, channels, EMA, progressive sizes and strategy; its `batch_size` doesn't matter.
        batch: images of the GPU's batch.
        ratio: bytes that the optimizer keeps for each of its parameters, as of `effloop.optim.state_ratio`.
        gpus: among which `parallel=fsdp` splits weights, gradients and optimizer.

    Returns:
        {part: bytes}, without parts that take nothing.
    """
    split = gpus if config.parallel.name == "fsdp" else 1
    largest = max([config.size, *config.train_sizes], key=lambda size: size.pixels).pixels
    images = batch * largest / config.size.pixels
    parts = step_parts(
        trace.weights // split,
        trace.trained // split,
        ratio,
        saved=images * (trace.saved + trace.block),
        casts=trace.fixed,
        buffers=images * trace.buffers,
        ema=config.optim.ema > 0,
        probe=config.probe > 0,
    )
    if virtual := config.parallel.virtual:
        parts["gradients"] *= (virtual // gpus).bit_length()  # sums of a tree over the rank's parts of an update
    parts["inputs"] = batch * largest * config.data.channels * (4 + 1)  # float32 ones, and the next batch's pixels
    return {name: size for name, size in parts.items() if size} | {
        "fragmentation": round(sum(parts.values()) * (1 / USABLE["gpu"] - 1)),
        "context": CONTEXT,
    }


def largest_batch(trace: Trace, config: Resolved, memory: int, ratio: float, gpus: int = 1) -> int:
    """The most images that fit into a GPU's `memory`, in bytes; from 8 on a multiple of 8, of which tensor cores make
    the most.

    Other arguments are as of `gpu_memory`. Of 196 models of timm's that were held out, it is timm's own largest
    batch on an RTX 3090 for 95 %, and one of its steps off for the others but one. The peak of tensors in 59 steps of
    49 models on an H100, by which the formula was chosen, is within 5 %, half of them within 1 %. The first figure
    is of an earlier form of it.
    """

    def needed(batch: int) -> int:
        return sum(gpu_memory(trace, config, batch, ratio, gpus).values())

    count = bisect_right(range(1, 1 << 40), memory, key=needed)
    return count if count < 8 else count // 8 * 8

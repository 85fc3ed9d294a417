"""BatchNorm over the images of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        result: Tensor = _SumOverRanks.apply(gradients[0])  # each rank's loss depends on every rank's values
        return result


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose mean and variance in training are over all ranks' images, on any device: torch's is for GPUs."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the parent's name
        """(N, C, ...) -> (N, C, ...), normalised."""
        if not self.training and self.running_mean is not None:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        dims = [dim for dim in range(input.ndim) if dim != 1]
        var, mean = torch.var_mean(input.float(), dims, correction=0)
        var, mean = var.double(), mean.double()
        count = torch.full_like(mean, input.numel() / input.shape[1])
        # One all-reduce. The variance is a difference of squares: float32 would lose one that is 1e7 times smaller
        # than the square of the mean.
        sums = _SumOverRanks.apply(torch.stack([mean * count, (var + mean.square()) * count, count]))
        count, mean = sums[2].detach(), sums[0] / sums[2]
        var = (sums[1] / sums[2] - mean.square()).clamp(min=0)
        if self.training and self.running_mean is not None:
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = var.detach() * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        scale = (var + self.eps).rsqrt().float()
        weight = scale if self.weight is None else scale * self.weight
        shape = [1, -1, *[1] * (input.ndim - 2)]
        result: Tensor = (input - mean.float().view(shape)) * weight.view(shape)
        return (result if self.bias is None else result + self.bias.view(shape)).to(input.dtype)

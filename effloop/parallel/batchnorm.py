"""Synchronized BatchNorm for any device: torch's own is for GPUs only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Normalize(torch.autograd.Function):
    """Normalise by mean and variance over all ranks; the gradient includes this rank's part in them."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor, stats: Tensor, eps: float) -> Tensor:
        mean, var, count = stats[0], stats[1], stats[2, :1]
        scale = (var + eps).rsqrt()
        ctx.save_for_backward(images, weight, mean, scale, count)
        return F.batch_norm(images, mean.float(), var.float(), weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        images, weight, mean, scale, count = ctx.saved_tensors
        shape = [1, -1, *[1] * (images.ndim - 2)]
        dims = [dim for dim in range(images.ndim) if dim != 1]
        normal = (images - mean.float().view(shape)) * scale.float().view(shape)
        own = torch.stack([gradient.sum(dims, dtype=torch.float64), (gradient * normal).sum(dims, dtype=torch.float64)])
        both = own.clone()
        dist.all_reduce(both)
        both = (both / count).float()
        through = gradient - both[0].view(shape) - normal * both[1].view(shape)
        to_images = through * (weight * scale.float()).view(shape)
        return to_images.to(images.dtype), own[1].to(weight.dtype), own[0].to(weight.dtype), None, None


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose mean and variance in training are over all ranks' images, on any device."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  the parent's name
        if input.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.ndim}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """(N, C, ...) -> (N, C, ...), normalised."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        return self._over_ranks(input)

    def _over_ranks(self, images: Tensor) -> Tensor:
        stats = _stats(images)
        if self.training and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            count = stats[2]
            unbiased = stats[1] * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(stats[0].to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        weight = self.weight if self.weight is not None else torch.ones_like(stats[0], dtype=torch.float32)
        bias = self.bias if self.bias is not None else torch.zeros_like(weight)
        result: Tensor = _Normalize.apply(images, weight, bias, stats, self.eps)
        return result


@torch.no_grad()
def _stats(images: Tensor) -> Tensor:
    """(3, C) float64: mean, biased variance, and count of values, over all ranks.

    It takes one all-reduce. The variance is a difference of squares, which needs float64: float32 would lose one that
    is 1e7 times smaller than the square of the mean.
    """
    dims = [dim for dim in range(images.ndim) if dim != 1]
    var, mean = torch.var_mean(images.float(), dims, correction=0)
    var, mean = var.double(), mean.double()
    count = torch.full_like(mean, images.numel() / images.shape[1])
    sums = torch.stack([mean * count, (var + mean.square()) * count, count])
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    return torch.stack([mean, (sums[1] / sums[2] - mean.square()).clamp(min=0), sums[2]])


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm in a module, in place, by a `SyncBatchNorm` with the same parameters and statistics."""
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        new = SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        new.weight, new.bias = module.weight, module.bias
        new.running_mean, new.running_var = module.running_mean, module.running_var
        new.num_batches_tracked = module.num_batches_tracked
        new.training = module.training
        return new
    for name, child in module.named_children():
        setattr(module, name, convert_sync_batchnorm(child))
    return module

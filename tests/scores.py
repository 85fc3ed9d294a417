"""Scores, counted sample by sample."""

from torch import Tensor


def naive_scores(losses: list[float], logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Loss, top1 and top5, sample by sample."""
    ranks = [int((row > row[target]).sum()) for row, target in zip(logits, targets.tolist(), strict=True)]
    return {
        "loss": sum(losses) / len(losses),
        "top1": sum(rank < 1 for rank in ranks) / len(ranks),
        "top5": sum(rank < 5 for rank in ranks) / len(ranks),
    }

"""Losses on class scores.

Targets are class indices (B,) or, except for `spread`, rows (B, classes): multi-hot, or shares of
mixed images. Every loss is a mean over the batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def multi_hot(scores: Tensor, targets: Tensor) -> Tensor:
    """Targets as rows (B, classes): class indices one-hot, rows as they are."""
    if targets.shape == scores.shape:
        return targets.to(scores.dtype)
    if targets.shape != scores.shape[:1] or targets.is_floating_point():
        raise ValueError(
            f"`targets` must be class indices ({len(scores)},) or rows {tuple(scores.shape)}, "
            f"got {targets.dtype} {tuple(targets.shape)}"
        )
    return F.one_hot(targets, scores.shape[-1]).to(scores.dtype)


def cross_entropy(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Softmax cross-entropy, for one class per image or shares of several."""
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0
) -> Tensor:
    """Sigmoid cross-entropy, for any number of classes per image; mean over classes too."""
    wanted = multi_hot(logits, targets)
    wanted = wanted * (1.0 - label_smoothing) + 0.5 * label_smoothing
    return F.binary_cross_entropy_with_logits(logits, wanted)


def margin(
    lengths: Tensor,
    targets: Tensor,
    *,
    present: float = 0.9,
    absent: float = 0.1,
    down_weight: float = 0.5,
) -> Tensor:
    """Dynamic routing's loss: pushes lengths above `present` for present classes, else below
    `absent`; `down_weight` weighs the latter.
    """
    wanted = multi_hot(lengths, targets)
    missing = F.relu(present - lengths).square()
    surplus = F.relu(lengths - absent).square()
    return (wanted * missing + down_weight * (1.0 - wanted) * surplus).sum(dim=-1).mean()


def spread(activations: Tensor, targets: Tensor, *, margin: float | Tensor = 0.2) -> Tensor:
    """EM routing's loss: the right class's activation must lead every other by `margin`."""
    if targets.ndim != 1:
        raise ValueError(
            f"`targets` must be class indices (B,) for `spread`, got {tuple(targets.shape)}"
        )
    right = activations.gather(1, targets[:, None])
    behind = F.relu(margin - (right - activations)).square()
    return (behind * (1.0 - multi_hot(activations, targets))).sum(dim=-1).mean()


def spread_margin(
    epoch: float | Tensor, *, first: float = 0.2, last: float = 0.9
) -> float | Tensor:
    """The margin of `spread`: rises linearly from `first` to `last` in the first 10 epochs."""
    if isinstance(epoch, Tensor):
        return first + (last - first) * torch.clamp(epoch / 10.0, max=1.0)
    return first + (last - first) * min(epoch / 10.0, 1.0)

"""LayerNorm over each pose, as the layers use it and as a first iteration may take it along."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Norm(NamedTuple):
    """What a LayerNorm over poses of d elements has learned: two vectors of d."""

    weight: Tensor
    bias: Tensor
    eps: float


def normalized(poses: Tensor, norm: Norm) -> Tensor:
    """Statistics in fp32 (or better); the result keeps the dtype that the poses are stored in."""
    wide = torch.promote_types(poses.dtype, torch.float32)
    size = (poses.shape[-1],)
    weight, bias = norm.weight.to(wide), norm.bias.to(wide)
    return F.layer_norm(poses.to(wide), size, weight, bias, norm.eps).to(poses.dtype)


class Unfinished(NamedTuple):
    """Capsules that lack their LayerNorm, and perhaps the 1×1 convolution that makes them.

    `first_step` does what is missing on the way, where a kernel can; `finished` does it now.
    """

    source: Tensor  # poses (B, H, W, capsules, d), or features (B, H, W, C) with a projection
    norm: Norm
    projection: Tensor | None = None  # (capsules, d, C)

    @property
    def shape(self) -> torch.Size:
        """(B, H, W, capsules, d), of what `finished` returns."""
        if self.projection is None:
            return self.source.shape
        return self.source.shape[:-1] + self.projection.shape[:2]

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        return self.source.device

    def finished(self) -> Tensor:
        return normalized(self.poses(), self.norm)

    def poses(self) -> Tensor:
        """Before LayerNorm."""
        if self.projection is None:
            return self.source
        channels = F.linear(self.source, self.projection.flatten(0, 1))
        return channels.unflatten(-1, self.projection.shape[:2])

    def to(self, dtype: torch.dtype) -> "Unfinished":
        projection = None if self.projection is None else self.projection.to(dtype)
        return Unfinished(self.source.to(dtype), self.norm, projection)

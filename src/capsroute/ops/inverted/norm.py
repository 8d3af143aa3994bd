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
    """Capsules that lack their LayerNorm.

    `first_step` takes it along, where a kernel can; `finished` does it now.
    """

    poses: Tensor  # (B, H, W, capsules, d)
    norm: Norm

    def finished(self) -> Tensor:
        return normalized(self.poses, self.norm)

    def to(self, dtype: torch.dtype) -> "Unfinished":
        return self._replace(poses=self.poses.to(dtype))

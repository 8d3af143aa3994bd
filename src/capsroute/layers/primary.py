"""From feature maps to the first capsules."""

from typing import Literal, overload

import torch
from torch import Tensor, nn

from capsroute.layers.checks import check_choice, check_counts, check_features
from capsroute.ops.dynamic import squash
from capsroute.ops.inverted.norm import Norm, Unfinished, normalized
from capsroute.ops.inverted.triton import can_project
from capsroute.ops.tracing import is_exporting, is_transformed


class PoseNorm(nn.LayerNorm):
    """LayerNorm over the pose, shared by all capsules of a layer.

    Statistics are taken in fp32 (or better), and the result keeps the dtype that the poses are
    stored in, also under autocast.
    """

    def forward(self, poses: Tensor) -> Tensor:
        return normalized(poses, self.learned())

    def learned(self) -> Norm:
        return Norm(self.weight, self.bias, self.eps)


class PrimaryCaps(nn.Module):
    """A convolution whose channels are grouped into capsules, then normalised pose by pose.

    Maps features (B, C, H, W) to poses (B, H', W', capsules, pose_dim).

    Args:
        normalization: `layer` (the paper) or `squash` (dynamic routing).
    """

    def __init__(
        self,
        in_channels: int,
        capsules: int,
        pose_dim: int,
        *,
        kernel_size: int = 1,
        stride: int = 1,
        bias: bool = False,
        normalization: str = "layer",
    ) -> None:
        super().__init__()
        check_choice("normalization", normalization, ("layer", "squash"))
        check_counts(in_channels=in_channels, capsules=capsules, pose_dim=pose_dim)
        check_counts(kernel_size=kernel_size, stride=stride)
        self.capsules, self.pose_dim, self.normalization = capsules, pose_dim, normalization
        self.conv = nn.Conv2d(in_channels, capsules * pose_dim, kernel_size, stride, bias=bias)
        if normalization == "layer":
            self.norm = PoseNorm(pose_dim)

    @overload
    def forward(self, features: Tensor, *, finish: Literal[True] = ...) -> Tensor: ...

    @overload
    def forward(self, features: Tensor, *, finish: Literal[False]) -> Tensor | Unfinished: ...

    def forward(self, features: Tensor, *, finish: bool = True) -> Tensor | Unfinished:
        """With `finish=False`, LayerNorm may be left to the first iteration of a `CapsuleStack`.

        So may the convolution, where nobody wants gradients and a kernel can do both.
        """
        if not finish and (waiting := self._waiting(features)) is not None:
            return waiting
        poses = self._poses(features)
        if self.normalization == "squash":
            return squash(poses)
        return self.norm(poses) if finish else Unfinished(poses, self.norm.learned())

    def _waiting(self, features: Tensor) -> Unfinished | None:
        """Capsules that lack even their convolution, where that is possible."""
        if torch.is_grad_enabled() or is_exporting() or is_transformed():
            return None
        if not _is_matrix(self.conv):
            return None
        check_features(features)
        projection = self.conv.weight.view(self.capsules, self.pose_dim, -1)
        features = features.permute(0, 2, 3, 1)
        if self.normalization != "layer" or not can_project(features, projection):
            return None
        return Unfinished(features, self.norm.learned(), projection)

    def _poses(self, features: Tensor) -> Tensor:
        check_features(features)
        # channels last, so that the poses come out contiguous: LayerNorm would copy them otherwise
        features = features.contiguous(memory_format=torch.channels_last)
        channels = self.conv(features).permute(0, 2, 3, 1)
        return channels.unflatten(-1, (self.capsules, self.pose_dim))


def _is_matrix(conv: nn.Conv2d) -> bool:
    """Whether a convolution is no more than a product at each position, and nobody looks at it."""
    pointwise = conv.kernel_size == conv.stride == (1, 1) and conv.padding == (0, 0)
    watched = conv._forward_hooks or conv._forward_pre_hooks or "forward" in vars(conv)
    return type(conv) is nn.Conv2d and pointwise and conv.bias is None and not watched

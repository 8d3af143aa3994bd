"""Capsule layers of dynamic routing (Sabour et al., 2017)."""

from typing import Any

import torch
from torch import Tensor, nn

from capsroute.layers.checks import check_counts, in_one_row, warn_if_huge
from capsroute.ops.choice import check_impl
from capsroute.ops.dynamic import Observer, dynamic_routing

# Sabour et al.'s own initial scale of the transforms
TRANSFORM_STD = 0.1


class _DynamicCaps(nn.Module):
    """What the convolutional and the linear layer share: transforms, and rounds at every call."""

    def __init__(self, shape: tuple[int, ...], iterations: int, impl: str, stride: int = 1) -> None:
        super().__init__()
        check_counts(iterations=iterations, stride=stride)
        check_impl(impl)
        self.iterations, self.impl, self.stride = iterations, impl, stride
        self.weight = nn.Parameter(torch.empty(shape))
        nn.init.normal_(self.weight, std=TRANSFORM_STD)

    def forward(self, children: Tensor, observe: Observer | None = None) -> Tensor:
        options: dict[str, Any] = {"stride": self.stride, "impl": self.impl, "observe": observe}
        return dynamic_routing(children, self.weight, self.iterations, **options)

    def extra_repr(self) -> str:
        *window, n_in, n_out, a, b = self.weight.shape
        conv = f", kernel_size={window[0]}, stride={self.stride}" if window else ""
        return f"{n_in} -> {n_out} capsules, vector {a}×{b}{conv}, iterations={self.iterations}"


class DynamicConvCaps(_DynamicCaps):
    """Convolutional dynamic routing: (B, H, W, in, d) -> (B, H', W', out, d'), without padding.

    Each call runs all `iterations`.
    """

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        pose_dim: int,
        out_pose_dim: int,
        *,
        kernel_size: int = 3,
        stride: int = 1,
        iterations: int = 3,
        impl: str = "auto",
    ) -> None:
        check_counts(in_capsules=in_capsules, out_capsules=out_capsules, pose_dim=pose_dim)
        check_counts(out_pose_dim=out_pose_dim, kernel_size=kernel_size)
        shape = (kernel_size, kernel_size, in_capsules, out_capsules, pose_dim, out_pose_dim)
        super().__init__(shape, iterations, impl, stride)
        self.kernel_size = kernel_size


class DynamicLinearCaps(_DynamicCaps):
    """Fully connected dynamic routing: (B, in, d) or (B, H, W, capsules, d) -> (B, out, d').

    Each call runs all `iterations`.
    """

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        pose_dim: int,
        out_pose_dim: int,
        *,
        iterations: int = 3,
        impl: str = "auto",
    ) -> None:
        check_counts(in_capsules=in_capsules, out_capsules=out_capsules, pose_dim=pose_dim)
        check_counts(out_pose_dim=out_pose_dim)
        shape = (in_capsules, out_capsules, pose_dim, out_pose_dim)
        warn_if_huge(shape)
        super().__init__(shape, iterations, impl)

    def forward(self, children: Tensor, observe: Observer | None = None) -> Tensor:
        return super().forward(in_one_row(children), observe)

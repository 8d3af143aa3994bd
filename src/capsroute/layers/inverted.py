"""Capsule layers that route by inverted dot-product attention."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from capsroute.layers.checks import (
    check_choice,
    check_counts,
    in_one_row,
    matrix_side,
    warn_if_huge,
)
from capsroute.layers.primary import PoseNorm
from capsroute.ops.choice import check_impl
from capsroute.ops.inverted import reference
from capsroute.ops.inverted.api import check_scale, check_shapes, first_step, routing_step
from capsroute.ops.inverted.norm import Unfinished

INITIAL_POSES = ("zeros", "random", "learned")
WINDOWS = ("sliding", "mixed")


def transform_shape(pose: str, pose_dim: int, out_pose_dim: int) -> tuple[int, int]:
    """Sizes (a, b) of one transform W_ij, or a one-line error."""
    check_choice("pose", pose, ("matrix", "vector"))
    check_counts(pose_dim=pose_dim, out_pose_dim=out_pose_dim)
    if pose == "vector":
        return pose_dim, out_pose_dim
    side = matrix_side(pose_dim)
    if out_pose_dim != pose_dim:
        raise ValueError(
            f"`out_pose_dim` must equal `pose_dim` (={pose_dim}) for matrix poses, "
            f"got {out_pose_dim}"
        )
    return side, side


def mixed_windows(children: Tensor, kernel_size: int, stride: int) -> Tensor:
    """Windows (B, H'·k, W'·k, in, d), side by side, as the authors' first release read them.

    It wrote those of all positions as (…, d, H', W') and read them as (…, H', W', d), so a pose
    holds one element of d neighbouring positions, and a position stands for an element. They found
    it after the paper (apple/ml-capsules-inverted-attention-routing, pull request 1).
    """
    seen = reference.windows(children, kernel_size, stride)
    batch, height, width, k, _, capsules, d = seen.shape
    written = seen.permute(0, 3, 4, 5, 6, 1, 2)
    read = written.reshape(batch, k, k, capsules, height, width, d)
    beside = read.permute(0, 4, 1, 5, 2, 3, 6)
    return beside.reshape(batch, height * k, width * k, capsules, d)


class InvertedCaps(nn.Module):
    """What `ConvCaps` and `LinearCaps` share: transforms, LayerNorm and the initial poses.

    `forward(children, parents)` is one routing step and its LayerNorm. `parents=None` is the
    first iteration. A `CapsuleStack` runs the iterations of several layers.
    """

    weight: nn.Parameter
    stride = 1
    windows = "sliding"

    def __init__(
        self,
        weight_shape: tuple[int, ...],
        out_pose_dim: int,
        *,
        layer_norm: bool,
        initial_poses: str,
        scale: float | None,
        impl: str,
    ) -> None:
        super().__init__()
        check_choice("initial_poses", initial_poses, INITIAL_POSES)
        check_impl(impl)
        check_scale(scale)
        self.out_capsules, self.out_pose_dim = weight_shape[-3], out_pose_dim
        self.initial_poses, self.scale, self.impl = initial_poses, scale, impl
        self.weight = nn.Parameter(torch.empty(weight_shape))
        self.norm = PoseNorm(out_pose_dim) if layer_norm else nn.Identity()
        if initial_poses == "learned":
            self.initial = nn.Parameter(torch.zeros(self.out_capsules, out_pose_dim))
        self.reset_parameters()

    @property
    def initial_std(self) -> float:
        """The authors' initial scale: √(out / (a · in · k²)), a the inner size of the product."""
        *window, n_in, n_out, a, _ = self.weight.shape
        return math.sqrt(n_out / (a * n_in * math.prod(window)))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.initial_std)

    def first_parents(self, children: Tensor, size: tuple[int, ...]) -> Tensor | None:
        """Poses before the first iteration; None stands for zeros, which cost nothing."""
        shape = (children.shape[0], *size, self.out_capsules, self.out_pose_dim)
        if self.initial_poses == "random":  # drawn anew at every call, at LayerNorm's own scale
            return torch.randn(shape, device=children.device, dtype=children.dtype)
        if self.initial_poses == "learned":
            return self.initial.to(children.dtype).expand(shape)
        return None

    def forward(
        self,
        children: Tensor | Unfinished,
        parents: Tensor | None = None,
        *,
        return_coefficients: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"stride": self.spacing, "impl": self.impl}
        if isinstance(children, Unfinished):
            plain = self.initial_poses == "zeros" and self.windows == "sliding"
            if parents is None and plain and not return_coefficients:
                return self.norm(first_step(children, self.weight, **options))
            children = children.finished()
        children, size = self.arrange(children)
        if parents is None:
            parents = self.first_parents(children, size)
        options["scale"] = self.scale
        if not return_coefficients:
            return self.norm(routing_step(children, self.weight, parents, **options))
        poses, coefficients = routing_step(
            children, self.weight, parents, return_coefficients=True, **options
        )
        return self.norm(poses), coefficients

    @property
    def spacing(self) -> int:
        """From one window to the next, in the children as `arrange` returns them."""
        return self.stride

    def arrange(self, children: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The children as `routing_step` takes them, and the sizes of the image above."""
        raise TypeError(f"{type(self).__name__} does not define `arrange`")


class ConvCaps(InvertedCaps):
    """Convolutional capsules: (B, H, W, in, d) -> (B, H', W', out, d'), without padding.

    Args:
        in_capsules: capsule types in the layer below.
        out_capsules: capsule types in this layer; those at one position compete for each child.
        pose_dim: elements of a child's pose; 16 for a 4×4 matrix.
        out_pose_dim: elements of a parent's pose; `pose_dim` by default (and for matrix poses).
        pose: `matrix` (√d×√d transforms) or `vector` (d×d' transforms).
        layer_norm: whether to normalise the new poses; False for the paper's ablation A.
        initial_poses: of the parents, before iteration 1: `zeros`, `random` (drawn at every call)
            or `learned`.
        windows: `sliding`, as in any convolution, or `mixed`, as in the authors' first release
            (see `mixed_windows`).
        scale: factor of the agreement; 1/√d' by default.
        impl: see `capsroute.ops.inverted.routing_step`.
    """

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        pose_dim: int,
        out_pose_dim: int | None = None,
        *,
        kernel_size: int = 3,
        stride: int = 1,
        pose: str = "matrix",
        layer_norm: bool = True,
        initial_poses: str = "zeros",
        windows: str = "sliding",
        scale: float | None = None,
        impl: str = "auto",
    ) -> None:
        check_counts(in_capsules=in_capsules, out_capsules=out_capsules)
        check_counts(kernel_size=kernel_size, stride=stride)
        check_choice("windows", windows, WINDOWS)
        out_pose_dim = pose_dim if out_pose_dim is None else out_pose_dim
        a, b = transform_shape(pose, pose_dim, out_pose_dim)
        super().__init__(
            (kernel_size, kernel_size, in_capsules, out_capsules, a, b),
            out_pose_dim,
            layer_norm=layer_norm,
            initial_poses=initial_poses,
            scale=scale,
            impl=impl,
        )
        self.kernel_size, self.stride = kernel_size, stride
        self.pose, self.windows = pose, windows

    @property
    def spacing(self) -> int:
        """Mixed windows are made before the step, which then finds them side by side."""
        return self.kernel_size if self.windows == "mixed" else self.stride

    def arrange(self, children: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        size = tuple((s - self.kernel_size) // self.stride + 1 for s in children.shape[1:3])
        if self.windows == "mixed":
            check_shapes(children.shape, self.weight.shape, None, self.stride)
            children = mixed_windows(children, self.kernel_size, self.stride)
        return children, size

    def extra_repr(self) -> str:
        _, _, n_in, n_out, a, b = self.weight.shape
        return (
            f"{n_in} -> {n_out} capsules, {self.pose} {a}×{b}, "
            f"kernel_size={self.kernel_size}, stride={self.stride}"
            + (", windows=mixed" if self.windows == "mixed" else "")
        )


class LinearCaps(InvertedCaps):
    """Fully connected capsules: (B, in, d) -> (B, out, d').

    Children from a convolutional layer, (B, H, W, capsules, d), are flattened in that order.
    Takes the arguments of `ConvCaps`, except those of a convolution and its windows.
    """

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        pose_dim: int,
        out_pose_dim: int | None = None,
        *,
        pose: str = "matrix",
        layer_norm: bool = True,
        initial_poses: str = "zeros",
        scale: float | None = None,
        impl: str = "auto",
    ) -> None:
        check_counts(in_capsules=in_capsules, out_capsules=out_capsules)
        out_pose_dim = pose_dim if out_pose_dim is None else out_pose_dim
        a, b = transform_shape(pose, pose_dim, out_pose_dim)
        warn_if_huge((in_capsules, out_capsules, a, b))
        super().__init__(
            (in_capsules, out_capsules, a, b),
            out_pose_dim,
            layer_norm=layer_norm,
            initial_poses=initial_poses,
            scale=scale,
            impl=impl,
        )
        self.pose = pose

    def arrange(self, children: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        return in_one_row(children), ()

    def extra_repr(self) -> str:
        n_in, n_out, a, b = self.weight.shape
        return f"{n_in} -> {n_out} capsules, {self.pose} {a}×{b}"

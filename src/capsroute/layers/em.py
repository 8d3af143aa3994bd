"""Layers of an EM-routed capsule network; `ops/em.py` holds the procedure.

Every layer passes on poses and the *logarithms* of activations, in at least float32. `forward`
returns the result of the last iteration, `route` all of them, with their coefficients.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsroute.layers.checks import check_counts, check_features, matrix_side
from capsroute.ops.choice import check_impl
from capsroute.ops.em import em_routing, em_routing_history
from capsroute.ops.precision import widened
from capsroute.ops.votes.moments import Parents


class EMPrimaryCaps(nn.Module):
    """Primary capsules with activations, from two 1×1 convolutions with bias.

    Maps features (B, C, H, W) to poses (B, H, W, capsules, d) and log-activations (B, H, W,
    capsules). The activations come from a sigmoid.
    """

    def __init__(self, in_channels: int, capsules: int, pose_dim: int) -> None:
        super().__init__()
        check_counts(in_channels=in_channels, capsules=capsules)
        matrix_side(pose_dim)
        self.capsules, self.pose_dim = capsules, pose_dim
        self.pose = nn.Conv2d(in_channels, capsules * pose_dim, 1)
        self.activation = nn.Conv2d(in_channels, capsules, 1)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        check_features(features)
        poses = self.pose(features).movedim(1, -1).unflatten(-1, (self.capsules, self.pose_dim))
        logits = self.activation(features).movedim(1, -1)
        return widened(poses), F.logsigmoid(widened(logits))


class _EMRouting(nn.Module):
    """What the convolutional and the class layer share: transforms, β_u, β_a and iterations.

    Transforms start as the identity plus Gaussian noise: means of votes then keep the size of the
    poses, however many children there are, while averages of purely random votes would shrink with
    every layer until the variance floor hides them. The noise makes the parents differ.
    """

    def __init__(
        self, shape: tuple[int, ...], pose_dim: int, iterations: int, impl: str, stride: int = 1
    ) -> None:
        super().__init__()
        n = matrix_side(pose_dim)
        check_counts(iterations=iterations, stride=stride)
        check_impl(impl)
        self.iterations, self.impl, self.stride = iterations, impl, stride
        self.weight = nn.Parameter(torch.empty(*shape, n, n))
        self.beta_u = nn.Parameter(torch.empty(shape[-1]))
        self.beta_a = nn.Parameter(torch.empty(shape[-1]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        n = self.weight.shape[-1]
        with torch.no_grad():
            self.weight.normal_(std=0.5 / math.sqrt(n))
            self.weight.add_(torch.eye(n, device=self.weight.device, dtype=self.weight.dtype))
            self.beta_u.zero_()
            self.beta_a.zero_()

    def forward(self, poses: Tensor, log_activations: Tensor) -> tuple[Tensor, Tensor]:
        operands = poses, log_activations, self.weight, self.beta_u, self.beta_a
        return em_routing(*operands, iterations=self.iterations, stride=self.stride, impl=self.impl)

    def route(self, poses: Tensor, log_activations: Tensor) -> list[Parents]:
        """Every iteration's poses, log-activations and coefficients; the last is the result.

        The kernels keep no coefficients, so the votes are taken tile by tile, whatever `impl` is.
        """
        operands = poses, log_activations, self.weight, self.beta_u, self.beta_a
        return em_routing_history(*operands, iterations=self.iterations, stride=self.stride)

    def extra_repr(self) -> str:
        *window, n_in, n_out, n, _ = self.weight.shape
        conv = f", kernel_size={window[0]}, stride={self.stride}" if window else ""
        return f"{n_in} -> {n_out} capsules, matrix {n}×{n}{conv}, iterations={self.iterations}"


class EMConvCaps(_EMRouting):
    """EM routing between convolutional capsule layers, without padding.

    Maps poses and log-activations, (B, H, W, in, d) and (B, H, W, in), to (B, H', W', out, d) and
    (B, H', W', out). Has k·k·in·out·d transform weights, and a β_u and a β_a for each of the `out`
    capsule types.
    """

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        pose_dim: int,
        *,
        kernel_size: int = 3,
        stride: int = 1,
        iterations: int = 2,
        impl: str = "auto",
    ) -> None:
        check_counts(in_capsules=in_capsules, out_capsules=out_capsules, kernel_size=kernel_size)
        shape = (kernel_size, kernel_size, in_capsules, out_capsules)
        super().__init__(shape, pose_dim, iterations, impl, stride)


class EMClassCaps(_EMRouting):
    """EM routing from every capsule at every position to one capsule per class.

    Maps poses and log-activations, (B, H, W, in, d) and (B, H, W, in), to (B, classes, d) and
    (B, classes). Transforms are shared by all positions (in·classes·d weights), so votes carry
    their coordinates.
    """

    def __init__(
        self,
        in_capsules: int,
        num_classes: int,
        pose_dim: int,
        *,
        iterations: int = 2,
        impl: str = "auto",
    ) -> None:
        check_counts(in_capsules=in_capsules, num_classes=num_classes, pose_dim=pose_dim)
        if pose_dim < 4:
            raise ValueError(f"`pose_dim` must be at least 4 to hold coordinates, got {pose_dim}")
        super().__init__((in_capsules, num_classes), pose_dim, iterations, impl)

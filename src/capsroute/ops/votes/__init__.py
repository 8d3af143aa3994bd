"""Votes shared out among parents that compete for them: EM routing and ablation C rest on it.

`moments.py` says what is summed up and what is made of it; `tiled.py` sums in plain PyTorch, and
`triton/` in fused CUDA kernels, whose votes never leave the registers.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from capsroute.ops.choice import check_impl, check_kernels, say_once
from capsroute.ops.inverted import tiled as inverted
from capsroute.ops.precision import autocast_dtype, own_precision
from capsroute.ops.tracing import is_exporting
from capsroute.ops.votes import tiled, triton
from capsroute.ops.votes.moments import Contest, Moments, Parents

ROUTING = "routing with activations"


@dataclasses.dataclass(frozen=True)
class Votes:
    """v_ij = p_i · W_ij of a layer taken as a convolution without padding, never held all at once.

    A linear layer sees an image of one pixel. What belongs to parents is (B, H', W', out, d') or
    (B, H', W', out) all the same; `parents` drops the position.
    """

    poses: Tensor  # (B, H, W, in, d)
    log_activations: Tensor  # (B, H, W, in)
    weight: Tensor  # (k, k, in, out, a, b)
    stride: int
    linear: bool
    impl: str  # reference, tiled or triton
    tiles: list[list[tiled.Children]]  # a single one for the reference, none for the kernels

    @property
    def children(self) -> int:
        """Of one parent position."""
        return self.weight.shape[:3].numel()

    def mean(self) -> Tensor:
        """About what the children agree on: a centre for the first moments, by one convolution.

        Carries no gradient, because a centre changes nothing but rounding. Hardly active children
        count a little, so that there is a mean where no child is active.
        """
        with torch.no_grad(), own_precision(self.poses):
            active = self.log_activations.clamp_min(-14.0).exp().unsqueeze(-1)
            weighed = (self.poses * active).to(self.weight.dtype)
            poses = inverted.uniform_step(
                inverted.by_rows(weighed, self.weight), self.weight, self.stride
            )
            window = self.weight.shape[0], self.weight.shape[1]
            share = F.avg_pool2d(active.mean(3).movedim(-1, 1), window, self.stride)
            share = share.movedim(1, -1).unsqueeze(-1)  # (B, H', W', 1, 1)
            return poses.to(active.dtype) * (poses.shape[3] / self.children) / share

    def moments(
        self, centre: Tensor, contest: Contest | None = None, *, keep: bool = False
    ) -> tuple[Moments, Tensor | None]:
        """Of all votes about a centre; every child is shared out evenly without a contest.

        With `keep`, which kernels cannot, also the shares, (B, H', W', I, out).
        """
        if self.impl == "triton":
            activations = self.log_activations.exp()
            operands = self.poses, activations, self.weight, centre, contest
            return triton.routed_moments(*operands, stride=self.stride), None
        recompute = self.impl == "tiled"
        return tiled.routed_moments(self.tiles, centre, contest, keep=keep, recompute=recompute)

    def parents(self, poses: Tensor, log_activations: Tensor, shares: Tensor | None) -> Parents:
        """As the layer has them."""
        if self.linear:
            r = None if shares is None else shares[:, 0, 0]
            return Parents(poses[:, 0, 0], log_activations[:, 0, 0], r)
        r = None if shares is None else shares.unflatten(3, self.weight.shape[:3])
        return Parents(poses, log_activations, r)


def votes_of(
    poses: Tensor,
    log_activations: Tensor,
    weight: Tensor,
    *,
    stride: int = 1,
    impl: str = "auto",
    keep: bool = False,
) -> Votes:
    """Of a layer whose children have poses (B, H, W, in, d) or (B, in, d); all in one dtype.

    A weight (in, out, a, b) makes the layer linear: the same at every position. Autocast rounds
    poses and weight to its dtype, as for any product. `keep` is for those who want the shares too.
    """
    linear = weight.ndim == 4
    if linear:
        weight = weight.expand(*poses.shape[1:-2], *weight.shape).flatten(0, -4)[None, None]
        poses = poses.flatten(1, -2)[:, None, None]
        log_activations = log_activations.flatten(1)[:, None, None]
    wide, dtype = poses.dtype, autocast_dtype(poses) or poses.dtype
    poses, weight = poses.to(dtype), weight.to(dtype)
    impl = _implementation(impl, poses, weight, keep)
    if impl == "triton":
        return Votes(poses, log_activations, weight, stride, linear, impl, [])
    poses, weight = poses.to(wide), weight.to(wide)
    children = tiled.gather_children(poses, log_activations, weight, stride)
    tiles = [[children]] if impl == "reference" else tiled.split_tiles(children)
    return Votes(poses, log_activations, weight, stride, linear, impl, tiles)


def _implementation(impl: str, poses: Tensor, weight: Tensor, keep: bool) -> str:
    check_impl(impl)
    if impl == "auto":
        if is_exporting():  # tiles depend on the batch, kernels on the machine
            return say_once(ROUTING, "reference", "the graph is exported")
        reason = "the shares are wanted" if keep else triton.avoided(poses, weight)
        chosen = "triton" if reason is None else "tiled"
        return say_once(ROUTING, chosen, reason)
    if impl == "triton":
        check_kernels("the shares are wanted" if keep else triton.supported(poses, weight))
    return impl

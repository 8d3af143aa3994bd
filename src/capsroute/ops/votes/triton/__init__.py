"""Fused Triton kernels for the moments of routed votes, which live in registers.

Their tiles, and much else, are those of inverted routing (`ops/inverted/README.md`). Importing this
module does not import triton; `routed_moments` does.
"""

import torch
from torch import Tensor

from capsroute.ops.inverted import triton as inverted
from capsroute.ops.inverted.triton.geometry import fits_accumulator
from capsroute.ops.tracing import is_transformed
from capsroute.ops.votes.moments import Contest, Moments

# dtypes of poses in which the kernels have passed their tests on a card; `auto` leaves others alone
PROVEN = frozenset({torch.bfloat16, torch.float16})


def avoided(poses: Tensor, weight: Tensor) -> str | None:
    """Why the kernels are left alone, (B, H, W, in, d) and (k, k', in, out, a, b); None if not."""
    if is_transformed():
        return "torch.func and forward-mode differentiation are beyond the kernels"
    if reason := inverted.avoided(poses, weight) or supported(poses, weight):
        return reason
    if poses.dtype not in PROVEN:
        return f"these kernels have not been tested on a card in {poses.dtype} yet"
    return None


def supported(poses: Tensor, weight: Tensor) -> str | None:
    """Why the kernels cannot take these tensors; None when they can."""
    n_out, a, b = weight.shape[-3:]
    if not fits_accumulator(poses.shape[-1] // a, a, b, n_out):
        return "the poses are large"
    return inverted.supported(poses, weight)


def routed_moments(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    centre: Tensor,
    contest: Contest | None,
    *,
    stride: int,
) -> Moments:
    """Moments about the centre, with R = a · softmax over parents; same contract as `tiled`'s.

    Takes poses (B, H, W, in, d), activations (B, H, W, in) and transforms (k, k', in, out, a, b) in
    the dtype of the poses. All that belongs to parents is float32.
    """
    from capsroute.ops.inverted.triton.geometry import Geometry
    from capsroute.ops.inverted.triton.tile import Tile
    from capsroute.ops.votes.triton.operators import vote_moments

    inner = weight.shape[4]
    sizes = Geometry.of(poses, centre, weight.shape[0], inner, stride)
    packed = Tile.of(sizes).pack(weight)  # outside the operator: iterations share the copy
    none = centre.new_empty(0)
    query, prior, gaussian = contest or (none, none, False)
    operands = poses, activations, packed, centre, query, prior
    return Moments(*vote_moments(*operands, weight.shape[0], inner, stride, gaussian))

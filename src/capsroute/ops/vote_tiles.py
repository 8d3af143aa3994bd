"""Moments of votes, tile by tile: what EM routing and the activations of ablation C share.

Votes v_ij = p_i · W_ij weighed by R_ij are summed up as Σ R, Σ R (v − c) and Σ R (v − c)² without
ever holding more than a tile of them; the backward pass forms each tile's votes again. Nothing here
waits for the device.

Every layer is taken as a convolution without padding, a linear one as a convolution whose kernel
covers the image: `arrange` lays its children out, `Layout.parents` brings the result back.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from capsroute.ops.tracing import is_exporting

VARIANCE_FLOOR = 5e-4
LEAST_MASS = 1e-20  # a parent with less than this keeps the mean it had; far above fp32 underflow

# Votes of one tile. Small enough to stay near the caches of a CPU; on a GPU few, since a compiler
# unrolls them.
TILE_BYTES = {"cpu": 2 << 20}
TILE_BYTES_OTHERWISE = 1 << 30

Result = TypeVar("Result")


class Children(NamedTuple):
    """What parents see, laid out for batched products.

    I counts the children of one parent position, N the parent positions of the whole batch, R the
    rows of a pose (√d for a matrix, 1 for a vector). Votes are (I, out, b, R, N), and whatever
    belongs to a parent is (out, b, R, N) or (out, N): with N innermost, sums over children,
    parents and elements of a pose all run along whole vectors.
    """

    poses: Tensor  # (I, a, R, N)
    log_activations: Tensor  # (I, 1, N)
    transforms: Tensor  # (I, out·b, a)
    offsets: Tensor | None = None  # (I, 1, b, R, 1), added to the votes


class Parents(NamedTuple):
    """The layer above after one step; without H', W' where the layer is linear."""

    poses: Tensor  # (B, H', W', out, d) or (B, out, d)
    log_activations: Tensor  # (B, H', W', out) or (B, out)
    coefficients: Tensor | None  # r, if asked for: (B, H', W', k, k, in, out) or (B, I, out)


class Moments(NamedTuple):
    """Σ_i R_ij (v_ij − c_j)^n for n = 0, 1, 2 and some centre c."""

    mass: Tensor  # (out, N)
    first: Tensor  # (out, b, R, N)
    second: Tensor  # (out, b, R, N)


def at_least_float32(*tensors: Tensor) -> list[Tensor]:
    """All in one dtype: float64 if any is, else float32."""
    double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return [tensor.to(torch.float64 if double else torch.float32) for tensor in tensors]


def above_minus_infinity(log_activations: Tensor) -> Tensor:
    """Finite, so that a softmax is even where no capsule is active at all."""
    return log_activations.clamp_min(torch.finfo(log_activations.dtype).min)


class Layout(NamedTuple):
    """How the parents and children of a layer are laid out."""

    size: tuple[int, int, int]  # B, H', W'
    window: tuple[int, int, int]  # k, k', in
    stride: int
    linear: bool

    def parents(self, poses: Tensor, log_activations: Tensor, r: Tensor | None) -> Parents:
        """(out, b, R, N), (out, N) and (I, out, N) as the layer above is laid out."""
        above = Parents(
            poses.permute(3, 0, 2, 1).flatten(2).unflatten(0, self.size),
            log_activations.t().unflatten(0, self.size),
            None if r is None else self._by_window(r),
        )
        return drop_position(above) if self.linear else above

    def _by_window(self, r: Tensor) -> Tensor:
        """(I, out, N) -> (B, H', W', k, k', in, out)."""
        split = r.unflatten(2, self.size).unflatten(0, self.window)
        return split.permute(4, 5, 6, 0, 1, 2, 3)


def drop_position(parents: Parents) -> Parents:
    """A linear layer has one position: drop it, and number its children from 0 to k·k'·in."""
    r = parents.coefficients
    return Parents(
        parents.poses[:, 0, 0],
        parents.log_activations[:, 0, 0],
        None if r is None else r[:, 0, 0].flatten(1, 3),
    )


def arrange(
    poses: Tensor,
    log_activations: Tensor,
    weight: Tensor,
    stride: int,
    offsets: Tensor | None = None,
) -> tuple[Children, Layout]:
    """Operands of a layer from (B, H, W, in, d), (B, H, W, in) and (k, k', in, out, a, b).

    A weight (in, out, a, b) makes the layer linear; its children may lack H, W.
    """
    linear = weight.ndim == 4
    if linear:
        poses, log_activations, weight = as_convolution(poses, log_activations, weight)
    batch, height, width, capsules = poses.shape[:4]
    k_y, k_x = weight.shape[:2]
    size = (batch, (height - k_y) // stride + 1, (width - k_x) // stride + 1)
    layout = Layout(size, (k_y, k_x, capsules), stride, linear)
    return gather_children(poses, log_activations, weight, layout, offsets), layout


def as_convolution(
    poses: Tensor, log_activations: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A linear layer's operands for a kernel as large as the image, the same at every position.

    Children without positions, (B, in, d), are an image of one pixel.
    """
    if poses.ndim == 3:
        poses, log_activations = poses[:, None, None], log_activations[:, None, None]
    return poses, log_activations, weight.expand(*poses.shape[1:3], *weight.shape)


def gather_children(
    poses: Tensor,
    log_activations: Tensor,
    weight: Tensor,
    layout: Layout,
    offsets: Tensor | None = None,
) -> Children:
    """What each parent position sees; copies windows."""
    a, stride = weight.shape[-2], layout.stride
    _, height, width = layout.size
    reach_y, reach_x = stride * (height - 1) + 1, stride * (width - 1) + 1

    def windows(x: Tensor) -> Tensor:  # -> (B, H', W', I, …)
        seen = [
            x[:, y : y + reach_y : stride, z : z + reach_x : stride]
            for y in range(layout.window[0])
            for z in range(layout.window[1])
        ]
        return torch.cat(seen, dim=3)

    split = windows(poses).unflatten(-1, (-1, a))  # (B, H', W', I, R, a)
    columns = split.permute(3, 5, 4, 0, 1, 2).flatten(3).contiguous()
    log_a = windows(log_activations).movedim(3, 0).flatten(1).contiguous()
    transforms = weight.flatten(0, 2).transpose(2, 3).flatten(1, 2)
    return Children(columns, log_a.unsqueeze(1), transforms, offsets)


def split_tiles(children: Children) -> list[Children]:
    """Runs of children whose votes fit the byte budget; at least one child each."""
    count = len(children.poses)
    tile = count
    if not is_exporting():  # an exported graph's batch is unknown: one tile
        itemsize = children.poses.element_size()
        per_column = children.transforms.shape[1] * itemsize
        budget = TILE_BYTES.get(children.poses.device.type, TILE_BYTES_OTHERWISE)
        tile = min(count, max(1, budget // max(1, per_column * children.poses[0, 0].numel())))
        tile = math.ceil(count / math.ceil(count / tile))  # as many tiles, evenly filled
    parts = [field.split(tile) for field in children[:3]]
    offsets: Sequence[Tensor | None] = [None] * len(parts[0])
    if children.offsets is not None:
        offsets = children.offsets.split(tile)
    return [Children(*fields) for fields in zip(*parts, offsets, strict=True)]


def votes(tile: Children, parents: Tensor) -> Tensor:
    """v_ij = p_i · W_ij, of shape (I, *parents.shape)."""
    v = torch.bmm(tile.transforms, tile.poses.flatten(2)).view(len(tile.poses), *parents.shape)
    return v if tile.offsets is None else v + tile.offsets


def sum_pose(x: Tensor) -> Tensor:
    """Σ_h over the elements of a pose: (…, out, b, R, N) -> (…, out, N)."""
    return x.sum(dim=(-3, -2))


def uniform_coefficients(tile: Children, parents: Tensor) -> Tensor:
    """1/M for every child and parent: (I, out, N)."""
    out, positions = parents.shape[0], parents.shape[-1]
    share = parents.new_full((1, 1, 1), 1.0 / out)
    return share.expand(tile.log_activations.shape[0], out, positions)


def weighted_moments(r: Tensor, log_activations: Tensor, deviation: Tensor) -> Moments:
    """Moments of a tile's votes, each weighed by R_ij = a_i · r_ij."""
    weights = r * log_activations.exp()
    spread = weights[:, :, None, None] * deviation
    return Moments(weights.sum(dim=0), spread.sum(dim=0), (spread * deviation).sum(dim=0))


def routed_moments(
    tiles: list[Children], centre: Tensor, logits: Callable[[Tensor], Tensor] | None, *, keep: bool
) -> tuple[Moments, Tensor | None]:
    """Moments about the centre of votes shared out among parents; with `keep` also the shares r.

    `logits` maps deviations v − c, (I, out, b, R, N), to what a softmax over the parents makes r
    of, (I, out, N). Without it every child is shared out evenly.
    """

    def step(tile: Children) -> tuple[Moments, Tensor]:
        deviation = votes(tile, centre) - centre
        if logits is None:
            r = uniform_coefficients(tile, centre)
        else:
            r = logits(deviation).softmax(dim=1)
        return weighted_moments(r, tile.log_activations, deviation), r

    total: Moments | None = None
    kept = []
    for tile in tiles:
        moments, r = _recomputed(step, tile)
        total = moments if total is None else Moments(*map(torch.add, total, moments))
        if keep:
            kept.append(r)
    assert total is not None  # there is at least one tile
    return total, torch.cat(kept) if keep else None


def _recomputed(function: Callable[[Children], Result], tile: Children) -> Result:
    """Call so that backward recomputes what the call computed, instead of storing it."""
    if not torch.is_grad_enabled() or is_exporting():
        return function(tile)
    # no randomness inside; saving the generator's state would break CUDA graph capture
    return checkpoint(function, tile, use_reentrant=False, preserve_rng_state=False)


@torch.no_grad()
def evenly_routed_mean(children: Children, out: int) -> Tensor:
    """Σ_i a_i v_ij / Σ_i a_i, a centre for the first moments, (out, b, R, N): one GEMM, no votes.

    Carries no gradient, because the centre does not change the result; for the same reason it may
    leave the offsets out.
    """
    share = above_minus_infinity(children.log_activations).softmax(dim=0)
    weighed = children.poses * share.unsqueeze(1)
    rows = weighed.flatten(2).permute(2, 0, 1)
    if is_exporting():  # PyTorch 2.11 cannot merge what has strides of an unknown size
        rows = rows.contiguous()
    mean = children.transforms.transpose(0, 1).flatten(1) @ rows.flatten(1).t()
    return mean.view(out, len(mean) // out, *children.poses.shape[2:])


def mean_and_variance(moments: Moments, centre: Tensor) -> tuple[Tensor, Tensor]:
    """μ and σ² from the moments about `centre`."""
    mass = moments.mass.clamp_min(LEAST_MASS)[:, None, None]
    shift = moments.first / mass
    variance = moments.second / mass - shift.square()
    return centre + shift, variance.clamp_min(0.0) + VARIANCE_FLOOR


def log_activation(
    mass: Tensor,
    variance: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    *,
    children: int,
    inverse_temperature: float,
) -> Tensor:
    """log a_j from what parent j's votes cost to code, for `children` of each parent position.

    Mass is measured in fair shares, children / parents, so that one temperature suits all layers.
    """
    fair_share = children / len(mass)
    cost = sum_pose(beta_u[:, None, None, None] + 0.5 * variance.log()) * (mass / fair_share)
    return F.logsigmoid(inverse_temperature * (beta_a[:, None] - cost))


def check_log_activations(name: str, log_activations: Tensor, expected: tuple[int, ...]) -> None:
    """Raise unless there is one for each pose."""
    if log_activations.shape != expected:
        raise ValueError(
            f"`{name}` must have shape {tuple(expected)}, got {tuple(log_activations.shape)}"
        )


def check_betas(weight: Tensor, beta_u: Tensor, beta_a: Tensor) -> None:
    """Raise unless there is one β_u and one β_a for each parent type."""
    expected = (weight.shape[-3],)
    for name, beta in (("beta_u", beta_u), ("beta_a", beta_a)):
        if beta.shape != expected:
            raise ValueError(f"`{name}` must have shape {expected}, got {tuple(beta.shape)}")

"""Moments of routed votes in plain PyTorch: of all at once, the formula itself, or tile by tile.

No more than a tile of votes is ever held; the backward pass forms each tile's votes again. Nothing
here waits for the device.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from capsroute.ops.votes.moments import Contest, Moments

# Votes of one tile. Small enough to stay near the caches of a CPU; on a GPU few, since a compiler
# unrolls them.
TILE_BYTES = {"cpu": 2 << 20}
TILE_BYTES_OTHERWISE = 1 << 30
SHARING = 16  # children of a tile, if so few positions leave room: they share what parents have
LEAST_POSITIONS = 64  # whole vectors

Result = TypeVar("Result")


class Children(NamedTuple):
    """What parents see, laid out for batched products.

    I counts the children of one parent position, N the parent positions of the whole batch, R the
    rows of a pose (√d for a matrix, 1 for a vector). Votes are (I, out, b, R, N), and here whatever
    belongs to a parent is (out, b, R, N) or (out, N): with N innermost, sums over children,
    parents and elements of a pose all run along whole vectors.
    """

    poses: Tensor  # (I, a, R, N)
    log_activations: Tensor  # (I, 1, N)
    transforms: Tensor  # (I, out·b, a)


def gather_children(
    poses: Tensor, log_activations: Tensor, weight: Tensor, stride: int
) -> Children:
    """What each parent position sees, of (B, H, W, in, d), (B, H, W, in) and the transforms.

    Copies windows.
    """
    k_y, k_x, *_, a, _ = weight.shape
    reach_y, reach_x = (
        (extent - k) // stride * stride + 1
        for extent, k in zip(poses.shape[1:3], (k_y, k_x), strict=True)
    )

    def windows(x: Tensor) -> Tensor:  # -> (B, H', W', I, …)
        seen = [
            x[:, y : y + reach_y : stride, z : z + reach_x : stride]
            for y in range(k_y)
            for z in range(k_x)
        ]
        return torch.cat(seen, dim=3)

    split = windows(poses).unflatten(-1, (-1, a))  # (B, H', W', I, R, a)
    columns = split.permute(3, 5, 4, 0, 1, 2).flatten(3).contiguous()
    log_a = windows(log_activations).movedim(3, 0).flatten(1).contiguous()
    transforms = weight.flatten(0, 2).transpose(2, 3).flatten(1, 2)
    return Children(columns, log_a.unsqueeze(1), transforms)


def split_tiles(children: Children) -> list[list[Children]]:
    """For each run of positions its runs of children, whose votes fit the byte budget.

    At least LEAST_POSITIONS, if there are so many, and one child. All positions in a graph, which
    would hold every tile of every run.
    """
    count, positions = len(children.poses), children.poses.shape[-1]
    votes = children.transforms.shape[1] * children.poses.shape[2]  # of a child, at a position
    votes *= children.poses.element_size()
    budget = TILE_BYTES.get(children.poses.device.type, TILE_BYTES_OTHERWISE)
    least = positions if torch.compiler.is_compiling() else LEAST_POSITIONS
    width = _evenly(positions, max(least, budget // (votes * SHARING)))
    length = _evenly(count, budget // (votes * width))
    poses = (x.contiguous().split(length) for x in children.poses.split(width, dim=-1))
    log_activations = (x.split(length) for x in children.log_activations.split(width, dim=-1))
    transforms = children.transforms.split(length)
    return [
        [Children(*parts) for parts in zip(*run, transforms, strict=True)]
        for run in zip(poses, log_activations, strict=True)
    ]


def _evenly(count: int, most: int) -> int:
    """The length of runs that are evenly filled, and as few as can be."""
    runs = math.ceil(count / max(1, most))
    return math.ceil(count / runs) if runs > 0 else 1


def routed_moments(
    tiles: list[list[Children]],
    centre: Tensor,
    contest: Contest | None,
    *,
    keep: bool,
    recompute: bool,
) -> tuple[Moments, Tensor | None]:
    """Moments about the centre of votes shared out among parents; with `keep` also the shares r.

    With `recompute` backward forms votes again instead of finding them stored. Parents are as the
    layer has them, (B, H', W', out, d'), and shares are (B, H', W', I, out). Without a contest
    every child is shared out evenly.
    """
    size, rows = centre.shape[:3], tiles[0][0].poses.shape[2]
    above = [_by_columns(centre, rows)]
    if contest is not None:
        above += [_by_columns(contest.query, rows), contest.prior.flatten(0, 2).t()]
    gaussian = contest is not None and contest.gaussian
    widths = [run[0].poses.shape[-1] for run in tiles]
    runs = zip(*(x.split(widths, dim=-1) for x in above), strict=True)
    found = [
        _moments(children, [x.contiguous() for x in parents], gaussian, keep, recompute)
        for children, parents in zip(tiles, runs, strict=True)
    ]
    mass, first, second = (torch.cat(x, dim=-1) for x in zip(*(m for m, _ in found), strict=True))
    moments = Moments(
        mass.t().unflatten(0, size), _by_position(first, size), _by_position(second, size)
    )
    if not keep:
        return moments, None
    return moments, torch.cat([r for _, r in found], -1).permute(2, 0, 1).unflatten(0, size)


def _moments(
    tiles: list[Children], above: list[Tensor], gaussian: bool, keep: bool, recompute: bool
) -> tuple[Moments, Tensor]:
    """Of some positions, in the layout of votes; `above` are centre, and query and prior."""
    centre, *competing = above

    def step(tile: Children) -> tuple[Moments, Tensor]:
        votes = torch.bmm(tile.transforms, tile.poses.flatten(2))
        votes = votes.view(len(tile.poses), *centre.shape)
        deviation = votes - centre
        if competing:
            query, prior = competing
            fit = ((deviation.square() if gaussian else votes) * query).sum(dim=(-3, -2))
            r = (prior - fit if gaussian else prior + fit).softmax(dim=1)
        else:
            share = votes.new_full((1, 1, 1), 1.0 / len(centre))
            r = share.expand(len(votes), len(centre), votes.shape[-1])
        return _weighted(r, tile.log_activations, deviation), r

    total: Moments | None = None
    kept = []
    for tile in tiles:
        moments, r = _recomputed(step, tile) if recompute else step(tile)
        total = moments if total is None else Moments(*map(torch.add, total, moments))
        if keep:
            kept.append(r)
    assert total is not None  # there is at least one tile
    return total, torch.cat(kept) if keep else r


def _by_columns(poses: Tensor, rows: int) -> Tensor:
    """(B, H', W', out, d') as (out, b, R, N)."""
    return poses.flatten(0, 2).unflatten(-1, (rows, -1)).permute(1, 3, 2, 0)


def _by_position(poses: Tensor, size: Sequence[int]) -> Tensor:
    """(out, b, R, N) as (B, H', W', out, d')."""
    # through one axis, so that gradients, which come permuted, are laid out as the votes again
    poses = poses.flatten().view(poses.shape)
    return poses.permute(3, 0, 2, 1).flatten(2).unflatten(0, size)


def _weighted(r: Tensor, log_activations: Tensor, deviation: Tensor) -> Moments:
    """Moments of a tile's votes, each weighed by R_ij = a_i · r_ij."""
    weights = r * log_activations.exp()
    spread = weights[:, :, None, None] * deviation
    return Moments(weights.sum(dim=0), spread.sum(dim=0), (spread * deviation).sum(dim=0))


def _recomputed(function: Callable[[Children], Result], tile: Children) -> Result:
    """Call so that backward recomputes what the call computed, instead of storing it."""
    if not torch.is_grad_enabled():
        return function(tile)
    # no randomness inside; saving the generator's state would break CUDA graph capture
    return checkpoint(function, tile, use_reentrant=False, preserve_rng_state=False)

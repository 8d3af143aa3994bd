"""One routing step in plain PyTorch without ever holding the votes: for devices with no kernel.

Without parents the coefficients are 1/M, and the step is one convolution (or one GEMM). With
parents the children are taken tile by tile, forward and backward; README.md derives the gradient.
A tile is one kernel offset (y, x) and a run of child capsules, seen from every output position of
some images.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from capsroute.ops.inverted.double_backward import refuse_double_backward
from capsroute.ops.precision import own_precision
from capsroute.ops.tracing import cast

# Votes of one tile. Small enough to stay near the caches of a CPU, large enough to fill a GPU.
TILE_BYTES = {"cpu": 2 << 20}
TILE_BYTES_OTHERWISE = 64 << 20


def routing_step(
    children: Tensor,
    weight: Tensor,
    parents: Tensor | None,
    *,
    stride: int,
    scale: float,
    return_coefficients: bool,
) -> tuple[Tensor, Tensor | None]:
    """Same contract as `reference.routing_step`; the coefficients carry no gradient here."""
    if parents is not None:
        poses, coefficients = _TiledStep.apply(
            children, weight, parents, stride, scale, return_coefficients
        )
        return poses, coefficients if return_coefficients else None
    poses = uniform_step(by_rows(children, weight), weight, stride)
    if not return_coefficients:
        return poses, None
    batch, height, width, out, _ = poses.shape
    shape = (batch, height, width, *weight.shape[:4])
    return poses, poses.new_full((1,) * len(shape), 1.0 / out).expand(shape)


def by_rows(children: Tensor, weight: Tensor) -> Tensor:
    """(B, H, W, in, d) -> (B, rows, H, W, in, d / rows), as `uniform_step` reads them."""
    return children.unflatten(-1, (-1, weight.shape[-2])).permute(0, 4, 1, 2, 3, 5)


def uniform_step(children: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Σ_i v_ij / M: a convolution over (child, column) channels, the pose's rows in the batch.

    Takes children by rows and returns poses as everyone else has them, (B, H', W', out, d').
    """
    k, _, n_in, n_out, a, b = weight.shape
    batch, rows, height, width = children.shape[:4]
    # fp16 may hold neither the sum over all children nor small weights divided by all parents
    early = 2 ** round(math.log2(n_out) / 2) if weight.dtype == torch.float16 else 1
    weight = weight / early if early > 1 else weight
    x = children.reshape(batch * rows, height, width, n_in * a)  # channels last, as it likes them
    if k == height == width == 1:
        kernel = weight[0, 0].permute(0, 2, 1, 3).reshape(n_in * a, n_out * b)
        y = (x.flatten(1) @ kernel)[:, None, None]
    else:
        kernel = weight.permute(3, 5, 2, 4, 0, 1).reshape(n_out * b, n_in * a, k, k).contiguous()
        y = F.conv2d(x.permute(0, 3, 1, 2), kernel, stride=stride).permute(0, 2, 3, 1)
    y = y.reshape(batch, rows, *y.shape[1:3], n_out, b).permute(0, 2, 3, 4, 1, 5)
    return y.flatten(-2) / (n_out / early)


def _runs(children: Tensor, weight: Tensor, parents: Tensor) -> list[slice]:
    """Images that are routed together: few enough for a child's votes to fit into a tile.

    All of them in a graph, which would hold every tile of every run.
    """
    if torch.compiler.is_compiling() or len(children) < 2:
        return [slice(None)]
    n_out, a, b = weight.shape[-3:]
    budget = TILE_BYTES.get(children.device.type, TILE_BYTES_OTHERWISE)
    size = torch.promote_types(children.dtype, torch.float32).itemsize
    image = parents.shape[1] * parents.shape[2] * (children.shape[-1] // a) * n_out * b * size
    images = len(children)
    count = math.ceil(images / max(1, budget // max(1, image)))
    length = math.ceil(images / count)  # as many runs, evenly filled
    return [slice(first, first + length) for first in range(0, images, length)]


class _Tile(NamedTuple):
    """Children `first:last` at kernel offset (y, x), and where the windows find them."""

    y: int
    x: int
    rows: slice
    columns: slice
    capsules: slice


class _Layout:
    """Shapes of a step, and the moves between user tensors and GEMM operands.

    N counts the output positions of the whole batch, R the rows of a pose (1 for vectors).
    Poses of parents, their gradients and the votes are laid out as (…, out, b, R, N): with N
    innermost every sum over children, parents or elements of a pose runs along whole vectors.
    """

    def __init__(self, children: Tensor, weight: Tensor, parents: Tensor, stride: int) -> None:
        self.k, _, self.n_in, self.n_out, self.a, self.b = weight.shape
        self.batch, self.height, self.width = parents.shape[:3]
        self.rows = children.shape[-1] // self.a
        self.stride = stride
        self.positions = self.batch * self.height * self.width
        self.dtype = torch.promote_types(children.dtype, torch.float32)
        budget = TILE_BYTES.get(children.device.type, TILE_BYTES_OTHERWISE)
        child_bytes = self.positions * self.rows * self.n_out * self.b * self.dtype.itemsize
        self.run = min(self.n_in, max(1, budget // max(1, child_bytes)))

    def tiles(self) -> Iterator[_Tile]:
        reach_y = self.stride * (self.height - 1) + 1
        reach_x = self.stride * (self.width - 1) + 1
        for y in range(self.k):
            for x in range(self.k):
                rows = slice(y, y + reach_y, self.stride)
                columns = slice(x, x + reach_x, self.stride)
                for first in range(0, self.n_in, self.run):
                    yield _Tile(y, x, rows, columns, slice(first, first + self.run))

    def child_columns(self, children: Tensor, tile: _Tile) -> Tensor:
        """The tile's poses as (I, a, R·N), I child capsules."""
        seen = children[:, tile.rows, tile.columns, tile.capsules].to(self.dtype)
        split = seen.unflatten(-1, (self.rows, self.a)).permute(3, 5, 4, 0, 1, 2)
        return split.reshape(split.shape[0], self.a, self.rows * self.positions)

    def to_children(self, columns: Tensor) -> Tensor:
        """The inverse of `child_columns`: (I, a, R·N) -> (B, H', W', I, d)."""
        shape = (len(columns), self.a, self.rows, self.batch, self.height, self.width)
        return columns.view(shape).permute(3, 4, 5, 0, 2, 1).flatten(-2)

    def transforms(self, weight: Tensor, tile: _Tile) -> Tensor:
        """The tile's weights as (I, out·b, a)."""
        part = weight[tile.y, tile.x, tile.capsules].to(self.dtype)
        return part.transpose(2, 3).reshape(part.shape[0], self.n_out * self.b, self.a)

    def votes(self, transforms: Tensor, child_columns: Tensor) -> Tensor:
        shape = (len(transforms), self.n_out, self.b, self.rows, self.positions)
        return torch.bmm(transforms, child_columns).view(shape)

    def by_position(self, parents: Tensor) -> Tensor:
        """(B, H', W', out, d) -> (out, b, R, N)."""
        split = parents.to(self.dtype).reshape(self.positions, self.n_out, self.rows, self.b)
        return split.permute(1, 3, 2, 0).contiguous()

    def by_capsule(self, poses: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of `by_position`."""
        shape = (self.batch, self.height, self.width, self.n_out, self.rows * self.b)
        return cast(poses.permute(3, 0, 2, 1).reshape(shape), dtype)


def _dot(votes: Tensor, poses: Tensor) -> Tensor:
    """(I, out, b, R, N) with (out, b, R, N) -> (I, out, N)."""
    return (votes * poses).sum(dim=(2, 3))


def _spread(coefficients: Tensor) -> Tensor:
    """(I, out, N) -> (I, out, 1, 1, N), to multiply votes with."""
    return coefficients[:, :, None, None]


class _TiledStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        children: Tensor,
        weight: Tensor,
        parents: Tensor,
        stride: int,
        scale: float,
        return_coefficients: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(children, weight, parents)
        ctx.stride, ctx.scale = stride, scale
        poses, coefficients = _forward(
            children, weight, parents, stride, scale, return_coefficients
        )
        ctx.mark_non_differentiable(coefficients)
        return poses, coefficients

    @staticmethod
    def backward(ctx: Any, grad_poses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = _TiledGradients.apply(grad_poses, *ctx.saved_tensors, ctx.stride, ctx.scale)
        return *grads, None, None, None


class _TiledGradients(torch.autograd.Function):
    """A node of its own, so that differentiating it again is refused.

    `once_differentiable` would let gradients of the children, weights and parents pass as zero.
    """

    @staticmethod
    def forward(ctx: Any, grad_poses: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        with own_precision(grad_poses):  # backward() may be called within autocast
            return _gradients(grad_poses, *inputs)

    backward = staticmethod(refuse_double_backward)


def _forward(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    stride: int,
    scale: float,
    return_coefficients: bool,
) -> tuple[Tensor, Tensor]:
    runs = _runs(children, weight, parents)
    if len(runs) > 1:
        options = stride, scale, return_coefficients
        found = [_forward(children[run], weight, parents[run], *options) for run in runs]
        return torch.cat([poses for poses, _ in found]), torch.cat([r for _, r in found])
    layout = _Layout(children, weight, parents, stride)
    q = layout.by_position(parents)
    poses = torch.zeros_like(q)
    kept = []
    for tile in layout.tiles():
        v = layout.votes(layout.transforms(weight, tile), layout.child_columns(children, tile))
        r = _dot(v, q).mul(scale).softmax(dim=1)
        poses += (v * _spread(r)).sum(dim=0)
        if return_coefficients:
            kept.append(cast(r, children.dtype))
    coefficients = _gather_coefficients(kept, layout) if kept else children.new_empty(0)
    return layout.by_capsule(poses, children.dtype), coefficients


def _gradients(
    grad_poses: Tensor,
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    stride: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    operands = grad_poses, children, weight, parents, stride, scale
    grad_children, grad_parents = _add_gradients(grad_weight, *operands)
    return grad_children, cast(grad_weight, weight.dtype), grad_parents


def _add_gradients(
    grad_weight: Tensor,
    grad_poses: Tensor,
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    stride: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """∂L/∂weight is added to the first argument; of children and parents they are returned."""
    runs = _runs(children, weight, parents)
    if len(runs) > 1:
        found = [
            _add_gradients(
                grad_weight, grad_poses[run], children[run], weight, parents[run], stride, scale
            )
            for run in runs
        ]
        return torch.cat([grad for grad, _ in found]), torch.cat([grad for _, grad in found])
    layout = _Layout(children, weight, parents, stride)
    q, g = layout.by_position(parents), layout.by_position(grad_poses)
    grad_q = torch.zeros_like(q)
    grad_children = torch.zeros_like(children, dtype=layout.dtype)
    for tile in layout.tiles():
        w, p = layout.transforms(weight, tile), layout.child_columns(children, tile)
        v = layout.votes(w, p)
        r = _dot(v, q).mul(scale).softmax(dim=1)
        u = _dot(v, g)  # ∂L/∂r
        s = scale * r * (u - (r * u).sum(dim=1, keepdim=True))  # scale · ∂L/∂a
        grad_q += (v * _spread(s)).sum(dim=0)
        grad_v = (_spread(r) * g).addcmul_(_spread(s), q).view(len(p), w.shape[1], -1)
        grad_w = torch.bmm(grad_v, p.transpose(1, 2)).view(len(p), -1, layout.b, layout.a)
        grad_weight[tile.y, tile.x, tile.capsules] += grad_w.transpose(2, 3)
        grad_p = layout.to_children(torch.bmm(w.transpose(1, 2), grad_v))
        grad_children[:, tile.rows, tile.columns, tile.capsules] += grad_p
    return cast(grad_children, children.dtype), layout.by_capsule(grad_q, parents.dtype)


def _gather_coefficients(kept: list[Tensor], layout: _Layout) -> Tensor:
    """Tiles of (I, out, N), in the order of `tiles`, -> (B, H', W', k, k, in, out)."""
    k, n_in, n_out = layout.k, layout.n_in, layout.n_out
    stacked = torch.cat(kept).view(k, k, n_in, n_out, layout.batch, layout.height, layout.width)
    return stacked.permute(4, 5, 6, 0, 1, 2, 3)

"""EM routing (Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing"), in log space.

A parent j is a Gaussian over the votes v_ij = p_i · W_ij of its children, diagonal, with mean μ_j
(its pose), variance σ²_j and activation a_j. One iteration is an E-step and an M-step:

    E   r_ij = softmax_j( log a_j − ½ Σ_h [ (v_ijh − μ_jh)² / σ²_jh + log σ²_jh ] )
        (1/M for each of the M parents in the first iteration)
    M   R_ij  = a_i · r_ij
        μ_jh  = Σ_i R_ij v_ijh / Σ_i R_ij
        σ²_jh = Σ_i R_ij (v_ijh − μ_jh)² / Σ_i R_ij + 5e-4
        a_j   = sigmoid( 100 λ · (β_a − Σ_h (β_u + ½ log σ²_jh) · m_j) )
        λ = 0.01 · (1 − 0.95^(t+1)) in iteration t = 0, 1, …

*Which parents compete for a child.* The softmax runs over the M capsule types of one output
position: window by window. A child seen from several positions is shared out anew in each; in the
class layer there is one position, and all classes compete for every child.

*The mass m_j.* Hinton writes sigmoid(λ · (β_a − Σ_h (…) · Σ_i R_ij)). That sum grows with the
children of a parent: with half-active children it is 4.5 in a 3×3 layer of 32 capsules, 40 in the
class layer of CIFAR-10 and 4 in that of CIFAR-100, so that with one λ for all layers some saturate
while others hardly move. Like IBM/matrix-capsules-with-em-routing (Gritzman 2019) we measure mass
in units that do not depend on the layer, m_j = Σ_i R_ij / (children / parents), and sharpen by its
factor of 100. Here the factor multiplies β_a too, which is a change of units only: λ starts at
5e-4, and β_a would otherwise have to reach the thousands before a parent that wins no child could
be clearly less than half active.

*Memory.* Votes are M times as large as the unfolded poses and are never all held at once. An
iteration is one pass over tiles of children; each tile forms its votes, does the E-step and adds to
the moments Σ R, Σ R (v − c) and Σ R (v − c)², taken about c lest the variance cancel: the mean of
the iteration before, or of evenly shared votes in the first. Backward recomputes each tile. Nothing
here waits for the device.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

VARIANCE_FLOOR = 5e-4
SHARPNESS = 100.0  # what the inverse temperature is multiplied by, mass being about 1
LEAST_MASS = 1e-20  # a parent with less than this keeps the mean it had; far above fp32 underflow

# Votes of one tile. Small enough to stay near the caches of a CPU, large enough to fill a GPU.
TILE_BYTES = {"cpu": 2 << 20}
TILE_BYTES_OTHERWISE = 256 << 20

Result = TypeVar("Result")


class EMIteration(NamedTuple):
    """The state after one iteration of one layer."""

    poses: Tensor  # (B, H', W', out, d) or, for the class layer, (B, out, d)
    log_activations: Tensor  # (B, H', W', out) or (B, out)
    coefficients: Tensor | None  # r: (B, H', W', k, k, in, out) or (B, H·W·in, out)


class Children(NamedTuple):
    """What parents see, laid out for batched products.

    I counts the children of one parent position, N the parent positions of the whole batch, R the
    rows of a pose (√d for a matrix, 1 for a vector). Votes are (I, out, b, R, N), and whatever
    belongs to a parent is (out, b, R, N) or (out, N): with N innermost, sums over children,
    parents and elements of a pose all run along whole vectors.
    """

    poses: Tensor  # (I, a, R·N)
    log_activations: Tensor  # (I, 1, N)
    transforms: Tensor  # (I, out·b, a)
    offsets: Tensor | None = None  # (I, 1, b, R, 1), added to the votes


class Moments(NamedTuple):
    """Σ_i R_ij (v_ij − c_j)^n for n = 0, 1, 2 and some centre c."""

    mass: Tensor  # (out, N)
    first: Tensor  # (out, b, R, N)
    second: Tensor  # (out, b, R, N)


def em_routing(
    poses: Tensor,
    log_activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    *,
    iterations: int,
    stride: int = 1,
) -> tuple[Tensor, Tensor]:
    """Route capsules to the layer above by EM; see the module for the procedure.

    Activations are passed on as logarithms, so that no layer has to take the logarithm of a
    sigmoid that underflowed: `log_activations.exp()` are the activations.

    Args:
        poses: the children's, (B, H, W, in, d) with d = n².
        log_activations: the children's, (B, H, W, in), at most 0.
        weight: (k, k, in, out, n, n) for a convolutional layer without padding. (in, out, n, n)
            makes the class layer: every capsule at every position is a child of every class,
            its transform shared by all positions, and its vote is told where it stands
            ("coordinate addition": row and column, scaled to (0, 1), are added to the first two
            elements of the vote's last column).
        beta_u, beta_a: the price of coding a pose's element and of not being active; (out,) each.
        iterations: E- and M-steps, at least 1. The first E-step is uniform.
        stride: of the convolution.

    Returns:
        The parents' poses, (B, H', W', out, d) or (B, out, d), and the logarithms of their
        activations, (B, H', W', out) or (B, out). Both are float32, under autocast too (float64
        when the inputs are).
    """
    history = _iterate(
        poses, log_activations, weight, beta_u, beta_a, iterations, stride, keep=False
    )
    return history[-1].poses, history[-1].log_activations


def em_routing_history(
    poses: Tensor,
    log_activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    *,
    iterations: int,
    stride: int = 1,
) -> list[EMIteration]:
    """`em_routing`, but every iteration is returned, with the coefficients r of its E-step.

    The class layer's children are ordered as (row, column, capsule).
    """
    return _iterate(poses, log_activations, weight, beta_u, beta_a, iterations, stride, keep=True)


def inverse_temperature(iteration: int) -> float:
    """λ of an iteration counted from 0: activations are decided more sharply as routing goes on."""
    return 0.01 * (1.0 - 0.95 ** (iteration + 1))


def _iterate(
    poses: Tensor,
    log_activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    iterations: int,
    stride: int,
    keep: bool,
) -> list[EMIteration]:
    _check(poses, log_activations, weight, beta_u, beta_a, iterations, stride)
    is_class_layer = weight.ndim == 4
    kernel = (poses.shape[1], poses.shape[2]) if is_class_layer else (weight.shape[0],) * 2
    with torch.autocast(poses.device.type, enabled=False):
        poses, log_activations, weight, beta_u, beta_a = at_least_float32(
            poses, log_activations, weight, beta_u, beta_a
        )
        offsets = coordinates(poses) if is_class_layer else None
        if is_class_layer:  # a convolution as large as the image, with one kernel element
            weight = weight.expand(*kernel, *weight.shape)
        children = gather_children(poses, log_activations, weight, stride, offsets)
        states = _expectation_maximisation(children, beta_u, beta_a, iterations, keep)
    size = output_size(poses, kernel, stride)
    history = [
        EMIteration(
            poses=by_capsule(mean, size),
            log_activations=log_a.t().unflatten(0, size),
            coefficients=None if r is None else by_window(r, size, (*kernel, poses.shape[3])),
        )
        for mean, log_a, r in states
    ]
    return [_without_position(state) for state in history] if is_class_layer else history


def _expectation_maximisation(
    children: Children, beta_u: Tensor, beta_a: Tensor, iterations: int, keep: bool
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """(μ, log a, r) of every iteration; only the last unless `keep`."""
    out = len(beta_u)
    tiles = split_tiles(children)
    children_each = len(children.poses) / out
    mean = evenly_routed_mean(children, out)
    variance: Tensor | None = None
    log_a: Tensor | None = None
    states: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for iteration in range(iterations):
        step = _tile_step(mean, variance, log_a)
        moments, r = accumulate(step, tiles, keep)
        mean, variance = mean_and_variance(moments, centre=mean)
        sharpness = SHARPNESS * inverse_temperature(iteration)
        log_a = log_activation(moments.mass / children_each, variance, beta_u, beta_a, sharpness)
        states.append((mean, log_a, r))
    return states if keep else states[-1:]


def _tile_step(
    mean: Tensor, variance: Tensor | None, log_a: Tensor | None
) -> Callable[[Children], tuple[Moments, Tensor]]:
    """The E-step given the parents (uniform when there are none yet), and the moments about μ."""
    log_prior, half_precision = None, None
    if variance is not None and log_a is not None:
        # ½ log 2π is the same for all parents and leaves the softmax unchanged
        log_prior = log_a - 0.5 * sum_pose(variance.log())
        half_precision = 0.5 / variance

    def step(tile: Children) -> tuple[Moments, Tensor]:
        deviation = votes(tile, mean) - mean
        if log_prior is None or half_precision is None:
            r = uniform_coefficients(tile, mean)
        else:
            r = (log_prior - sum_pose(deviation.square() * half_precision)).softmax(dim=1)
        return weighted_moments(r, tile.log_activations, deviation), r

    return step


# Tiles: shared with the activations of ablation C (ops/inverted/activations.py)


def at_least_float32(*tensors: Tensor) -> list[Tensor]:
    """All in one dtype: float64 if any is, else float32."""
    double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return [tensor.to(torch.float64 if double else torch.float32) for tensor in tensors]


def output_size(children: Tensor, kernel: tuple[int, int], stride: int) -> tuple[int, int, int]:
    """(B, H', W')."""
    batch, height, width = children.shape[:3]
    return batch, (height - kernel[0]) // stride + 1, (width - kernel[1]) // stride + 1


def gather_children(
    poses: Tensor,
    log_activations: Tensor,
    weight: Tensor,
    stride: int,
    offsets: Tensor | None = None,
) -> Children:
    """Operands from (B, H, W, in, d), (B, H, W, in) and (k, k', in, out, a, b); copies windows."""
    a = weight.shape[-2]
    kernel = (weight.shape[0], weight.shape[1])
    _, height, width = output_size(poses, kernel, stride)
    reach_y, reach_x = stride * (height - 1) + 1, stride * (width - 1) + 1

    def windows(x: Tensor) -> Tensor:  # -> (k·k', in, B, H', W', …)
        seen = [
            x[:, y : y + reach_y : stride, z : z + reach_x : stride]
            for y in range(kernel[0])
            for z in range(kernel[1])
        ]
        return torch.stack(seen).movedim(4, 1)

    split = windows(poses).unflatten(-1, (-1, a))  # (k·k', in, B, H', W', R, a)
    columns = split.permute(0, 1, 6, 5, 2, 3, 4).flatten(0, 1).flatten(2)
    log_a = windows(log_activations).flatten(0, 1).flatten(1)
    transforms = weight.flatten(0, 2).transpose(2, 3).flatten(1, 2)
    return Children(columns, log_a.unsqueeze(1), transforms, offsets)


def coordinates(poses: Tensor) -> Tensor:
    """What coordinate addition adds to votes: (H·W·in, 1, n, n, 1), zero but for two elements."""
    _, height, width, capsules, d = poses.shape
    n = math.isqrt(d)
    offsets = poses.new_zeros(height, width, capsules, 1, n, n, 1)
    row = (torch.arange(height, device=poses.device, dtype=poses.dtype) + 0.5) / height
    column = (torch.arange(width, device=poses.device, dtype=poses.dtype) + 0.5) / width
    offsets[..., 0, n - 1, 0, 0] = row[:, None, None]
    offsets[..., 0, n - 1, 1, 0] = column[:, None]
    return offsets.flatten(0, 2)


def split_tiles(children: Children) -> list[Children]:
    """Runs of children whose votes fit the byte budget; at least one child each."""
    count = len(children.poses)
    tile = count
    if not torch.compiler.is_exporting():  # an exported graph's batch is unknown: one tile
        itemsize = children.poses.element_size()
        per_column = children.transforms.shape[1] * itemsize
        budget = TILE_BYTES.get(children.poses.device.type, TILE_BYTES_OTHERWISE)
        tile = min(count, max(1, budget // max(1, per_column * children.poses.shape[2])))
        tile = math.ceil(count / math.ceil(count / tile))  # as many tiles, evenly filled
    parts = [field.split(tile) for field in children[:3]]
    offsets: Sequence[Tensor | None] = [None] * len(parts[0])
    if children.offsets is not None:
        offsets = children.offsets.split(tile)
    return [Children(*fields) for fields in zip(*parts, offsets, strict=True)]


def votes(tile: Children, parents: Tensor) -> Tensor:
    """v_ij = p_i · W_ij, of shape (I, *parents.shape)."""
    v = torch.bmm(tile.transforms, tile.poses).view(-1, *parents.shape)
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


def accumulate(
    step: Callable[[Children], tuple[Moments, Tensor]], tiles: list[Children], keep: bool
) -> tuple[Moments, Tensor | None]:
    """Add up the moments of all tiles; with `keep` also their coefficients, (I, out, N)."""
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
    if not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return function(tile)
    # no randomness inside; saving the generator's state would break CUDA graph capture
    return checkpoint(function, tile, use_reentrant=False, preserve_rng_state=False)


@torch.no_grad()
def evenly_routed_mean(children: Children, out: int) -> Tensor:
    """Σ_i a_i v_ij / Σ_i a_i, a centre for the first moments, (out, b, R, N): one GEMM, no votes.

    Carries no gradient, because the centre does not change the result; for the same reason it may
    leave the offsets out.
    """
    count, a, columns = children.poses.shape
    positions = children.log_activations.shape[-1]
    share = children.log_activations.softmax(dim=0)  # safe where every child is inactive
    weighed = children.poses.reshape(count, -1, positions) * share
    mean = children.transforms.transpose(0, 1).flatten(1) @ weighed.reshape(count * a, columns)
    return mean.view(out, -1, columns // positions, positions)


def mean_and_variance(moments: Moments, centre: Tensor) -> tuple[Tensor, Tensor]:
    """μ and σ² from the moments about `centre`."""
    mass = moments.mass.clamp_min(LEAST_MASS)[:, None, None]
    shift = moments.first / mass
    variance = moments.second / mass - shift.square()
    return centre + shift, variance.clamp_min(0.0) + VARIANCE_FLOOR


def log_activation(
    mass: Tensor, variance: Tensor, beta_u: Tensor, beta_a: Tensor, sharpness: float
) -> Tensor:
    """log a_j from what parent j's votes cost to code; `sharpness` is an inverse temperature."""
    cost = sum_pose(beta_u[:, None, None, None] + 0.5 * variance.log()) * mass
    return F.logsigmoid(sharpness * (beta_a[:, None] - cost))


def by_capsule(poses: Tensor, size: tuple[int, int, int]) -> Tensor:
    """(out, b, R, N) -> (B, H', W', out, d)."""
    return poses.permute(3, 0, 2, 1).flatten(2).unflatten(0, size)


def by_window(r: Tensor, size: tuple[int, int, int], window: tuple[int, int, int]) -> Tensor:
    """(I, out, N) -> (B, H', W', k, k, in, out)."""
    return r.unflatten(2, size).unflatten(0, window).permute(4, 5, 6, 0, 1, 2, 3)


def _without_position(state: EMIteration) -> EMIteration:
    """The class layer has one position: drop it, and number its children from 0 to H·W·in."""
    r = state.coefficients
    return EMIteration(
        poses=state.poses[:, 0, 0],
        log_activations=state.log_activations[:, 0, 0],
        coefficients=None if r is None else r[:, 0, 0].flatten(1, 3),
    )


def _check(
    poses: Tensor,
    log_activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    iterations: int,
    stride: int,
) -> None:
    if iterations < 1:
        raise ValueError(f"`iterations` must be at least 1, got {iterations}")
    if weight.ndim not in (4, 6):
        raise ValueError(
            "`weight` must have shape (k, k, in, out, n, n) or (in, out, n, n), "
            f"got {tuple(weight.shape)}"
        )
    n = weight.shape[-1]
    if weight.shape[-2] != n:
        raise ValueError(f"`weight` must end in square transforms, got {tuple(weight.shape)}")
    if weight.ndim == 4 and n < 2:
        raise ValueError(f"`weight` must be at least 2×2 to add coordinates, got {n}×{n}")
    check_children({"poses": poses, "log_activations": log_activations}, weight, stride)
    if poses.shape[-1] != n * n:
        raise ValueError(
            f"`poses` must have {n * n} elements to fit `weight`, got {poses.shape[-1]}"
        )
    if weight.ndim == 4 and stride != 1:
        raise ValueError(f"`stride` must be 1 for the class layer, got {stride}")
    check_betas(weight, beta_u, beta_a)


def check_children(
    named: dict[str, Tensor], weight: Tensor, stride: int, *, linear: bool = False
) -> None:
    """Raise unless the named poses and log-activations, in this order, fit the weight."""
    (poses_name, poses), (log_name, log_activations) = named.items()
    capsules = weight.shape[-4]
    if poses.ndim != (3 if linear else 5) or poses.shape[-2] != capsules:
        expected = f"(B, {capsules}, d)" if linear else f"(B, H, W, {capsules}, d)"
        raise ValueError(
            f"`{poses_name}` must have shape {expected} to fit `weight`, got {tuple(poses.shape)}"
        )
    if log_activations.shape != poses.shape[:-1]:
        raise ValueError(
            f"`{log_name}` must have shape {tuple(poses.shape[:-1])}, "
            f"got {tuple(log_activations.shape)}"
        )
    if stride < 1:
        raise ValueError(f"`stride` must be at least 1, got {stride}")
    if weight.ndim == 6 and (
        weight.shape[0] != weight.shape[1] or weight.shape[0] > min(poses.shape[1:3])
    ):
        raise ValueError(
            f"`weight` must have a square kernel within the {poses.shape[1]}×{poses.shape[2]} "
            f"input, got {weight.shape[0]}×{weight.shape[1]}"
        )


def check_betas(weight: Tensor, beta_u: Tensor, beta_a: Tensor) -> None:
    """Raise unless there is one β_u and one β_a for each parent type."""
    expected = (weight.shape[-3],)
    for name, beta in (("beta_u", beta_u), ("beta_a", beta_a)):
        if beta.shape != expected:
            raise ValueError(f"`{name}` must have shape {expected}, got {tuple(beta.shape)}")

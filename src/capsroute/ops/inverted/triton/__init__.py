"""Fused Triton kernels for a routing step with parents. See README.md in the folder above.

Importing this module does not import triton; `routing_step` does.
"""

import importlib.util
import os

import torch
from torch import Tensor

from capsroute.ops.inverted.norm import Unfinished
from capsroute.ops.inverted.triton.geometry import (
    fits_accumulator,
    padded_columns,
    power_of_two,
)
from capsroute.ops.precision import autocast_dtype
from capsroute.ops.tracing import constant_while_tracing

LARGEST_SIDE = 128  # of a transform: one is a tile in shared memory
MOST_PARENTS = 1024  # they compete within one program
MOST_CHILDREN = 2**16 - 1  # of a window, with large poses: CUDA's second axis of programs
LARGEST_INDEX = 2**31
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supported(children: Tensor | Unfinished, weight: Tensor) -> str | None:
    """Why the kernels cannot take these tensors; `None` when they can."""
    if children.dtype not in DTYPES:
        return f"the kernels take float32, float16 or bfloat16, not {children.dtype}"
    n_out, a, b = weight.shape[-3:]
    if max(a, b) > LARGEST_SIDE:
        return f"a transform of {a}×{b} is larger than {LARGEST_SIDE}×{LARGEST_SIDE}"
    if n_out > MOST_PARENTS:
        return f"{n_out} parents are more than {MOST_PARENTS}"
    if min(children.shape.numel(), weight.numel()) == 0:
        return "a tensor is empty"
    rows, window = children.shape[-1] // a, weight.shape[:-3].numel()
    columns = padded_columns(n_out, b)
    # at most: the convolution may have a stride. q and g by columns, or r and slopes
    parents = max(columns * power_of_two(rows), 2 * columns // power_of_two(b))
    parents *= children.shape[:-2].numel()
    if max(children.shape.numel(), weight.numel(), parents) >= LARGEST_INDEX:
        return "a tensor has 2³¹ elements or more"
    if window > MOST_CHILDREN and not fits_accumulator(rows, a, b, n_out):
        return f"{window} children of a parent with large poses are more than {MOST_CHILDREN}"
    return _missing(children.device.type, children.device.index)


def avoided(children: Tensor, weight: Tensor) -> str | None:
    """Why `impl="auto"` leaves the kernels alone: as above, or it does not trust them there.

    The interpreter is for tests.
    """
    if not children.is_cuda:
        return f"the kernels need a CUDA device, not {children.device.type}"
    return supported(children, weight) or _distrusted(children.device.index)


def can_finish(children: Unfinished) -> bool:
    """Whether a kernel can normalise these capsules on their way into a first iteration."""
    largest = max(children.shape.numel(), children.source.numel())
    fits = children.dtype in DTYPES and 0 < largest < LARGEST_INDEX
    return fits and _missing(children.device.type, children.device.index) is None


def can_project(features: Tensor, projection: Tensor) -> bool:
    """Whether a kernel can make capsules (in, d, C) of such features, (B, H, W, C)."""
    index = features.device.index
    if not features.is_cuda or _missing("cuda", index) or _distrusted(index):
        return False
    from capsroute.ops.inverted.triton.projection import fits

    dtype = autocast_dtype(features)
    if dtype is None and features.dtype != projection.dtype:
        return False  # an error, of which PyTorch's convolution tells
    return fits(features, projection, dtype or features.dtype)


def finished_by_rows(children: Unfinished, rows: int) -> Tensor:
    """(B, rows, H, W, in, d / rows), normalised."""
    from capsroute.ops.inverted.triton.norm import norm_by_rows
    from capsroute.ops.inverted.triton.projection import fits, project_by_rows

    source, norm, projection = children
    wanted = torch.is_grad_enabled()  # as the convolution's kernel has no gradients
    if projection is None or wanted or not fits(source, projection, source.dtype):
        return norm_by_rows(children.poses(), *norm, rows)
    return project_by_rows(source, projection, *norm, rows)


@constant_while_tracing
def _missing(device: str, index: int | None) -> str | None:
    """What the machine lacks to run the kernels."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device != "cuda":
        return f"the kernels need a CUDA device, not {device}"
    if torch.version.hip is not None:  # whose devices are called cuda too
        return "the kernels need CUDA, not ROCm"
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        return f"the kernels need compute capability 8.0 or newer, not {major}.{minor}"
    return None


@constant_while_tracing
def _distrusted(index: int | None) -> str | None:
    """Why nobody is given products of these kernels unasked, though the device can run them.

    With tcgen05 two products that are added to one accumulator in a loop came out wrong, without a
    word (triton-lang/triton#10821), and our kernels have such loops.
    """
    major, minor = torch.cuda.get_device_capability(index)
    if major == 10:
        return f"Triton is said to miscompile such kernels for compute capability {major}.{minor}"
    return None


def routing_step(
    children: Tensor, weight: Tensor, parents: Tensor, *, stride: int, scale: float
) -> Tensor:
    """The parents' new poses; same contract as `tiled.routing_step` with parents."""
    return _step(children, weight, parents, stride, scale, keep=False)[0]


def routing_step_with_coefficients(
    children: Tensor, weight: Tensor, parents: Tensor, *, stride: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Also the coefficients, (B, H', W', k, k, in, out), which carry no gradient here."""
    poses, kept = _step(children, weight, parents, stride, scale, keep=True)
    kept = kept.to(children.dtype).view(*weight.shape[:3], *parents.shape[:4])
    return poses, kept.permute(3, 4, 5, 0, 1, 2, 6)


def _step(
    children: Tensor, weight: Tensor, parents: Tensor, stride: int, scale: float, keep: bool
) -> tuple[Tensor, Tensor]:
    from capsroute.ops.inverted.triton.geometry import Geometry
    from capsroute.ops.inverted.triton.operators import inverted_forward
    from capsroute.ops.inverted.triton.tile import Tile, is_small

    kernel, inner = weight.shape[0], weight.shape[4]
    parents = parents.to(children.dtype)
    sizes = Geometry.of(children, parents, kernel, inner, stride)
    if is_small(sizes):
        # outside the operator, so that a compiler shares the copy between the iterations
        weight = Tile.of(sizes).pack(weight)
    return inverted_forward(children, weight, parents, kernel, inner, stride, scale, keep)

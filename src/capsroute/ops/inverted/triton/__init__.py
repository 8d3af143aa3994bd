"""Fused Triton kernels for a routing step with parents. See README.md in the folder above.

Importing this module does not import triton; `routing_step` does.
"""

import importlib.util
import os

import torch
from torch import Tensor

LARGEST_SIDE = 128  # of a transform: one is a tile in shared memory
MOST_PARENTS = 1024  # they compete within one program
LARGEST_INDEX = 2**31


def supported(children: Tensor, weight: Tensor) -> str | None:
    """Why the kernels cannot take these tensors; `None` when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if children.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernels take float32, float16 or bfloat16, not {children.dtype}"
    if children.dtype != weight.dtype:
        return f"children are {children.dtype} but the weight is {weight.dtype}"
    n_out, a, b = weight.shape[-3:]
    if max(a, b) > LARGEST_SIDE:
        return f"a transform of {a}×{b} is larger than {LARGEST_SIDE}×{LARGEST_SIDE}"
    if n_out > MOST_PARENTS:
        return f"{n_out} parents are more than {MOST_PARENTS}"
    if max(children.numel(), weight.numel()) >= LARGEST_INDEX:
        return "a tensor has 2³¹ elements or more"
    if min(children.numel(), weight.numel()) == 0:
        return "a tensor is empty"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not children.is_cuda:
        return f"the kernels need a CUDA device, not {children.device.type}"
    major, minor = torch.cuda.get_device_capability(children.device)
    if major < 8:
        return f"the kernels need compute capability 8.0 or newer, not {major}.{minor}"
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

    small = Geometry.of(children, weight, stride, rows_first=False).small
    if small:
        # outside the operator, so that a compiler shares the copy between the iterations
        weight = weight.transpose(3, 4).contiguous()
    parents = parents.to(children.dtype)
    return inverted_forward(children, weight, parents, stride, scale, small, keep)

"""What every kernel needs: where a window's children lie, and the softmax over the parents."""

# Kernel arguments have no Python types, constants are in capitals.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def window_corner(
    position, height, width, out_height, out_width, stride, N_IN: tl.constexpr, D: tl.constexpr
):
    """Offset of the first child that an output position sees."""
    x = position % out_width
    y = position // out_width % out_height
    image = position // (out_width * out_height)
    return ((image * height + y * stride) * width + x * stride) * (N_IN * D)


@triton.jit
def child_offset(child, width, N_IN: tl.constexpr, K: tl.constexpr, D: tl.constexpr):
    """Offset of a window's child from the window's corner."""
    tap = child // N_IN
    return ((tap // K * width + tap % K) * N_IN + child % N_IN) * D


@triton.jit
def softmax(x, TYPE: tl.constexpr):
    """Over the last axis. The hardware's exponential rounds x · log₂e: for fp32, put that back."""
    largest = tl.max(x, axis=1)[:, None]
    if tl.float32 == TYPE:
        # e⁻²⁰⁰ is zero, and infinity has no remainder; NaN stays, as everyone's softmax has it
        x = tl.maximum(x - largest, -200.0, propagate_nan=tl.PropagateNan.ALL)
        y = x * 1.4426950408889634
        rest = tl.fma(x, 1.4426950216293335, -y) + x * 1.9259629911266175e-8
        x = tl.exp2(y) * (1.0 + rest * 0.6931471805599453)
        return x / tl.sum(x, axis=1)[:, None]
    x = tl.exp2(tl.fma(x, 1.4426950408889634, largest * -1.4426950408889634))
    return x * (1.0 / tl.sum(x, axis=1))[:, None]


@triton.jit
def softmax_gradient(share, u, TYPE: tl.constexpr):
    """r (u − Σ r u) over the last axis. For fp32, what the mean was rounded off by is put back."""
    u -= tl.sum(share * u, axis=1)[:, None]
    if tl.float32 == TYPE:
        u -= tl.sum(share * u, axis=1)[:, None]
    return share * u

"""`routing_step`: the one public entry to inverted dot-product attention routing."""

import math
from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from capsroute.ops.choice import check_impl, check_kernels, say_once
from capsroute.ops.inverted import reference, tiled, triton
from capsroute.ops.inverted.norm import Unfinished
from capsroute.ops.precision import autocast_dtype, own_precision
from capsroute.ops.tracing import is_exporting, is_transformed

ROUTING = "inverted routing"


@overload
def routing_step(
    children: Tensor,
    weight: Tensor,
    parents: Tensor | None = ...,
    *,
    stride: int = ...,
    scale: float | None = ...,
    impl: str = ...,
    return_coefficients: Literal[False] = ...,
) -> Tensor: ...


@overload
def routing_step(
    children: Tensor,
    weight: Tensor,
    parents: Tensor | None = ...,
    *,
    stride: int = ...,
    scale: float | None = ...,
    impl: str = ...,
    return_coefficients: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def routing_step(
    children: Tensor,
    weight: Tensor,
    parents: Tensor | None = None,
    *,
    stride: int = 1,
    scale: float | None = None,
    impl: str = "auto",
    return_coefficients: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """One step of inverted dot-product attention routing, before LayerNorm.

    Each child votes for every parent that sees it, v_ij = p_i · W_ij. The parents compete for the
    child through a softmax over scale · ⟨p_j, v_ij⟩, and a parent's new pose is the sum of its
    shares of the votes, Σ_i r_ij v_ij. In a convolutional layer the parents that compete are the
    capsules at one output position.

    Args:
        children: poses (B, H, W, in, d) for a convolutional layer, (B, in, d) for a linear one.
        weight: transforms (k, k, in, out, a, b) or (in, out, a, b). With a = d the pose is a
            vector and the vote has b elements; with a = b = √d the pose is a matrix.
        parents: the parents' poses from the previous iteration, (B, H', W', out, d') or
            (B, out, d'). `None` for the first iteration: zero poses, so uniform coefficients.
        stride: stride of the convolution, which has no padding.
        scale: factor of the agreement; 1/√d' by default. The paper's formula has `scale=1.0`.
        impl: `reference` (the formula; holds every vote), `tiled` (plain PyTorch; holds a tile of
            them), `triton` (fused CUDA kernels; hold none) or `auto`: `triton` where it can run
            (CUDA, compute capability 8.0 or newer), `reference` in an exported graph, `tiled`
            otherwise. The logger `capsroute` says once, at debug level, what was chosen and why.
            Only `reference` can be differentiated twice.
        return_coefficients: also return r, (B, H', W', k, k, in, out) or (B, in, out). Only
            `reference` can be differentiated through them.

    Returns:
        The parents' poses, (B, H', W', out, d') or (B, out, d'), in the dtype of the children or
        of autocast; and r if asked for.
    """
    _check_dtypes(children=children, weight=weight, parents=parents)
    _check_devices(children, weight=weight, parents=parents)
    check_scale(scale)
    linear = check_shapes(
        children.shape, weight.shape, None if parents is None else parents.shape, stride
    )
    if linear:  # a convolution whose image is one pixel
        children, weight = children[:, None, None], weight[None, None]
        parents = None if parents is None else parents[:, None, None]
    if scale is None:  # a parent's pose: rows of the child's times columns of the transform
        scale = 1.0 / math.sqrt(children.shape[-1] // weight.shape[-2] * weight.shape[-1])
    if (dtype := autocast_dtype(children)) is not None:
        children, weight = children.to(dtype), weight.to(dtype)
    _check_same_dtype(children, weight)
    if parents is not None and parents.dtype != children.dtype:
        parents = parents.to(children.dtype)
    with own_precision(children):
        poses, coefficients = _dispatch(
            impl, children, weight, parents, stride, scale, return_coefficients
        )
    if linear:
        poses = poses[:, 0, 0]
        coefficients = None if coefficients is None else coefficients[:, 0, 0, 0, 0]
    if return_coefficients:
        assert coefficients is not None  # every implementation returns them when asked
        return poses, coefficients
    return poses


def first_step(
    children: Unfinished, weight: Tensor, *, stride: int = 1, impl: str = "auto"
) -> Tensor:
    """`routing_step` without parents, of children that have yet to be normalised.

    But for rounding the same as finishing them before. A first iteration has to move its children
    anyway, so on CUDA one kernel does both, and without gradients the convolution before, too.
    """
    linear = weight.ndim == 4
    shape = children.shape
    _check_dtypes(children=children.source, weight=weight)
    _check_devices(children.source, weight=weight)
    check_shapes(
        (shape[0], shape[1:4].numel(), shape[4]) if linear else shape, weight.shape, None, stride
    )
    if children.norm.weight.shape != shape[-1:]:
        raise ValueError(
            f"`children` must have a norm over poses of {shape[-1]} elements, "
            f"got one over {children.norm.weight.numel()}"
        )
    if (dtype := autocast_dtype(children.source)) is not None:
        children, weight = children.to(dtype), weight.to(dtype)
    _check_same_dtype(children.source, weight)
    with own_precision(children.source):
        if not _finishes(impl, children, weight):
            poses = children.finished()
            poses = poses.flatten(1, -2) if linear else poses
            return routing_step(poses, weight, stride=stride, impl=impl)
        x = triton.finished_by_rows(children, shape[-1] // weight.shape[-2])
        if not linear:
            return tiled.uniform_step(x, weight, stride)
        x = x.flatten(2, 4)[:, :, None, None]  # a linear layer sees the image as one position
        return tiled.uniform_step(x, weight[None, None], stride)[:, 0, 0]


def _finishes(impl: str, children: Unfinished, weight: Tensor) -> bool:
    """Whether a kernel does what the children of a first iteration lack."""
    if is_transformed():  # which PyTorch's convolution takes part in, and a kernel does not
        return False
    if impl == "triton":
        check_kernels(triton.supported(children, weight))
        return True
    on_card = impl == "auto" and children.device.type == "cuda"
    return on_card and not is_exporting() and triton.can_finish(children)


def _dispatch(
    impl: str,
    children: Tensor,
    weight: Tensor,
    parents: Tensor | None,
    stride: int,
    scale: float,
    return_coefficients: bool,
) -> tuple[Tensor, Tensor | None]:
    check_impl(impl)
    if impl == "auto":
        impl = "tiled" if parents is None else _choose(children, weight)
    if impl == "reference":
        return reference.routing_step(children, weight, parents, stride=stride, scale=scale)
    if parents is not None and is_transformed():
        raise ValueError(
            "`impl` must be 'reference' inside torch.func (grad, jacrev, jvp, vmap) and "
            f"torch.autograd.forward_ad, got {impl!r}"
        )
    if impl == "triton":
        check_kernels(triton.supported(children, weight))
        if parents is not None:  # the first iteration is a convolution anyway
            return _triton(children, weight, parents, stride, scale, return_coefficients)
    return tiled.routing_step(
        children,
        weight,
        parents,
        stride=stride,
        scale=scale,
        return_coefficients=return_coefficients,
    )


def _choose(children: Tensor, weight: Tensor) -> str:
    """What `auto` means for a step with parents."""
    if is_exporting():  # tiles depend on the batch, kernels on the machine
        return say_once(ROUTING, "reference", "the graph is exported")
    reason = triton.avoided(children, weight)
    return say_once(ROUTING, "triton" if reason is None else "tiled", reason)


def _triton(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    stride: int,
    scale: float,
    return_coefficients: bool,
) -> tuple[Tensor, Tensor | None]:
    if return_coefficients:
        return triton.routing_step_with_coefficients(
            children, weight, parents, stride=stride, scale=scale
        )
    return triton.routing_step(children, weight, parents, stride=stride, scale=scale), None


def _check_dtypes(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"`{name}` must be a floating-point tensor, got {tensor.dtype}")


def _check_devices(children: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != children.device:
            raise ValueError(
                f"`{name}` must be on {children.device} as the children are, got {tensor.device}"
            )


def check_scale(scale: float | None) -> None:
    """A tensor would look like something to learn, and get no gradient."""
    if isinstance(scale, Tensor):
        raise TypeError("`scale` must be a number, got a Tensor")


def _check_same_dtype(children: Tensor, weight: Tensor) -> None:
    if weight.dtype != children.dtype:
        raise TypeError(
            f"`weight` must be {children.dtype} as the children are, got {weight.dtype}"
        )


def check_shapes(
    children: Sequence[int], weight: Sequence[int], parents: Sequence[int] | None, stride: int
) -> bool:
    """Raise a one-line error for shapes that do not fit; return whether the layer is linear."""
    linear = len(children) == 3
    if len(children) not in (3, 5):
        raise ValueError(
            f"`children` must have shape (B, H, W, in, d) or (B, in, d), got {tuple(children)}"
        )
    if len(weight) != (4 if linear else 6):
        expected = "(in, out, a, b)" if linear else "(k, k, in, out, a, b)"
        raise ValueError(
            f"`weight` must have shape {expected} for these children, got {tuple(weight)}"
        )
    n_in, n_out, a, b = weight[-4:]
    d = children[-1]
    if 0 in weight:
        raise ValueError(f"`weight` must not be empty, got shape {tuple(weight)}")
    if children[-2] != n_in:
        raise ValueError(
            f"`children` must have {n_in} capsules to fit `weight`, got {children[-2]}"
        )
    if not (a == d or (a == b and a * b == d)):
        raise ValueError(
            "the last two sizes of `weight` must be (d, d') for vector poses or (√d, √d) for "
            f"matrix poses with d = {d}, got {(a, b)}"
        )
    if stride < 1:
        raise ValueError(f"`stride` must be at least 1, got {stride}")
    size: tuple[int, ...] = ()
    if linear:
        if stride != 1:
            raise ValueError(f"`stride` must be 1 for a linear layer, got {stride}")
    else:
        k = weight[0]
        height, width = children[1:3]
        if weight[1] != k or k > min(height, width):
            raise ValueError(
                f"`weight` must have a square kernel within the {height}×{width} children, "
                f"got {k}×{weight[1]}"
            )
        size = ((height - k) // stride + 1, (width - k) // stride + 1)
    expected_parents = (children[0], *size, n_out, d // a * b)
    if parents is not None and tuple(parents) != expected_parents:
        raise ValueError(f"`parents` must have shape {expected_parents}, got {tuple(parents)}")
    return linear

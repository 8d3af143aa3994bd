"""One routing step as the paper writes it. Slow, memory-hungry, and the oracle for the rest.

Symbols (paper, Procedure 1): children p_i, parents p_j, weight W_ij, votes v_ij, agreement a_ij,
routing coefficients r_ij. Everything is differentiable and runs in the dtype of its inputs.
"""

import torch
from torch import Tensor


def windows(children: Tensor, kernel: int, stride: int) -> Tensor:
    """(B, H, W, in, d) -> (B, H', W', k, k, in, d): the children that each output position sees."""
    unfolded = children.unfold(1, kernel, stride).unfold(2, kernel, stride)
    return unfolded.permute(0, 1, 2, 5, 6, 3, 4)


def votes(children: Tensor, weight: Tensor, stride: int) -> Tensor:
    """v_ij = p_i · W_ij, of shape (B, H', W', k, k, in, out, d)."""
    seen = windows(children, weight.shape[0], stride)
    size = weight.shape[-2]
    if seen.shape[-1] == size:  # vector pose: a row times W
        return torch.einsum("bhwyxic,yxijcd->bhwyxijd", seen, weight)
    matrices = seen.unflatten(-1, (size, size))  # matrix pose: rows r, columns c
    return torch.einsum("bhwyxirc,yxijcd->bhwyxijrd", matrices, weight).flatten(-2)


def routing_step(
    children: Tensor, weight: Tensor, parents: Tensor | None, *, stride: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The parents' new poses, before LayerNorm, and the routing coefficients.

    `parents=None` stands for poses of zero, with which every parent agrees equally.
    """
    v = votes(children, weight, stride)
    if parents is None:
        agreement = torch.zeros_like(v[..., 0])
    else:
        agreement = scale * torch.einsum("bhwjd,bhwyxijd->bhwyxij", parents, v)
    coefficients = agreement.softmax(dim=-1)  # the parents compete for each child
    poses = torch.einsum("bhwyxij,bhwyxijd->bhwjd", coefficients, v)
    return poses, coefficients

"""What every capsule layer asks of its arguments: an error of one line, a warning, or nothing."""

import math
import warnings
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from torch import Tensor

WEIGHTS_WORTH_A_WARNING = 100_000_000


def check_counts(**arguments: Any) -> None:
    """Each an integer of at least 1, numpy's among them."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}")


def matrix_side(pose_dim: int) -> int:
    """√d of a pose that is a matrix."""
    check_counts(pose_dim=pose_dim)
    side = math.isqrt(pose_dim)
    if side * side != pose_dim:
        raise ValueError(f"`pose_dim` must be a square for matrix poses, got {pose_dim}")
    return side


def check_features(features: Tensor) -> None:
    if features.ndim != 4:
        raise ValueError(f"`features` must have shape (B, C, H, W), got {tuple(features.shape)}")


def in_one_row(children: Tensor) -> Tensor:
    """Children of a linear layer: (B, H, W, capsules, d) as (B, in, d)."""
    if children.ndim < 3:
        raise ValueError(
            "`children` must have shape (B, in, d) or (B, H, W, capsules, d), "
            f"got {tuple(children.shape)}"
        )
    return children.flatten(1, -2)


def warn_if_huge(shape: tuple[int, ...]) -> None:
    """A linear capsule layer grows with the image; say so before the memory runs out."""
    weights = math.prod(shape)
    if weights > WEIGHTS_WORTH_A_WARNING:
        n_in, n_out, a, b = shape
        warnings.warn(
            f"a linear capsule layer from {n_in:,} to {n_out:,} capsules holds {weights:,} weights "
            f"({a}×{b} each): consider a smaller image, more stride or fewer capsules before it",
            stacklevel=4,
        )

"""How decided the routing is: entropy of the coefficients, and capsules that never win."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EVEN = 1e-4  # less than this under the highest entropy, a layer hardly routes
ROUNDING = 1e-5  # of an even share, by float32


@dataclass(frozen=True)
class Decision:
    """One routed layer."""

    layer: int
    """1 is the first layer above the primary capsules."""
    parents: int
    """Capsules that compete for a child."""
    children: int
    """Capsules that a parent gathers votes from."""
    entropy: list[float]
    """Of what a child gave to each parent, by iteration, averaged; 1 is even, 0 all to one."""
    used: int
    """The last iteration that reaches the scores, counted from 1."""
    deviation: float
    """How far any share that counts is from even, in units of an even share."""
    never_win: float | None
    """Share of this layer's capsules that are no child's first choice; None without routing."""
    nobody: float
    """What the children gave to no parent, averaged; 0 where coefficients sum to 1."""

    @property
    def routed(self) -> bool:
        """Whether the coefficients that count are anything but even, or very nearly so."""
        return self.entropy[self.used - 1] < 1.0 - EVEN

    @property
    def even(self) -> bool:
        """Whether they are exactly even, as a first iteration's are by construction."""
        return self.deviation < ROUNDING

    @property
    def deviation_percent(self) -> str:
        """Rounded up: no share is further from even."""
        return f"{math.ceil(1000 * self.deviation - 0.01) / 10:.1f} %"

    @property
    def state(self) -> str:
        if self.routed:
            return "routed"
        if self.even:
            return "shared evenly"
        return f"hardly routed, within {self.deviation_percent} of even"

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "routed": self.routed, "state": self.state}


def decisions(coefficients: Sequence[Sequence[Tensor]], used: Sequence[int]) -> list[Decision]:
    """Of a batch of one image: `Routing.coefficients` and `Routing.used`."""
    found = []
    for layer, (rounds, last) in enumerate(zip(coefficients, used, strict=True), start=1):
        entropy = [normalized_entropy(r) for r in rounds]
        even = entropy[last] >= 1.0 - EVEN
        r = rounds[last]
        found.append(
            Decision(
                layer=layer,
                parents=r.shape[-1],
                children=r.shape[-2] if r.ndim == 3 else math.prod(r.shape[3:6]),
                entropy=entropy,
                used=last + 1,
                deviation=(parts(r) * r.shape[-1] - 1.0).abs().max().item(),
                never_win=None if even else share_never_winning(r),
                nobody=share_to_nobody(r),
            )
        )
    return found


def normalized_entropy(r: Tensor) -> float:
    """Mean entropy over children, in units of the highest there is, log M."""
    parents = r.shape[-1]
    if parents == 1:  # no choice
        return 1.0
    given = parts(r)
    entropy = -(given * given.clamp_min(1e-300).log()).sum(dim=-1).mean()
    return min(1.0, entropy.item() / math.log(parents))


def parts(r: Tensor) -> Tensor:
    """What a child gave to each parent, of all that it gave; even if it gave nothing.

    A routing of one's own may let children go to nobody, so that coefficients sum to less than 1.
    """
    wide = r.double()
    total = wide.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, wide / total, 1.0 / r.shape[-1])


def share_to_nobody(r: Tensor) -> float:
    share = 1.0 - r.double().sum(dim=-1).mean().item()
    return share if share > max(ROUNDING, torch.finfo(r.dtype).eps) else 0.0


def share_never_winning(r: Tensor) -> float:
    """Share of the parents (at every position) that no child gives most of itself to."""
    parents = r.shape[-1]
    children = r if r.ndim == 3 else r.flatten(3, 5)  # (…, children, parents)
    first = children.argmax(dim=-1)  # (…, children)
    won = first.new_zeros(*first.shape[:-1], parents).scatter(-1, first, 1)
    return 1.0 - won.double().mean().item()

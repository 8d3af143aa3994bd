"""How decided the routing is: entropy of the coefficients, and capsules that never win."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

EVEN = 1e-4  # below this much under the highest entropy, coefficients are taken to be even


@dataclass(frozen=True)
class Decision:
    """One routed layer."""

    layer: int
    """1 is the first layer above the primary capsules."""
    parents: int
    """Capsules that compete for a child."""
    entropy: list[float]
    """Of a child's coefficients, by iteration, averaged; 1 is even, 0 is all to one parent."""
    used: int
    """The last iteration that reaches the scores, counted from 1."""
    never_win: float | None
    """Share of this layer's capsules that are no child's first choice; None without routing."""

    @property
    def routed(self) -> bool:
        """Whether the coefficients that count are anything but even."""
        return self.entropy[self.used - 1] < 1.0 - EVEN

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "routed": self.routed}


def decisions(coefficients: Sequence[Sequence[Tensor]], used: Sequence[int]) -> list[Decision]:
    """Of a batch of one image: `Routing.coefficients` and `Routing.used`."""
    found = []
    for layer, (rounds, last) in enumerate(zip(coefficients, used, strict=True), start=1):
        entropy = [normalized_entropy(r) for r in rounds]
        even = entropy[last] >= 1.0 - EVEN
        never = None if even else share_never_winning(rounds[last])
        found.append(Decision(layer, rounds[last].shape[-1], entropy, last + 1, never))
    return found


def normalized_entropy(r: Tensor) -> float:
    """Mean entropy over children, in units of the highest there is, log M."""
    parents = r.shape[-1]
    if parents == 1:  # no choice
        return 1.0
    wide = r.double()
    entropy = -(wide * wide.clamp_min(1e-300).log()).sum(dim=-1).mean()
    return min(1.0, entropy.item() / math.log(parents))


def share_never_winning(r: Tensor) -> float:
    """Share of the parents (at every position) that no child gives most of itself to."""
    parents = r.shape[-1]
    children = r if r.ndim == 3 else r.flatten(3, 5)  # (…, children, parents)
    first = children.argmax(dim=-1)  # (…, children)
    won = first.new_zeros(*first.shape[:-1], parents).scatter(-1, first, 1)
    return 1.0 - won.double().mean().item()

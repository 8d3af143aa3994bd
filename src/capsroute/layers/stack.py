"""Runs a schedule over a stack of capsule layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from capsroute.layers.checks import check_choice, check_counts
from capsroute.layers.dynamic import DynamicConvCaps, DynamicLinearCaps
from capsroute.layers.em import EMClassCaps, EMConvCaps
from capsroute.layers.inverted import InvertedCaps
from capsroute.ops import schedule as schedules
from capsroute.ops.inverted.norm import Unfinished

BY_THEMSELVES = (DynamicConvCaps, DynamicLinearCaps, EMConvCaps, EMClassCaps)


@dataclass
class History:
    """What every routed layer did: `poses[layer][iteration]`, `coefficients[layer][iteration]`.

    Layer 0 is the first one above the primary capsules.
    """

    poses: list[list[Any]] = field(default_factory=list)
    coefficients: list[list[Any]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)


class CapsuleStack(nn.Module):
    """Capsule layers routed together: primary capsules in, the last layer's capsules out.

    Args:
        layers: from the bottom up, each with `forward(children, parents, *, return_coefficients)`.
        iterations: number of routing iterations; 1 is uniform routing.
        schedule: `concurrent` (the paper) or `sequential` (ablation B).
    """

    def __init__(
        self, layers: Sequence[nn.Module], *, iterations: int, schedule: str = "concurrent"
    ) -> None:
        super().__init__()
        check_counts(iterations=iterations)
        if not layers:
            raise ValueError("`layers` must hold one layer at least, got none")
        for layer in layers:
            if isinstance(layer, BY_THEMSELVES):
                raise ValueError(
                    "`layers` must take one routing step a call, as ConvCaps does, got a "
                    f"{type(layer).__name__}, which does all its iterations: call it by itself"
                )
        check_choice("schedule", schedule, schedules.SCHEDULES)
        self.layers = nn.ModuleList(layers)
        self.iterations, self.schedule = iterations, schedule

    def forward(self, primary: Any) -> Any:
        """Primary capsules may be `Unfinished`: left to the first layer if it reads them once."""
        if isinstance(primary, Unfinished) and not self.can_finish():
            primary = primary.finished()
        run = schedules.SCHEDULES[self.schedule]
        return run(list(self.layers), primary, self.iterations)[-1]

    def can_finish(self) -> bool:
        """Whether the first layer knows how to finish capsules, and reads its children once."""
        return isinstance(self.layers[0], InvertedCaps) and self._needed()[0] == 1

    def _needed(self) -> list[int]:
        """How many iterations of each layer reach the last one."""
        if self.schedule == "sequential":
            return [self.iterations] * len(self.layers)
        return schedules.light_cone(self.iterations, len(self.layers))

    def route(self, primary: Any) -> tuple[Any, History]:
        """The same result, and a record of all updates of all layers, even those without effect."""
        history = History()
        steps = [self._recorded(layer, history) for layer in self.layers]
        run = schedules.SCHEDULES[self.schedule]
        top = run(steps, primary, self.iterations, every_update=True)[-1]
        history.used = [count - 1 for count in self._needed()]
        return top, history

    @staticmethod
    def _recorded(layer: nn.Module, history: History) -> Any:
        poses: list[Any] = []
        coefficients: list[Any] = []
        history.poses.append(poses)
        history.coefficients.append(coefficients)

        def step(children: Any, parents: Any) -> Any:
            updated, shares = layer(children, parents, return_coefficients=True)
            poses.append(updated)
            coefficients.append(shares)
            return updated

        return step

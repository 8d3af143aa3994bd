"""Which capsule layer routes when.

A schedule drives `steps`, one callable for each routed layer from the bottom up; each maps
`(children, parents)` to the parents' new poses, and `parents=None` means that the layer has not
routed yet. Poses are passed through untouched, so a step may work on any type.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

Poses = TypeVar("Poses")
Step = Callable[[Poses, Poses | None], Poses]


def light_cone(iterations: int, layers: int) -> list[int]:
    """How many concurrent iterations of each routed layer can affect the last one.

    An update climbs one layer per iteration: what layer m computes in iteration s reaches the top
    in iteration s + (layers − m). So only its first `iterations − (layers − m)` updates matter, and
    always the first one, as the first pass is sequential. (The paper also counts the primary
    layer: its layer l is our m = l − 1.)
    """
    return [max(1, iterations - (layers - m)) for m in range(1, layers + 1)]


def concurrent(
    steps: Sequence[Step[Poses]], primary: Poses, iterations: int, *, every_update: bool = False
) -> list[Poses]:
    """The paper's Procedure 2: one sequential pass, then all layers at once.

    Updates outside the light cone cannot affect the last layer and are skipped;
    `every_update=True` computes them too, for inspection. Returns the last poses of every routed
    layer.
    """
    _check_iterations(iterations)
    needed = [iterations] * len(steps) if every_update else light_cone(iterations, len(steps))
    poses = [primary]
    for step in steps:
        poses.append(step(poses[-1], None))
    for iteration in range(2, iterations + 1):
        # the right-hand side reads the poses of the iteration before, whatever the order
        poses[1:] = [
            step(poses[m], poses[m + 1]) if iteration <= needed[m] else poses[m + 1]
            for m, step in enumerate(steps)
        ]
    return poses[1:]


def sequential(
    steps: Sequence[Step[Poses]], primary: Poses, iterations: int, *, every_update: bool = False
) -> list[Poses]:
    """As in earlier capsule networks (and ablation B), a layer finishes before the next starts.

    There is no light cone here: `every_update` is accepted so that schedules are interchangeable.
    """
    del every_update
    _check_iterations(iterations)
    poses = [primary]
    for step in steps:
        parents = step(poses[-1], None)
        for _ in range(iterations - 1):
            parents = step(poses[-1], parents)
        poses.append(parents)
    return poses[1:]


SCHEDULES = {"concurrent": concurrent, "sequential": sequential}


def _check_iterations(iterations: int) -> None:
    if iterations < 1:
        raise ValueError(f"`iterations` must be at least 1, got {iterations}")

"""What each capsule and each pixel gave to the score of a class: the routing followed down."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from capsroute.explain.trace import Layer, Trace


@dataclass(frozen=True)
class Flow:
    """One class of each image. Parts of a score may be negative; shares (EM) are not."""

    primary: Tensor
    """By primary capsule, (B, H, W, capsules)."""
    links: list[Tensor]
    """By child and parent, from the bottom up, in the shape of the layer's coefficients."""
    pixels: Tensor | None
    """By pixel, (B, H, W); None where scores are not linear in the votes (EM)."""


def follow(trace: Trace, classes: Tensor) -> Flow:
    """From class `classes[b]` of image b down to its primary capsules and pixels.

    For inverted and dynamic routing the parts are exact: with the routing held, the score is
    their sum and a constant (the biases). EM's activation is no sum; there a class is followed
    down by its children's shares of its mass.
    """
    if not trace.is_linear:
        shared = share_down(trace.layers, [layer.shares for layer in trace.layers], classes)
        return Flow(shared[0], shared[1:], None)
    rebuilt = trace.rebuilt
    wanted = [trace.images, rebuilt.poses[0], *rebuilt.sums]
    with torch.enable_grad():
        score = rebuilt.scores.gather(1, classes[:, None]).sum()
        # retained: another class of the same images may be next
        of_images, of_primary, *of_sums = torch.autograd.grad(score, wanted, retain_graph=True)
    with torch.no_grad():
        links = [
            layer.shares * along(layer, layer.votes(poses), gradient)
            for layer, poses, gradient in zip(trace.layers, rebuilt.poses, of_sums, strict=False)
        ]
        pixels = (trace.images * of_images).sum(dim=1)
        return Flow((rebuilt.poses[0] * of_primary).sum(dim=-1).detach(), links, pixels.detach())


def rivals(scores: Tensor, classes: Tensor) -> Tensor:
    """(B,): the strongest class other than `classes[b]`."""
    return scores.scatter(1, classes[:, None], -torch.inf).argmax(dim=1)


def margins(scores: Tensor, classes: Tensor) -> Tensor:
    """(B,): by how much class `classes[b]` is ahead of the strongest other class, if there is one.

    What all classes have in common is no part of it: the classifier's bias, for one.
    """
    own = scores.gather(1, classes[:, None])[:, 0]
    if scores.shape[1] == 1:
        return own
    return own - scores.gather(1, rivals(scores, classes)[:, None])[:, 0]


def follow_margin(trace: Trace, classes: Tensor) -> Tensor:
    """What each pixel gave to `margins`, (B, H, W), as `Flow.pixels` is what it gave to a score."""
    with torch.enable_grad():
        ahead = margins(trace.rebuilt.scores, classes).sum()
        (of_images,) = torch.autograd.grad(ahead, trace.images, retain_graph=True)
    return (trace.images * of_images).sum(dim=1).detach()


def along(layer: Layer, votes: Tensor, direction: Tensor) -> Tensor:
    """⟨v_ij, direction_j⟩ for every child and parent."""
    if layer.linear:
        return torch.einsum("bijd,bjd->bij", votes, direction)
    return torch.einsum("bhwyxijd,bhwjd->bhwyxij", votes, direction)


def share_down(layers: Sequence[Layer], weights: Sequence[Tensor], classes: Tensor) -> list[Tensor]:
    """Hand 1 down from a class: every parent shares what it got among its children by weight.

    `weights`, not negative, have the shape of the layers' coefficients. Returns what the primary
    capsules got, (B, H, W, capsules), then what went along the links of each layer.
    """
    batch = len(classes)
    rows, columns, capsules = layers[-1].parents
    got = weights[-1].new_zeros(batch, rows, columns, capsules)
    got[torch.arange(batch, device=got.device), 0, 0, classes] = 1.0
    links: list[Tensor] = []
    for layer, weight in zip(reversed(layers), reversed(weights), strict=True):
        over_children = (1,) if layer.linear else (3, 4, 5)
        total = weight.sum(dim=over_children, keepdim=True).clamp_min(1e-20)
        parents = got.flatten(1, 3)[:, None] if layer.linear else got[:, :, :, None, None, None]
        links.append(weight / total * parents)
        got = sum_over_parents(layer, links[-1])
    return [got, *reversed(links)]


def sum_over_parents(layer: Layer, links: Tensor) -> Tensor:
    """What each child's links add up to, (B, H, W, capsules)."""
    rows, columns, capsules = layer.children
    if layer.linear:
        return links.sum(dim=-1).unflatten(1, (rows, columns, capsules))
    children = links.new_zeros(len(links), rows, columns, capsules)
    reach_y = layer.stride * (layer.parents[0] - 1) + 1
    reach_x = layer.stride * (layer.parents[1] - 1) + 1
    for y in range(layer.kernel):
        for x in range(layer.kernel):
            seen = children[:, y : y + reach_y : layer.stride, x : x + reach_x : layer.stride]
            seen += links[:, :, :, y, x].sum(dim=-1)
    return children

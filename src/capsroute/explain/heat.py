"""Heat maps over the input: several definitions, and gradients to hold them against.

`contrast` is the default because it separates overlapping digits best; `grid` where a backbone
lets every capsule see nearly everything, and what a single pixel gave is noise (docs/explain.md
has the numbers, and what they do not show).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from capsroute.explain.fields import primary_fields
from capsroute.explain.flow import along, follow, follow_margin, margins, share_down
from capsroute.explain.trace import Trace
from capsroute.models.base import CapsuleClassifier, ImageClassifier
from capsroute.models.em import EMCapsNet

Map = Callable[[Trace, Tensor], Tensor]
"""A trace of B images and one class for each, to heat (B, H, W), not negative."""

SMOOTHING = 18  # a pixel's part is averaged over a square of side 1 + 2 · (image's side // this)


def contrast(trace: Trace, classes: Tensor) -> Tensor:
    """What each pixel gave to the class beyond what it gave to the strongest other class.

    Along the routes taken, averaged over neighbours like `contribution`: what speaks for both
    classes alike is heat of neither, and what speaks against the other class is heat of this one.
    """
    _check_linear(trace, contrast)
    return _smooth(follow_margin(trace, classes))


def contribution(trace: Trace, classes: Tensor) -> Tensor:
    """What each pixel gave to the score along the routes taken, averaged over its neighbours.

    Parts that cancel within a neighbourhood cancel before what is left is called heat.
    """
    _check_linear(trace, contribution)
    return _smooth(_pixel_parts(trace, classes))


def contribution_by_pixel(trace: Trace, classes: Tensor) -> Tensor:
    """The same without the average over neighbours."""
    _check_linear(trace, contribution_by_pixel)
    return _pixel_parts(trace, classes).clamp_min(0.0)


def fields(trace: Trace, classes: Tensor) -> Tensor:
    """What each primary capsule gave to the score, laid on its receptive field."""
    return _by_field(trace, follow(trace, classes).primary)


def grid(trace: Trace, classes: Tensor) -> Tensor:
    """What each place of the primary capsules gave to the score, interpolated between places."""
    places = follow(trace, classes).primary.sum(dim=-1)
    laid = primary_fields(trace.model).interpolate(places, trace.model.image_size)
    return laid.clamp_min(0.0).detach()


def coefficients(trace: Trace, classes: Tensor) -> Tensor:
    """Routing coefficients alone, multiplied down: how votes are shared, not what they say."""
    weights = [layer.shares for layer in trace.layers]
    return _by_field(trace, share_down(trace.layers, weights, classes)[0])


def votes(trace: Trace, classes: Tensor) -> Tensor:
    """Coefficient times the length of the vote."""
    _check_linear(trace, votes)
    weights = [
        layer.shares * layer.votes(below).norm(dim=-1)
        for layer, below in zip(trace.layers, _held_poses(trace), strict=False)
    ]
    return _by_field(trace, share_down(trace.layers, weights, classes)[0])


def agreeing_votes(trace: Trace, classes: Tensor) -> Tensor:
    """Coefficient times the length of the vote along its parent's pose, where it agrees."""
    _check_linear(trace, agreeing_votes)
    poses = _held_poses(trace)
    weights = [
        layer.shares * along(layer, layer.votes(below), above).clamp_min(0.0)
        for layer, below, above in zip(trace.layers, poses, poses[1:], strict=False)
    ]
    return _by_field(trace, share_down(trace.layers, weights, classes)[0])


def helpful_links(trace: Trace, classes: Tensor) -> Tensor:
    """As `fields`, but links that speak against the class are dropped layer by layer."""
    _check_linear(trace, helpful_links)
    weights = [links.clamp_min(0.0) for links in follow(trace, classes).links]
    return _by_field(trace, share_down(trace.layers, weights, classes)[0])


ROUTING_MAPS: dict[str, Map] = {
    map_.__name__: map_
    for map_ in (
        contrast,
        contribution,
        contribution_by_pixel,
        fields,
        helpful_links,
        agreeing_votes,
        votes,
        coefficients,
    )
}
"""Those compared on overlapping digits, where `grid` would be `fields` by another name."""
MAPS: dict[str, Map] = {**ROUTING_MAPS, "grid": grid}
EM_MAPS = ("fields", "grid", "coefficients")
"""All that an EM model has: what its votes say does not add up to a score."""
DEFAULT_MAP = "contrast"


def default_map(model: CapsuleClassifier) -> str:
    """`grid` where primary capsules see more than half of the image, else the best there is.

    For EM, whose scores are no sum of what pixels gave, that is `fields`.
    """
    if primary_fields(model).see_most(model.image_size):
        return "grid"
    return "fields" if isinstance(model, EMCapsNet) else DEFAULT_MAP


def _check_linear(trace: Trace, map_: Map) -> None:
    if not trace.is_linear:
        raise ValueError(
            f"`map` must be one of {', '.join(EM_MAPS)} for an EM model, whose scores are no sum "
            f"of votes, got {map_.__name__!r}"
        )


def _pixel_parts(trace: Trace, classes: Tensor) -> Tensor:
    pixels = follow(trace, classes).pixels
    assert pixels is not None  # of a linear model they are known
    return pixels


def _held_poses(trace: Trace) -> list[Tensor]:
    return [poses.detach() for poses in trace.rebuilt.poses]


def _by_field(trace: Trace, primary: Tensor) -> Tensor:
    """(B, H, W, capsules) of the primary layer to pixels; opposite parts cancel first."""
    spread = primary_fields(trace.model).spread(primary.sum(dim=-1), trace.model.image_size)
    return spread.clamp_min(0.0).detach()


def _smooth(parts: Tensor) -> Tensor:
    around = max(parts.shape[1:]) // SMOOTHING
    return F.avg_pool2d(parts[:, None], 2 * around + 1, 1, around)[:, 0].clamp_min(0.0)


def gradient_maps(model: ImageClassifier, images: Tensor, classes: Tensor) -> dict[str, Tensor]:
    """The baselines, which know nothing of capsules: ∂score/∂pixel, routing and all."""
    pixels = model.prepare(images).detach().requires_grad_()
    with torch.enable_grad():
        scores = model.compute_scores(pixels)
        score, ahead = scores.gather(1, classes[:, None]).sum(), margins(scores, classes).sum()
        (slope,) = torch.autograd.grad(score, pixels, retain_graph=True)
        (slope_ahead,) = torch.autograd.grad(ahead, pixels)
    product = (slope * pixels.detach()).sum(dim=1)
    return {
        "gradient": slope.abs().sum(dim=1),
        "gradient_times_input": product.abs(),
        "gradient_times_input_positive": product.clamp_min(0.0),
        "gradient_times_input_smoothed": _smooth(product),
        "gradient_times_input_contrast": _smooth((slope_ahead * pixels.detach()).sum(dim=1)),
    }

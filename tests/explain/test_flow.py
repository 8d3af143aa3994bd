"""The routing followed down: against the model, against sums, against plain loops."""

import pytest
import torch
from explained_models import FAMILIES, LINEAR, images, make

from capsroute.explain.fields import primary_fields
from capsroute.explain.flow import follow, follow_margin, margins, share_down, sum_over_parents
from capsroute.explain.heat import EM_MAPS, MAPS, ROUTING_MAPS, gradient_maps, grid
from capsroute.explain.trace import trace


@pytest.mark.parametrize("family", LINEAR)
def test_held_routing_gives_the_models_scores(family):
    model = make(family)
    batch = images(model)
    traced = trace(model, batch)
    with torch.no_grad():
        expected = model(batch)
    torch.testing.assert_close(traced.rebuilt.scores.detach(), expected, rtol=1e-4, atol=1e-4)


def biases_zeroed(family):
    model = make(family).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    return model


@pytest.mark.parametrize("family", LINEAR)
def test_without_biases_the_parts_add_up_to_the_score_in_every_layer(family):
    model = biases_zeroed(family)
    batch = images(model).double()
    classes = torch.tensor([1, 3])
    traced = trace(model, batch)
    flow = follow(traced, classes)
    score = traced.routing.scores.gather(1, classes[:, None])[:, 0]
    torch.testing.assert_close(flow.primary.sum(dim=(1, 2, 3)), score, rtol=1e-5, atol=1e-7)
    for links in flow.links:
        torch.testing.assert_close(links.flatten(1).sum(dim=1), score, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["inverted", "no_layer_norm", "dynamic"])
def test_without_biases_pixels_add_up_too(family):
    model = biases_zeroed(family)
    batch, classes = images(model).double(), torch.tensor([0, 2])
    traced = trace(model, batch)
    pixels = follow(traced, classes).pixels
    assert pixels is not None
    score = traced.routing.scores.gather(1, classes[:, None])[:, 0]
    if family == "dynamic":  # images are normalised, and the backbone's bias is zero
        assert traced.images.min() < 0
    torch.testing.assert_close(pixels.sum(dim=(1, 2)), score, rtol=1e-5, atol=1e-7)


def test_margins_are_over_the_strongest_other_class():
    scores = torch.tensor([[1.0, 4.0, 3.0], [1.0, 4.0, 3.0]])
    ahead = margins(scores, torch.tensor([1, 0]))
    torch.testing.assert_close(ahead, torch.tensor([1.0, -3.0]))
    torch.testing.assert_close(margins(scores[:, :1], torch.tensor([0, 0])), scores[:, 0])


@pytest.mark.parametrize("family", ["inverted", "no_layer_norm", "dynamic"])
def test_a_margins_parts_add_up_whatever_the_classes_have_in_common(family):
    model = biases_zeroed(family)
    if family == "inverted":  # shared by all class capsules
        with torch.no_grad():
            model.classifier.bias.fill_(3.0)
            model.capsules.layers[-1].norm.bias.fill_(0.5)
    batch, classes = images(model).double(), torch.tensor([0, 2])
    traced = trace(model, batch)
    with torch.no_grad():
        ahead = margins(model(batch), classes)
    parts = follow_margin(traced, classes)
    torch.testing.assert_close(parts.sum(dim=(1, 2)), ahead, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", LINEAR)
def test_a_margins_parts_are_those_of_two_scores(family):
    model = make(family).double()
    traced = trace(model, images(model).double())
    best, second = traced.routing.scores.topk(2, dim=1).indices.T
    ours, others = (follow(traced, classes).pixels for classes in (best, second))
    torch.testing.assert_close(follow_margin(traced, best), ours - others, rtol=1e-5, atol=1e-9)


def test_the_two_strongest_classes_contrast_shares_no_pixel():
    model = make("inverted")
    traced = trace(model, images(model))
    first, second = (
        MAPS["contrast"](traced, classes) for classes in traced.routing.scores.topk(2).indices.T
    )
    assert (first > 0).any() and (second > 0).any()
    assert not ((first > 0) & (second > 0)).any()


def test_without_another_class_contrast_is_contribution():
    model = make("inverted", num_classes=1)
    traced, only = trace(model, images(model)), torch.tensor([0, 0])
    expected = MAPS["contribution"](traced, only)
    torch.testing.assert_close(MAPS["contrast"](traced, only), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_child_has_what_its_links_carry(family):
    model = make(family)
    traced = trace(model, images(model))
    flow = follow(traced, torch.tensor([0, 1]))
    carried = sum_over_parents(traced.layers[0], flow.links[0])
    torch.testing.assert_close(carried, flow.primary, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_used_coefficients_are_followed(family):
    model = make(family)
    traced = trace(model, images(model))
    routing = traced.routing
    for index, layer in enumerate(traced.layers):
        used = routing.coefficients[index][routing.used[index]]
        torch.testing.assert_close(layer.coefficients, used)


def slow_share_down(layers, weights, cls):
    """`share_down` of one image as loops."""
    got = {(0, 0, cls): 1.0}
    for layer, weight in zip(reversed(layers), reversed(weights), strict=True):
        below: dict[tuple[int, int, int], float] = {}
        for (row, column, parent), amount in got.items():
            children = {}
            if layer.linear:
                for index in range(weight.shape[0]):
                    position, capsule = divmod(index, layer.children[2])
                    where = (*divmod(position, layer.children[1]), capsule)
                    children[where] = weight[index, parent].item()
            else:
                for y in range(layer.kernel):
                    for x in range(layer.kernel):
                        for capsule in range(layer.children[2]):
                            where = (row * layer.stride + y, column * layer.stride + x, capsule)
                            children[where] = weight[row, column, y, x, capsule, parent].item()
            total = sum(children.values())
            for where, value in children.items():
                below[where] = below.get(where, 0.0) + amount * value / total
        got = below
    return got


@pytest.mark.parametrize("family", ["inverted_linear", "em"])
def test_sharing_down_against_loops(family):
    model = make(family).double()
    traced = trace(model, images(model, 1).double())
    weights = [layer.shares for layer in traced.layers]
    primary = share_down(traced.layers, weights, torch.tensor([2]))[0][0]
    assert primary.sum().item() == pytest.approx(1)
    expected = slow_share_down(traced.layers, [weight[0] for weight in weights], 2)
    for where, value in expected.items():
        assert primary[where].item() == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_maps_are_heat(family):
    model = make(family)
    batch = images(model)
    traced, classes = trace(model, batch), torch.tensor([0, 1])
    for name in EM_MAPS if family == "em" else MAPS:
        heat = MAPS[name](traced, classes)
        assert heat.shape == (2, *model.image_size) and not heat.requires_grad
        assert heat.isfinite().all() and (heat >= 0).all() and heat.sum() > 0, name


def test_uniform_routing_makes_the_coefficients_map_the_same_for_every_class():
    model = make("inverted", iterations=1)
    traced = trace(model, images(model))
    first, second = (
        ROUTING_MAPS["coefficients"](traced, torch.tensor(classes)) for classes in ([0, 0], [5, 7])
    )
    torch.testing.assert_close(first, second)
    votes = [ROUTING_MAPS["votes"](traced, torch.tensor([index, index])) for index in (0, 5)]
    assert not torch.allclose(*votes)


def test_the_gradient_baseline_is_the_gradient():
    model = make("inverted")
    batch = images(model, 1).requires_grad_()
    (slope,) = torch.autograd.grad(model(batch)[0, 3], batch)
    maps = gradient_maps(model, batch.detach(), torch.tensor([3]))
    torch.testing.assert_close(maps["gradient"], slope.abs()[:, 0])
    product = (slope * batch.detach())[:, 0]
    torch.testing.assert_close(maps["gradient_times_input"], product.abs())
    torch.testing.assert_close(maps["gradient_times_input_positive"], product.clamp_min(0))
    (slope,) = torch.autograd.grad(margins(model(batch), torch.tensor([3])), batch)
    product = (slope * batch.detach())[:, 0]
    smooth = torch.nn.functional.avg_pool2d(product, 3, 1, 1).clamp_min(0)  # 24 pixels wide
    torch.testing.assert_close(maps["gradient_times_input_contrast"], smooth)


@pytest.mark.parametrize("family", LINEAR)
def test_the_grid_is_what_each_place_gave_and_adds_up(family):
    """To the score, before what speaks against the class is cut off."""
    model = biases_zeroed(family)
    batch, classes = images(model).double(), torch.tensor([1, 3])
    traced = trace(model, batch)
    places = follow(traced, classes).primary.sum(dim=-1)
    laid = primary_fields(model).interpolate(places, model.image_size)
    score = traced.routing.scores.gather(1, classes[:, None])[:, 0]
    torch.testing.assert_close(laid.sum(dim=(1, 2)), score, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(grid(traced, classes), laid.clamp_min(0))


def test_a_cnn_is_refused_in_one_line():
    import capsroute

    model = capsroute.create_model("cnn_cifar10")
    with pytest.raises(TypeError, match="got cnn_cifar10: it has no capsules; choose an inverted"):
        trace(model, torch.rand(1, 3, 32, 32))

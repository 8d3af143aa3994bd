"""The paper's ablations A, B and C: what each preset's model does, not which flags it sets."""

from importlib.resources import files

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from capsroute import create_model
from capsroute.experiments import preset
from capsroute.layers.primary import PoseNorm

SIZE = 20  # for speed
FULL_SIZE = 32


def build(letter, iterations, image_size=SIZE):
    """The preset's model in float64, always with the same numbers where names agree."""
    ablation = f"_{letter}" if letter else ""
    config = preset(f"inverted_simple_cifar10{ablation}_r{iterations}").config.model
    torch.manual_seed(0)
    return create_model(config.model, image_size=image_size, **config.options()).double()


def noise(size=SIZE):
    return torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(1)).double()


def digits(size=SIZE):
    """The pictures that ship with the package."""
    paths = sorted(files("capsroute.data").joinpath("samples").glob("*.png"))
    pictures = [Image.open(path).convert("RGB").resize((size, size)) for path in paths]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).double() / 255


IMAGES = {"noise": noise, "digits": digits}


def pose_norms(module):
    return [part for part in module.modules() if isinstance(part, PoseNorm)]


def activations(model, images):
    """Of the primary capsules, then of every routed layer after every iteration."""
    with torch.no_grad():
        primary = model.primary(model.backbone(model.prepare(images)))
        _, history = model.capsules.route(primary)
    routed = [capsules for layer in history.poses for capsules in layer]
    return [capsules.log_activations.exp() for capsules in (primary, *routed)]


def beta_gradients(model, images):
    F.cross_entropy(model(images), torch.arange(len(images))).backward()
    return [(layer.beta_u.grad, layer.beta_a.grad) for layer in model.capsules.layers]


def test_a_routes_without_layer_norm():
    full, ablated = build("", 3), build("a", 3)
    assert len(pose_norms(full.capsules)) == 3 and not pose_norms(ablated.capsules)
    assert pose_norms(ablated.primary)  # not part of the routing
    lengths = ablated.capsules(ablated.primary(ablated.backbone(noise()))).norm(dim=-1)
    assert (lengths - 4.0).abs().min() > 0.1  # that of 16 normalised elements


@pytest.mark.parametrize("iterations", [1, 3])
def test_b_finishes_a_layer_before_the_next(iterations):
    full, ablated = build("", iterations), build("b", iterations)
    ablated.load_state_dict(full.state_dict())
    with torch.no_grad():
        difference = (full(noise()) - ablated(noise())).abs().max()
    assert difference == 0 if iterations == 1 else difference > 1e-3


@pytest.mark.parametrize("iterations", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("images", IMAGES)
def test_c_starts_with_undecided_activations_in_every_layer(images, iterations):
    for layer in activations(build("c", iterations), IMAGES[images]()):
        assert 0.4 < layer.mean() < 0.6
        assert layer.min() > 0.01 and layer.max() < 0.99


@pytest.mark.parametrize("images", IMAGES)
def test_c_starts_with_betas_that_can_learn(images):
    # a class has 80 children of its own at this size, and 13 at the smaller one
    model = build("c", 2, FULL_SIZE)
    for beta_u, beta_a in beta_gradients(model, IMAGES[images](FULL_SIZE)):
        assert beta_u.abs().max() > 1e-3
        assert beta_a.abs().max() > 1e-4


def test_c_is_not_decided_by_weight_decay():
    """The paper's recipe shrinks transforms to a twentieth and gains to a quarter."""
    model = build("c", 2)
    with torch.no_grad():
        for layer in model.capsules.layers:
            layer.weight.mul_(0.05)
        for norm in pose_norms(model):
            norm.weight.mul_(0.25)
    for layer in activations(model, digits()):
        assert layer.max() < 0.99
    for beta_u, beta_a in beta_gradients(model, digits()):
        assert beta_u.abs().max() > 1e-4
        assert beta_a.abs().max() > 1e-5


def test_c_scores_a_class_by_its_pose_and_its_activation():
    model = build("c", 2)
    with torch.no_grad():
        model.capsules.layers[-1].beta_a[0] = -1e4
        inactive = model(digits())
        torch.testing.assert_close(inactive[:, 0], model.classifier.bias.expand(3))
        assert inactive[:, 1:].std() > 1e-3
        before = inactive[:, 1:].clone()
        model.capsules.layers[-1].beta_a[1:] = 1e4
        active = model(digits())[:, 1:]
    bias = model.classifier.bias.detach()
    shares = (before - bias) / (active - bias)
    assert (shares > 0.4).all() and (shares < 0.6).all()


@pytest.mark.parametrize("name", ["inverted_simple_cifar100", "inverted_small_multimnist"])
def test_other_models_start_with_undecided_activations_too(name):
    torch.manual_seed(0)
    model = create_model(name, image_size=SIZE, activations=True).double()
    images = digits()[:, : model.in_channels]
    for layer in activations(model, images):
        assert 0.1 < layer.mean() < 0.9

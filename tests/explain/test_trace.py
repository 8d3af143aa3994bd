"""Which models and layers can be traced, and what is said of the others."""

import pytest
import torch
from explained_models import images, make
from torch import nn

from capsroute import create_model
from capsroute.explain.trace import trace
from capsroute.layers import CapsuleStack, LinearCaps
from capsroute.models import CapsuleClassifier, Task


class Halved(nn.Module):
    """A layer of one's own around `LinearCaps`; it tells no transforms."""

    def __init__(self, inner: LinearCaps) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, children, parents, *, return_coefficients=False):
        poses, shares = self.inner(children, parents, return_coefficients=True)
        poses = self.change(poses)
        return (poses, shares) if return_coefficients else poses

    def change(self, poses):
        return poses / 2


class Telling(Halved):
    @property
    def weight(self):
        return self.inner.weight

    @property
    def norm(self):
        return self.inner.norm


class Turned(Telling):
    """Tells its transforms, and not that poses are turned around after the votes are summed."""

    def change(self, poses):
        return poses.roll(1, dims=-1)


def with_last_layer(kind):
    model = make("inverted")
    *below, last = model.capsules.layers
    model.capsules = CapsuleStack([*below, kind(last)], iterations=model.iterations)
    return model


def test_a_layer_of_ones_own_that_keeps_to_the_form():
    model = with_last_layer(Telling)
    result = trace(model, images(model))
    with torch.no_grad():
        torch.testing.assert_close(result.rebuilt.scores, model(images(model)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Halved, "a Halved: its transforms must be its `weight`"),
        (Turned, "a Turned: its poses must be the sum of its children's votes"),
    ],
)
def test_layers_that_do_not_are_refused_in_one_line(kind, message):
    model = with_last_layer(kind)
    with pytest.raises(TypeError, match=message) as caught:
        trace(model, images(model))
    assert "\n" not in str(caught.value)


def test_models_that_cannot_be_traced_are_told_apart():
    own = CapsuleClassifier(Task(3, 8, 1))
    with pytest.raises(TypeError, match=r"inverted, dynamic or EM model .* CapsuleClassifier: how"):
        trace(own, torch.rand(1, 1, 8, 8))
    plain = create_model("cnn_cifar10")
    with pytest.raises(TypeError, match="got cnn_cifar10: it has no capsules"):
        trace(plain, torch.rand(1, 3, 32, 32))

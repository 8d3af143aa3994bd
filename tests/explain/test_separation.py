"""The measure itself, on heat whose separation is known."""

import pytest
import torch

import capsroute
from capsroute.data import DiverseMultiMNIST, load_mnist
from capsroute.explain.separation import Pairs, _own_share, measure_separation, two_digit_images


@pytest.fixture(scope="module")
def pairs():
    return two_digit_images(12)


def test_images_are_the_sum_of_their_digits(pairs):
    assert pairs.images.shape == (12, 1, 36, 36) and pairs.digits.shape == (12, 2, 36, 36)
    total = pairs.digits.int().sum(dim=1).clamp_max(255).float() / 255
    torch.testing.assert_close(pairs.images[:, 0], total)
    assert (pairs.classes[:, 0] != pairs.classes[:, 1]).all()


def test_classes_belong_to_their_digits(pairs):
    """Each placed digit is a test digit of its class, found again pixel by pixel."""
    arrays = load_mnist()
    for index in range(3):
        for which in range(2):
            rows, columns = pairs.digits[index, which].nonzero().T
            cut = pairs.digits[index, which][
                rows.min() : rows.max() + 1, columns.min() : columns.max() + 1
            ]
            same_class = arrays.test_images[arrays.test_labels == pairs.classes[index, which]]
            windows = same_class.unfold(1, cut.shape[0], 1).unfold(2, cut.shape[1], 1)
            found = (windows == cut).all(dim=-1).all(dim=-1).flatten(1).any(dim=1)
            assert found.any()


def test_the_share_of_known_heat(pairs):
    own, other = pairs.digits[:, 0] > 0, pairs.digits[:, 1] > 0
    perfect = _own_share((own & ~other).float(), own, other)
    torch.testing.assert_close(perfect, torch.ones(12, dtype=torch.float64))
    assert (_own_share(other.float(), own, other) == 0).all()
    nothing = torch.zeros(12, 36, 36)
    assert (_own_share(nothing, own, other) == 0.5).all()
    # heat that ignores the class: one digit's gain is the other's loss
    anything = torch.rand(12, 36, 36)
    both = _own_share(anything, own, other) + _own_share(anything, other, own)
    torch.testing.assert_close(both, torch.ones(12, dtype=torch.float64))


def test_uniform_routing_is_at_chance_by_its_coefficients(pairs):
    torch.manual_seed(0)
    model = capsroute.create_model("inverted_small_multimnist", iterations=1).eval()
    separations, right = measure_separation(model, pairs)
    assert separations["coefficients"].share == pytest.approx(0.5, abs=1e-6)
    assert 0 <= right <= 100
    for value in separations.values():
        assert 0 < value.share < 1 and value.error >= 0
    assert {"gradient", "gradient_times_input", "contrast"} <= set(separations)


def test_an_em_model_is_measured_by_the_maps_it_has(pairs):
    torch.manual_seed(0)
    model = capsroute.create_model("em_simple_cifar10", image_size=36, in_channels=1).eval()
    two = Pairs(pairs.images[:2], pairs.classes[:2], pairs.digits[:2])
    separations, _ = measure_separation(model, two)
    routing_maps = {name for name in separations if not name.startswith("gradient")}
    assert routing_maps == {"fields", "coefficients"} and len(separations) == 7


def test_choosing_and_reporting_use_other_images():
    chosen = two_digit_images(5, split="choice")
    assert not torch.equal(chosen.images, two_digit_images(5).images)
    with pytest.raises(ValueError, match="`count` must be at least 1"):
        two_digit_images(0)
    with pytest.raises(ValueError, match="`count` must be at most 8"):
        two_digit_images(10_000)


def test_the_images_are_those_that_every_run_is_measured_on(pairs):
    arrays = load_mnist()
    source = DiverseMultiMNIST.from_digits(arrays.test_images, arrays.test_labels)
    images, targets, _ = source.fixed_set()
    rows = (targets.sum(dim=1) == 2).nonzero()[:12, 0]
    assert torch.equal(pairs.images, images[rows].float() / 255)
    found = torch.zeros(12, 10).scatter(1, pairs.classes, 1.0)
    assert torch.equal(found, targets[rows])

import pytest
import torch
from torch import nn

import capsroute
from capsroute.explain import explain
from capsroute.models.base import Task
from capsroute.models.inverted import Conv, InvertedCapsNet, Linear, Primary

LOGITS = torch.tensor([[-1.0, 2.0, 0.5], [-3.0, -1.0, -2.0]])


@pytest.mark.parametrize(
    ("multilabel", "answer"),
    [(False, [[0, 1, 0], [0, 1, 0]]), (True, [[0, 1, 1], [0, 0, 0]])],
)
def test_the_answer_is_one_class_or_a_set_that_may_be_empty(multilabel, answer):
    model = capsroute.create_model(
        "inverted_small_multimnist", num_classes=3, multilabel=multilabel
    )
    decided = model.decide(LOGITS)
    assert decided.dtype == torch.bool and decided.tolist() == answer


def test_lengths_are_probabilities_already():
    model = capsroute.create_model("dynamic_vector_multimnist", num_classes=3)
    assert model.decide(torch.tensor([[0.4, 0.6, 0.9]])).tolist() == [[False, True, True]]


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32, torch.float64])
def test_images_of_any_precision_are_taken_in_the_models_own(own, given):
    torch.manual_seed(0)
    model = capsroute.create_model("inverted_small_multimnist", image_size=20).to(own).eval()
    images = torch.rand(2, 1, 20, 20).to(given)
    scores = model(images)
    assert scores.dtype == torch.promote_types(own, torch.float32)
    assert torch.equal(scores, model(images.to(own)))
    assert model.prepare(images).dtype == own
    assert model(images[:0]).dtype == scores.dtype


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_from_the_meta_device_normalises_once_it_has_weights(assign):
    model = capsroute.create_model("inverted_simple_cifar10", image_size=14).eval()
    with torch.device("meta"):
        empty = capsroute.create_model("inverted_simple_cifar10", image_size=14).eval()
    if not assign:
        empty.to_empty(device="cpu").normalize.std.fill_(torch.nan)  # what was there, at worst
    empty.load_state_dict(model.state_dict(), assign=assign)
    images = torch.rand(2, 3, 14, 14)
    assert torch.equal(empty(images), model(images))


CLASSES = 3
ROWS = [Primary(2), Conv(2), Linear(CLASSES)]


@pytest.mark.parametrize(
    ("backbone", "rows", "message"),
    [
        (nn.Conv2d(1, 8, 3), ROWS, "`backbone` cannot take a 3×9×9 image: .* to have 1 channels"),
        (nn.Conv2d(3, 8, 10), ROWS, r"`image_size` \(9×9\) is too small for the backbone"),
        (nn.AvgPool2d(10), ROWS, r"`image_size` \(9×9\) is too small for the backbone"),
        (nn.Flatten(), ROWS, r"`backbone` must return features \(B, C, H, W\), got \(1, 243\)"),
        (nn.Identity(), [], r"begin with a Primary and end with Linear\(3\), .* got \[\]"),
        (nn.Identity(), [Primary(2)], r"end with Linear\(3\), .* got \[Primary"),
        (nn.Identity(), [Primary(2), Linear(4)], r"end with Linear\(3\), .* Linear\(capsules=4\)"),
        (nn.Identity(), [Primary(2), Conv(CLASSES)], r"end with Linear\(3\)"),
        (nn.Identity(), [Conv(2), Linear(CLASSES)], "begin with a Primary"),
    ],
)
def test_backbones_and_rows_that_do_not_fit_are_told_in_one_line(backbone, rows, message):
    with pytest.raises(ValueError, match=message) as caught:
        InvertedCapsNet(Task(CLASSES, 9, 3, iterations=2), backbone, rows, pose_dim=4)
    assert "\n" not in str(caught.value)


def test_primary_capsules_of_ones_own():
    """Any module from features to poses, whatever ours are told besides."""

    class Negated(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, features):
            return -self.inner(features)

    torch.manual_seed(0)
    model = capsroute.create_model("inverted_small_multimnist", image_size=20).eval()
    images = torch.rand(2, 1, 20, 20)
    model.primary = Negated(model.primary)
    torch.testing.assert_close(model(images), model.route(images).scores)
    with pytest.raises(TypeError, match="cannot be explained with a Negated"):
        explain(model, images[0])

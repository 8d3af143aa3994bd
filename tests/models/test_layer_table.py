"""A model as the rows of an appendix table: what no count of parameters tells apart."""

import copy

import pytest
import torch

from capsroute import create_model
from capsroute.models.layer_table import layer_rows


@pytest.mark.parametrize(
    ("name", "row", "operation", "output"),
    [
        ("em_simple_cifar10", 0, "4x4 conv, stride=2, padding=1\nBatch Norm\nReLU", "16x16x256"),
        ("em_simple_cifar100", 0, "4x4 conv, stride=2, padding=1\nBatch Norm\nReLU", "16x16x256"),
        ("cnn_cifar10", 2, "2x2 average pooling, padding=0", "4x4x1024"),
        ("cnn_cifar100", 2, "2x2 average pooling, padding=0", "4x4x1024"),
        ("resnet18_cifar10", -4, "512-dim. residual building block, stride=1", "4x4x512"),
        ("resnet18_cifar100", -4, "512-dim. residual building block, stride=1", "4x4x512"),
    ],
)
def test_rows_of_the_paper(name, row, operation, output):
    described = layer_rows(create_model(name))[row]
    assert described.operation.endswith(operation) and described.output == output


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        ({}, ["7x7x32x4x4", "5x5x32x4x4", "10x4x4"]),
        (
            {"activations": True},
            ["7x7x32x4x4\n&\n7x7x32", "5x5x32x4x4\n&\n5x5x32", "10x4x4\n&\n10"],
        ),
    ],
)
def test_a_routed_row_tells_its_capsules_and_no_coefficients(options, outputs):
    rows = layer_rows(create_model("inverted_simple_cifar10", **options))
    assert [row.output for row in rows if "Attention Routing" in row.operation] == outputs


def test_mixed_windows_are_told_and_leave_the_stride_as_it_was():
    rows = layer_rows(create_model("inverted_simple_cifar10", windows="mixed"))
    told = [row.operation for row in rows if row.operation.startswith("Conv Inverted")]
    assert [text.partition("conv, ")[2] for text in told] == [
        "stride=2, mixed windows\nLayer Norm",
        "stride=1, mixed windows\nLayer Norm",
    ]


def test_a_model_is_left_as_it_was():
    model = create_model("em_simple_cifar10").train()
    model.primary.eval()
    before = copy.deepcopy(model.state_dict())
    layer_rows(model)
    assert model.training and model.backbone.training and not model.primary.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())

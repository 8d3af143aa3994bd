"""tools/gradient_rounding.py: errors of the parts that are rounded, and of no others."""

import pytest
import torch

from capsroute import create_model
from capsroute.train.config import OptimConfig
from capsroute.train.step import choose_loss
from load_tool import load_tool


@pytest.fixture
def tool():
    return load_tool("gradient_rounding")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return create_model("inverted_simple_cifar10", image_size=16, iterations=2).train()


@pytest.fixture
def batches():
    torch.manual_seed(1)
    return [(torch.rand(4, 3, 16, 16), torch.randint(10, (4,))) for _ in range(3)]


def test_rounding_is_of_the_parts_named(tool, model, batches):
    images = batches[0][0]
    with tool.rounding(model, ("backbone",)):
        features = model.backbone(images)
        assert features.dtype == torch.bfloat16
        assert model.primary(features, finish=False).dtype == torch.float32
    with tool.rounding(model, ("primary",)):
        assert model.backbone(images).dtype == torch.float32
        assert model.primary(features, finish=False).dtype == torch.bfloat16
    plain = model(images)
    with tool.rounding(model, ()):
        torch.testing.assert_close(model(images), plain)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(images)
    with tool.rounding(model, tool.ROUNDED["everything"]):
        rounded = model(images)
    torch.testing.assert_close(rounded, expected, rtol=0.02, atol=0.02)


def test_what_is_compared(tool, model, batches):
    found = tool.compare(model, choose_loss(OptimConfig(), model), batches)
    assert list(found) == [*tool.ROUNDED, "other images"]
    for name in tool.ROUNDED:
        assert all(0 < found[name][part]["error"] < 0.3 for part in tool.PARTS)
        assert all(0.8 < found[name][part]["along"] < 1.2 for part in tool.PARTS)
    assert found["other images"]["backbone"]["error"] > 0.5
    exact = {part: torch.tensor([3.0, 4.0]) for part in tool.PARTS}
    other = {part: torch.tensor([3.0, 0.0]) for part in tool.PARTS}
    relative = tool._relative([other], [exact])["primary"]
    assert relative == pytest.approx({"error": 0.8, "along": 9 / 25})

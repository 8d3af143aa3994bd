"""tools/batch_norm_statistics.py: statistics that are averages, and the weights left alone."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

TOOL = Path(__file__).parents[2] / "tools" / "batch_norm_statistics.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("batch_norm_statistics", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_statistics_are_averages_over_the_batches(tool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1))
    model[1].running_mean.fill_(99)
    before = [parameter.clone() for parameter in model.parameters()]
    batches = [torch.randn(5, 3, 4, 4) + step for step in range(3)]
    assert tool.take_statistics(model, lambda step: (batches[step], None), 3) == 1
    means = torch.stack([batch.mean((0, 2, 3)) for batch in batches]).mean(0)
    variances = torch.stack([batch.var((0, 2, 3)) for batch in batches]).mean(0)
    torch.testing.assert_close(model[1].running_mean, means)
    torch.testing.assert_close(model[1].running_var, variances)
    assert not model[0].training  # dropout would have changed them
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))

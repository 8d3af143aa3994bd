"""tools/batch_norm_statistics.py: statistics that are averages, and the weights left alone."""

import pytest
import torch
from torch import nn

from capsroute import create_model
from capsroute.data import TrainBatches, load_dataset
from capsroute.models import save_model
from load_tool import load_tool


@pytest.fixture
def tool():
    return load_tool("batch_norm_statistics")


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


def test_statistics_of_a_run_with_groups(tool, tmp_path):
    """The paper's recipe: BatchNorm by groups of 16, here of 4, whose statistics are replaced."""
    torch.manual_seed(0)
    grouped = create_model("inverted_resnet_cifar10", image_size=16, bn_group=4)
    save_model(grouped, tmp_path / "model.safetensors")
    model = tool.with_plain_norms(tmp_path / "model.safetensors")
    images = torch.rand(8, 3, 16, 16)
    assert tool.take_statistics(model, lambda step: (images, None), 1) > 10
    first = model.backbone[0](model.normalize(images))
    torch.testing.assert_close(model.backbone[1].running_mean, first.mean((0, 2, 3)))


def test_digits_are_not_augmented(tool):
    """A mirrored or cropped digit is none that the model was trained on."""
    data = load_dataset("diverse_multimnist")
    images, targets = tool.training_batches(data, torch.device("cpu")).batch(0)
    expected, labels = TrainBatches(data.train, tool.BATCH).batch(0)
    assert torch.equal(images, expected) and torch.equal(targets, labels)


@pytest.mark.parametrize(
    "name", ["batch_norm_statistics", "gradient_rounding", "pose_movement", "sharper_routing"]
)
def test_a_misspelt_model_is_one_line(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [f"{name}.py", "inverted_smal_multimnist"])
    with pytest.raises(SystemExit) as ended:
        load_tool(name).main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and "did you mean 'inverted_small_multimnist'?" in last

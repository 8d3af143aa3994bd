"""What a run starts from."""

from dataclasses import replace

import pytest
import torch

from capsroute import create_model
from capsroute.models import save_model
from capsroute.train.build import model_to_start_from, start_from_pretrained
from capsroute.train.config import ModelConfig

SMALL = "inverted_small_multimnist"


@pytest.fixture
def run(tmp_path):
    """The folder of a run on four classes."""
    model = create_model(SMALL, num_classes=4)
    save_model(model, tmp_path / "model.safetensors")
    return model, str(tmp_path)


def config(pretrained):
    return replace(ModelConfig(), model=SMALL, pretrained=pretrained)


def test_a_run_of_ones_own_is_a_start(run):
    trained, folder = run
    model = create_model(SMALL, num_classes=3)
    told = start_from_pretrained(model, config(folder))
    assert told == f"starting from the weights of {folder}; new: capsules.layers.1.weight"
    assert torch.equal(model.classifier.weight, trained.classifier.weight)
    assert model_to_start_from(folder, None) == SMALL


def test_a_name_of_weights_that_ship(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = start_from_pretrained(create_model(SMALL), config(SMALL))
    assert told == f"starting from the weights that ship for {SMALL}"
    assert model_to_start_from(SMALL, 4) == SMALL


def test_weights_of_another_model(run):
    _, folder = run
    with pytest.raises(ValueError, match="`pretrained` must hold weights of cnn_cifar10"):
        start_from_pretrained(create_model("cnn_cifar10"), config(folder))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("cnn_cifar10", "no weights ship for 'cnn_cifar10'; they ship for inverted_resnet_cifar10"),
        ("mine", r"mine: no such model; expected .*, or timm with a backbone; pretrained models: "),
    ],
)
def test_only_names_whose_weights_ship_are_suggested(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        model_to_start_from(source, None)
    assert "resnet18" not in str(caught.value) and "\n" not in str(caught.value)

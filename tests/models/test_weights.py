"""Weights on disk."""

import copy

import pytest
import torch
from torch import nn

import capsroute
from capsroute import create_model
from capsroute.inference import Predictor
from capsroute.models import registry
from capsroute.models.factory import load_model
from capsroute.models.weights import read_metadata, save_model


@pytest.fixture
def saved(tmp_path):
    model = create_model("inverted_small_multimnist", image_size=(28, 30), num_classes=3).eval()
    model.class_names = ["a", "b", "c"]
    path = tmp_path / "model.safetensors"
    save_model(model, path)
    return model, path


def test_a_file_describes_its_model(saved):
    model, path = saved
    again = load_model(path).eval()
    assert again.class_names == ["a", "b", "c"] and again.image_size == (28, 30)
    images = torch.rand(2, 1, 28, 30)
    assert torch.equal(again(images), model(images))
    metadata = read_metadata(path)
    assert metadata["model"] == "inverted_small_multimnist" and metadata["iterations"] == 2
    assert load_model(path, iterations=4).iterations == 4
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_compiled_model_is_written_as_it_is_without(saved, tmp_path):
    model, path = saved
    whole = torch.compile(model, backend="eager")
    part = copy.deepcopy(model)
    part.backbone = torch.compile(part.backbone, backend="eager")
    for compiled in (whole, part):
        save_model(compiled, tmp_path / "compiled.safetensors")
        assert (tmp_path / "compiled.safetensors").read_bytes() == path.read_bytes()


def test_tied_weights_are_written_under_each_of_their_names(saved, tmp_path):
    model, _ = saved
    model.primary.norm.weight = model.capsules.layers[0].norm.weight
    model.primary.norm.weight.data.uniform_()
    save_model(model, tmp_path / "tied.safetensors")
    again = load_model(tmp_path / "tied.safetensors")
    assert torch.equal(again.primary.norm.weight, model.primary.norm.weight)
    assert torch.equal(again.capsules.layers[0].norm.weight, model.primary.norm.weight)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), r"`model` must be a model of capsroute, got a Linear$"),
        (
            nn.DataParallel(create_model("inverted_small_multimnist")),
            r"got a DataParallel; pass its `\.module`",
        ),
    ],
)
def test_what_is_no_model_is_not_written(model, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        save_model(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_every_class_has_a_name_or_none(saved, tmp_path):
    model, _ = saved
    model.class_names = ["a", "b"]
    message = "`class_names` must name the 3 classes of inverted_small_multimnist, got 2"
    for use in (
        Predictor.from_model,
        lambda model: save_model(model, tmp_path / "two.safetensors"),
    ):
        with pytest.raises(ValueError, match=message):
            use(model)
    assert not (tmp_path / "two.safetensors").exists()


def test_files_that_do_not_fit_are_refused_in_one_line(saved, tmp_path):
    _, path = saved
    with pytest.raises(ValueError, match=r"no such model; .* did you mean '.*model.safetensors'"):
        load_model(tmp_path / "missing.safetensors")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="whole safetensors file"):
        load_model(broken)


def test_a_model_loads_by_whatever_the_commands_take(saved):
    model, path = saved
    for source in (path, str(path), path.parent, str(path.parent)):
        assert torch.equal(capsroute.load_model(source).classifier.weight, model.classifier.weight)
    shipped = capsroute.load_model("inverted_small_multimnist", iterations=4)
    expected = create_model("inverted_small_multimnist", pretrained=True, iterations=4)
    assert torch.equal(shipped.classifier.weight, expected.classifier.weight)


def test_sources_that_are_no_model(tmp_path):
    for source, message in (
        (tmp_path, "holds no model.safetensors; expected the folder of a run"),
        ("cnn_cifar10", "no weights ship for 'cnn_cifar10'"),
        ("inverted_smal_multimnist", "did you mean 'inverted_small_multimnist'"),
        (tmp_path / "a" / "b", "expected a run's folder, a checkpoint or a pretrained model"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load_model(source)
        assert "\n" not in str(caught.value)


def test_a_checkpoint_may_be_called_anything(saved, tmp_path):
    model, path = saved
    other = path.rename(tmp_path / "weights.bin")
    assert torch.equal(load_model(other).classifier.weight, model.classifier.weight)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gen.py", r"gen\.py is not a model; expected a run's folder, a checkpoint or"),
        (
            "model.onnx",
            r"model\.onnx is an exported file; expected a run's folder, a checkpoint or",
        ),
        ("model.pt2", r"model\.pt2 is an exported file; expected a run's folder"),
        ("model.safetensors", r"must be a whole safetensors file, got .*model\.safetensors: \w+"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"import torch"])
def test_files_of_other_kinds_are_told_by_what_they_are(tmp_path, name, message, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_model_that_nobody_registered_says_how_to(saved, monkeypatch):
    _, path = saved
    monkeypatch.delitem(registry._REGISTRY, "inverted_small_multimnist")
    with pytest.raises(ValueError, match=r"no imported module registers: .* --import MODULE"):
        load_model(path)

"""Exported files: they agree with the model, carry what they need, or are not there."""

import json
import re
import sys
import warnings
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

import capsroute
from capsroute.export import FORMATS, export_model, files, graph, load_exported
from capsroute.extras import install_hint
from capsroute.inference import Predictor
from capsroute.models.factory import load_model

SMALL = {"num_classes": 4, "in_channels": 1}
FAMILIES = {
    "inverted": ("inverted_small_multimnist", {"image_size": 24, "iterations": 3, **SMALL}),
    "vector": ("inverted_vector_multimnist", {"image_size": 16, "iterations": 2}),
    "activations": ("inverted_small_multimnist", {"image_size": 24, "activations": True, **SMALL}),
    "dynamic": ("dynamic_simple_cifar10", {"image_size": 20, "iterations": 3, **SMALL}),
    "em": ("em_simple_cifar10", {"image_size": 14, **SMALL}),
    "cnn": ("cnn_cifar10", {"image_size": 16, **SMALL}),
}
GRAPHS = ("onnx", "torch-export")


def make(family, **options):
    name, defaults = FAMILIES[family]
    torch.manual_seed(0)
    model = capsroute.create_model(name, **(defaults | options)).eval()
    if model.num_classes == 4:
        model.class_names = ["ant", "bee", "cat", "dog"]
    return model


def agree(model, path, *batches):
    _, run = load_exported(path)
    _, scores = files.load_scores(path)
    for batch in batches:
        images = torch.rand(batch, model.in_channels, *model.image_size)
        with torch.no_grad():
            expected = model(images)
        torch.testing.assert_close(scores(images), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(run(images), model.probabilities(expected), rtol=0, atol=1e-4)


@pytest.fixture(scope="module", params=GRAPHS)
def exported(request, tmp_path_factory):
    """A model, and a file of it in each form of a graph."""
    model = make("inverted", multilabel=True)
    path = tmp_path_factory.mktemp("exported") / f"model{FORMATS[request.param]}"
    model.resize = (30, 30)
    assert export_model(model, request.param, path) <= 1e-4
    return model, path


def test_a_graph_agrees_with_the_model_at_any_batch(exported):
    agree(*exported, 1, 7, 64)


@pytest.mark.slow
@pytest.mark.parametrize("to", GRAPHS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "inverted"])
def test_every_other_family_agrees(tmp_path, family, to):
    model = make(family)
    path = tmp_path / f"model{FORMATS[to]}"
    assert export_model(model, to, path) <= 1e-4
    agree(model, path, 1, 7, 64)


def test_a_predictor_needs_the_file_alone(exported):
    model, path = exported
    predictor = Predictor.load(path)
    ours = Predictor.from_model(model)
    assert predictor.description == ours.description and predictor.model is None
    pixels = np.random.default_rng(0).integers(0, 256, (3, 50, 40), dtype=np.uint8)
    pictures = [Image.fromarray(image) for image in pixels]
    answers, expected = predictor.predict(pictures), ours.predict(pictures)
    assert [answer.labels for answer in answers] == [answer.labels for answer in expected]
    with pytest.raises(ValueError, match="`iterations` must be 3 for"):
        Predictor.load(path, iterations=1)


def test_a_fixed_batch_is_filled_up(tmp_path):
    model = make("inverted", iterations=1)
    export_model(model, "torch-export", tmp_path / "model.pt2", batch=2)
    agree(model, tmp_path / "model.pt2", 5)


@pytest.mark.parametrize("exported", ["torch-export"], indirect=True)
def test_what_pytorch_2_11_warns_of_is_not_the_users_concern(exported, monkeypatch):
    load = torch.export.load

    def load_and_warn(*arguments, **options):
        warnings.warn("The given buffer is not writable, and PyTorch does not", stacklevel=2)
        return load(*arguments, **options)

    monkeypatch.setattr(torch.export, "load", load_and_warn)
    agree(*exported, 2)


@pytest.mark.parametrize("exported", ["onnx"], indirect=True)
def test_what_onnx_carries(exported):
    import onnx

    proto = onnx.load(exported[1])
    onnx.checker.check_model(proto)
    (entry,) = [entry for entry in proto.metadata_props if entry.key == "capsroute"]
    metadata = json.loads(entry.value)
    assert metadata["class_names"] == ["ant", "bee", "cat", "dog"]
    assert (metadata["image_size"], metadata["iterations"]) == ([24, 24], 3)
    (images,) = proto.graph.input
    assert images.name == "images" and images.type.tensor_type.shape.dim[0].dim_param
    assert {node.domain for node in proto.graph.node} == {""}  # no operator of our own


def test_safetensors_is_a_checkpoint(tmp_path):
    model = make("inverted")
    assert export_model(model, "safetensors", tmp_path / "model.safetensors") == 0
    loaded = load_model(tmp_path / "model.safetensors")
    assert loaded.class_names == model.class_names
    assert all(
        torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize("to", FORMATS)
def test_a_file_that_differs_is_not_written(tmp_path, monkeypatch, to):
    model = make("inverted")

    def off_by_a_little(path):
        return lambda images: model(images) + 2e-4

    monkeypatch.setattr(files, "_scores_of", off_by_a_little)
    monkeypatch.setattr(files, "onnx_bytes", lambda *_: b"")  # not what is tested here
    monkeypatch.setattr(files, "pt2_bytes", lambda *_: b"")
    path = tmp_path / f"model{FORMATS[to]}"
    path.write_text("the one before")
    with pytest.raises(ValueError, match=r"differs from the model by 0\.0002 at batch 1, more"):
        export_model(model, to, path)
    assert path.read_text() == "the one before" and list(tmp_path.iterdir()) == [path]


def test_scores_that_are_no_number_do_not_pass(tmp_path):
    model = make("inverted")
    with torch.no_grad():
        model.classifier.bias.fill_(torch.nan)
    with pytest.raises(ValueError, match="differs from the model by nan"):
        export_model(model, "safetensors", tmp_path / "model.safetensors")


def test_the_model_is_left_as_it_was(tmp_path):
    model = make("inverted", iterations=1).train()
    model.backbone.eval()  # frozen, as docs/fine-tuning.md does it
    export_model(model, "torch-export", tmp_path / "model.pt2", batch=1)
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not any(module.training for module in model.backbone.modules())


@pytest.mark.parametrize("to", ["torch-export", "safetensors"])
def test_a_compiled_model_is_exported(tmp_path, to):
    compiled = torch.compile(make("inverted", iterations=1), backend="eager")
    assert export_model(compiled, to, tmp_path / "model") < 1e-4


def test_wrong_arguments_are_one_line(tmp_path):
    model = make("inverted")
    with pytest.raises(ValueError, match="`to` must be one of onnx, torch-export"):
        export_model(model, "tflite", tmp_path / "x")
    with pytest.raises(ValueError, match="`batch` must be at least 1"):
        export_model(model, "onnx", tmp_path / "x.onnx", batch=0)


@pytest.mark.parametrize("to", FORMATS)
def test_half_precision_is_told_before_the_work(tmp_path, to):
    model = capsroute.create_model("inverted_small_multimnist", image_size=20).bfloat16()
    with pytest.raises(ValueError, match=r"`model` must be in float32 .* got torch\.bfloat16"):
        export_model(model, to, tmp_path / "model")
    assert not any(tmp_path.iterdir())


def test_without_onnx_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    told = f"needs onnx, which is not installed: {install_hint('export')}"
    with pytest.raises(ValueError, match=re.escape(told)):
        graph.check_usable("onnx")


def test_the_stages_are_told(tmp_path):
    told = []
    export_model(make("inverted"), "safetensors", tmp_path / "m.safetensors", tell=told.append)
    batches = ["1 image at a time", "7 images at a time", "64 images at a time"]
    compared = [f"comparing it with the model, {batch}" for batch in batches]
    assert told == ["making m.safetensors", *compared]


@pytest.mark.parametrize("name", ["broken.onnx", "broken.pt2"])
def test_broken_files_are_one_line(tmp_path, name):
    (tmp_path / name).write_bytes(b"not a model")
    with pytest.raises(ValueError, match="must be a whole file of `capsroute export`"):
        Predictor.load(tmp_path / name)


def test_an_archive_without_a_program_is_one_line_and_no_log(tmp_path, capfd):
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("file", "text")
    with pytest.raises(ValueError, match=r"other\.pt2 must be a whole file .*: PyTorch finds no"):
        load_exported(tmp_path / "other.pt2")
    assert capfd.readouterr() == ("", "")

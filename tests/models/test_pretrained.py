"""Weights inside the package: they load with no network and predict what they predicted."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from capsroute import create_model
from capsroute.data import load_dataset
from capsroute.models import model_info, pretrained
from capsroute.models.pretrained import (
    FILES,
    list_pretrained,
    load_backbone,
    pack,
    pretrained_path,
)
from capsroute.models.weights import load_model, load_tensors, read_metadata

SHIPPED = sorted(FILES.glob("*.safetensors"))
SAMPLES = Path(__file__).parent / "samples"
RESULTS = Path(__file__).parents[2] / "results"
TOOL = Path(__file__).parents[2] / "tools" / "ship_weights.py"
SMALL = "inverted_small_multimnist"


def sample_images(data, rows):
    """Test images: from the package, or else from a sheet that `tools/ship_weights.py` wrote."""
    sheet = SAMPLES / f"{data}.png"
    return (read_sheet(sheet) if sheet.exists() else load_dataset(data).test.images)[rows]


def read_sheet(path):
    """Images in rows of 20."""
    sheet = np.asarray(Image.open(path))
    height, width, channels = sheet.shape
    side = width // 20
    grid = sheet.reshape(height // side, side, 20, side, channels).transpose(0, 2, 4, 1, 3)
    return torch.from_numpy(grid.reshape(-1, channels, side, side))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_committed_predictions(path):
    sample = json.loads((SAMPLES / f"{path.stem}.json").read_text())
    model = load_model(path).eval()
    assert sample["data"] == model_info(model.name).dataset and sample["origin"]
    assert 100 <= len(sample["rows"]) <= 200
    with torch.no_grad():
        scores = model(sample_images(sample["data"], sample["rows"]) / 255.0)
    if model.task.multilabel:
        predicted = [row.nonzero().flatten().tolist() for row in model.probabilities(scores) > 0.5]
    else:
        predicted = scores.argmax(1).tolist()
    assert predicted == sample["predictions"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_has_a_card_and_is_what_its_name_says(path):
    card, metadata = path.with_suffix(".md").read_text(), read_metadata(path)
    name, iterations = metadata["model"], metadata["iterations"]
    assert path == pretrained_path(name, iterations)
    assert card.startswith(f"# {name}")
    for row in ("| data |", "| recipe |", "| accuracy of this file |", "| made with |"):
        assert row in card
    evidence = re.search(r"`results/(\w+/seed\d+)`", card)[1]
    summary = json.loads((RESULTS / evidence / "summary.json").read_text())
    assert (summary["model"], summary["iterations"]) == (name, iterations)
    assert f"| accuracy of the run | {summary['test_accuracy_last']:.2f} %" in card
    assert metadata["class_names"] and len(metadata["class_names"]) == 10 * 10 ** ("100" in name)
    for key, tensor in load_tensors(path).items():
        half = tensor.is_floating_point() and tensor.ndim > 1
        assert (tensor.dtype == torch.float16) == half, key


def test_what_ships_is_small_and_sampled():
    assert SMALL in list_pretrained()
    assert sum(path.stat().st_size for path in FILES.iterdir()) <= 16_000_000
    stems = {path.stem for path in SHIPPED}
    assert {path.stem for path in FILES.glob("*.md")} == stems
    assert {path.stem for path in SAMPLES.glob("*.json")} == stems


@pytest.mark.parametrize("iterations", [None, 1, 2, 4])
def test_create_model_loads_the_weights_of_its_iterations(iterations):
    model = create_model(SMALL, pretrained=True, iterations=iterations).eval()
    assert model.iterations == (iterations or 2) and model.class_names == list("0123456789")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    file = load_model(pretrained_path(SMALL, iterations)).eval()
    images = torch.rand(2, 1, 36, 36)
    with torch.no_grad():
        assert torch.equal(model(images), file(images))


def test_packing_keeps_scores_and_statistics(tmp_path):
    torch.manual_seed(0)
    model = create_model("inverted_resnet_cifar10").eval()
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(1e-9, 1e-7)  # half precision would make zeros of some
    path = pack(model, tmp_path)
    assert path == tmp_path / "inverted_resnet_cifar10_r2.safetensors"
    again = load_model(path).eval()
    for key, value in again.state_dict().items():
        original = model.state_dict()[key]
        assert value.dtype == original.dtype
        if value.ndim < 2:
            assert torch.equal(value, original), key
        else:  # rounded to 11 bits
            torch.testing.assert_close(value, original, rtol=2**-11, atol=2**-24)
    assert path.stat().st_size < 2.1 * model_info(model.name).parameters


def test_weights_too_large_for_half_precision_are_not_packed(tmp_path):
    model = create_model(SMALL)
    with torch.no_grad():
        next(model.parameters())[0, 0, 0, 0] = 1e6
    with pytest.raises(ValueError, match="must be finite in half precision"):
        pack(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_new_class_layer_on_shipped_weights():
    torch.manual_seed(0)
    model = create_model(SMALL, num_classes=3)
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    left = load_backbone(model, pretrained_path(SMALL))
    assert left == ["capsules.layers.1.weight"]
    shipped = load_tensors(pretrained_path(SMALL))
    for key, value in model.state_dict().items():
        expected = initial[key] if key in left else shipped[key].float()
        assert torch.equal(value, expected), key
    assert load_backbone(create_model(SMALL), pretrained_path(SMALL)) == []
    with pytest.raises(ValueError, match="must hold weights of cnn_multimnist"):
        load_backbone(create_model("cnn_multimnist"), pretrained_path(SMALL))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 3}, r"`num_classes` must be 10 .* got 3; `load_backbone` copies"),
        ({"image_size": (36, 40)}, r"`image_size` must be 36 .* got \(36, 40\)"),
        ({"in_channels": 3}, "`in_channels` must be 1 .* got 3"),
        ({"multilabel": False}, "`multilabel` must be True .* got False"),
        ({"iterations": 3}, "`iterations` must be one of 1, 2, 4 .* got 3"),
        ({"layer_norm": False}, "does not fit inverted_small_multimnist"),
    ],
)
def test_other_models_than_the_shipped_one(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        create_model(SMALL, pretrained=True, **options)
    assert "\n" not in str(caught.value)


def test_names_without_weights():
    with pytest.raises(ValueError, match=f"no weights ship for 'cnn_cifar10'; .* {SMALL}"):
        pretrained_path("cnn_cifar10")
    with pytest.raises(ValueError, match=f"'inverted_small'; did you mean '{SMALL}'"):
        pretrained_path("inverted_small")


def test_a_model_that_does_not_route_needs_no_number(monkeypatch, tmp_path):
    monkeypatch.setattr(pretrained, "FILES", tmp_path)
    model = create_model("resnet18_cifar10", image_size=16)
    path = pack(model, tmp_path)
    assert path.name == "resnet18_cifar10.safetensors"
    assert list_pretrained() == ["resnet18_cifar10"]
    assert pretrained_path("resnet18_cifar10") == path


def test_a_sheet_gives_back_its_images(tmp_path):
    spec = importlib.util.spec_from_file_location("ship_weights", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    images = torch.randint(256, (40, 3, 32, 32), dtype=torch.uint8)
    tool.write_sheet(images, tmp_path / "sheet.png")
    assert torch.equal(read_sheet(tmp_path / "sheet.png"), images)
    one_class = torch.tensor([[1.0, 0.9995], [0.2, 0.9]])
    assert tool.clear_cut(one_class, multilabel=False).tolist() == [1]
    several = torch.tensor([[3.0, -0.0005], [0.2, -0.9]])
    assert tool.clear_cut(several, multilabel=True).tolist() == [1]

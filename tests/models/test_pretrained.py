"""Weights inside the package: they load with no network and predict what they predicted."""

import json
import logging
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from capsroute import create_model, list_models
from capsroute.inference import Prediction, Predictor
from capsroute.models import model_info, pretrained
from capsroute.models.factory import load_backbone, load_model
from capsroute.models.pretrained import FILES, list_pretrained, pack
from capsroute.models.sources import pretrained_path
from capsroute.models.weights import load_tensors, read_metadata, save_model
from load_tool import load_tool
from shipped_samples import SAMPLES, read_sample, read_sheet, sample_pictures

SHIPPED = sorted(FILES.glob("*.safetensors"))
RESULTS = Path(__file__).parents[2] / "results"
PAGE = Path(__file__).parents[2] / "docs" / "pretrained.md"
SMALL = "inverted_small_multimnist"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_committed_predictions(path):
    """As a user gets them: weights by name, pictures brought to size as `predict` does."""
    sample, metadata = read_sample(path.stem), read_metadata(path)
    model = create_model(metadata["model"], pretrained=True, iterations=metadata["iterations"])
    predictor = Predictor.from_model(model, device="cpu")
    answers = predictor.predict(sample_pictures(sample), top_k=len(predictor.class_names))
    for image, answer in zip(sample["images"], answers, strict=True):
        known = image["probabilities"]
        for name, probability in answer.ranked:
            assert probability == pytest.approx(known.get(name, 0.0), abs=sample["tolerance"])
        if "too_close_to_call" not in image:
            assert set(answer.labels) == set(image["answer"]), image


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_sample_is_small_and_says_what_it_is(path):
    sample, metadata = read_sample(path.stem), read_metadata(path)
    images, names = sample["images"], metadata["class_names"]
    assert sample["data"] == model_info(metadata["model"]).dataset
    assert sample["origin"] and sample["tolerance"] <= 1e-3 and len(images) == 200
    assert len({image["row"] for image in images}) == 200
    assert sum("too_close_to_call" in image for image in images) <= 4
    right = sum(set(image["answer"]) == set(image["truth"]) for image in images)
    assert sample["accuracy"] == 100 * right / 200
    shown = Counter(name for image in images for name in image["truth"])
    if sample["rule"].endswith("of each class"):
        assert shown == dict.fromkeys(names, 200 // len(names))
        assert [image["truth"][0] for image in images] == sorted(shown.elements(), key=names.index)


def test_the_sample_of_cifar10_is_the_first_images_of_each_class():
    sample = read_sample("inverted_resnet_cifar10_r2")
    rows = [image["row"] for image in sample["images"]]
    assert sample["rule"] == "the first 20 test images of each class"
    for start in range(0, 200, 20):
        assert rows[start : start + 20] == sorted(rows[start : start + 20])
    # test image 0 is a cat, as everyone knows who has opened the file
    assert min(rows) == rows[60] == 0 and sample["images"][60]["truth"] == ["cat"]
    assert sample["accuracy"] >= 90


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
    shipped = {SMALL, "inverted_resnet_cifar10", "inverted_resnet_cifar100"}
    assert shipped <= set(list_pretrained())
    assert sum(path.stat().st_size for path in FILES.iterdir()) <= 16_000_000
    stems = {path.stem for path in SHIPPED}
    assert {path.stem for path in FILES.glob("*.md")} == stems
    assert {path.stem for path in SAMPLES.glob("*.json")} == stems
    cards = re.findall(r'--8<-- "src/capsroute/models/files/(\w+)\.md', PAGE.read_text())
    assert sorted(cards) == sorted(stems)


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
    left = load_backbone(model, SMALL)
    assert left == ["capsules.layers.1.weight"]
    shipped = load_tensors(pretrained_path(SMALL))
    for key, value in model.state_dict().items():
        expected = initial[key] if key in left else shipped[key].float()
        assert torch.equal(value, expected), key
    assert load_backbone(create_model(SMALL), pretrained_path(SMALL)) == []
    with pytest.raises(ValueError, match="must hold weights of cnn_multimnist"):
        load_backbone(create_model("cnn_multimnist"), pretrained_path(SMALL))


@pytest.mark.parametrize(
    ("name", "of_classes"),
    [
        (SMALL, ["capsules.layers.1.weight"]),
        ("dynamic_simple_cifar10", ["capsules.0.weight"]),
        ("em_simple_cifar10", ["weight", "beta_u", "beta_a"]),
        ("cnn_cifar10", ["weight", "bias"]),
    ],
)
def test_as_many_classes_of_other_names_get_a_new_class_layer(tmp_path, name, of_classes):
    trained, same, other = (create_model(name) for _ in range(3))
    letters = [chr(ord("a") + n) for n in range(10)]
    trained.class_names = same.class_names = letters
    other.class_names = [*letters[:-1], "another"]
    save_model(trained, tmp_path / "model.safetensors")
    assert load_backbone(same, tmp_path) == []
    initial = {key: value.clone() for key, value in other.state_dict().items()}
    left = load_backbone(other, tmp_path)
    assert [key[-len(end) :] for key, end in zip(left, of_classes, strict=True)] == of_classes
    for key, value in other.state_dict().items():
        expected = initial[key] if key in left else trained.state_dict()[key]
        assert torch.equal(value, expected), key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"image_size": (36, 40)},
            r"`image_size` must be 36 .* got \(36, 40\); `capsroute.models.load_backbone` copies",
        ),
        ({"iterations": 3}, "`iterations` must be one of 1, 2, 4 .* got 3"),
        ({"layer_norm": False}, "does not fit inverted_small_multimnist"),
        ({"layer_norm": False, "num_classes": 3}, "does not fit inverted_small_multimnist"),
    ],
)
def test_other_models_than_the_shipped_one(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        create_model(SMALL, pretrained=True, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [SMALL, "inverted_resnet_cifar10"])
def test_other_classes_have_a_new_class_layer_and_shipped_weights_below(name, caplog):
    with caplog.at_level(logging.INFO, logger="capsroute"):
        torch.manual_seed(0)
        model = create_model(name, pretrained=True, num_classes=3, multilabel=False)
    torch.manual_seed(0)
    initial = create_model(name, num_classes=3).state_dict()
    shipped = load_model(name).state_dict()
    new = f"capsules.layers.{len(model.capsules.layers) - 1}.weight"
    for key, value in model.state_dict().items():
        assert torch.equal(value, (initial if key == new else shipped)[key]), key
    assert caplog.messages == [f"{name}: loaded the weights that ship; new: {new}"]
    assert model.class_names is None and not model.task.multilabel


@pytest.mark.parametrize("classes", [10, 3])
def test_weights_of_grey_images_answer_the_same_in_colour(classes, caplog):
    with caplog.at_level(logging.INFO, logger="capsroute"):
        torch.manual_seed(0)
        colour = create_model(SMALL, pretrained=True, in_channels=3, num_classes=classes).eval()
    assert caplog.messages[0] == f"{SMALL}: weights spread over 3 channels: backbone.0.weight"
    torch.manual_seed(0)
    grey = create_model(SMALL, pretrained=True, num_classes=classes).eval()
    assert colour.class_names == grey.class_names
    new = {"backbone.0.weight", "capsules.layers.1.weight"}
    for key, value in colour.state_dict().items():
        assert key in new or torch.equal(value, grey.state_dict()[key]), key
    grey.capsules.layers[1].load_state_dict(colour.capsules.layers[1].state_dict())
    images = torch.rand(4, 1, 36, 36)
    with torch.no_grad():
        torch.testing.assert_close(colour(images.expand(-1, 3, -1, -1)), grey(images))


def test_normalisation_is_minded_from_colour_to_grey_and_back(tmp_path):
    spreads = {3: (0.2, 0.25, 0.4), 1: (0.85 / 3,)}
    models = [
        create_model(
            "inverted_simple_cifar10",
            image_size=16,
            in_channels=channels,
            mean=(0.5,) * channels,
            std=spreads[channels],
        ).eval()
        for channels in (3, 1, 3)
    ]
    for index, (trained, other) in enumerate(pairwise(models)):
        save_model(trained, tmp_path / f"{index}.safetensors")
        assert load_backbone(other, tmp_path / f"{index}.safetensors") == []
    images = torch.rand(4, 1, 16, 16)
    with torch.no_grad():
        scores = [model(images.expand(-1, model.in_channels, -1, -1)) for model in models]
    torch.testing.assert_close(scores[1], scores[0])
    torch.testing.assert_close(scores[2], scores[0])
    assert not torch.equal(*(models[index].backbone[0].weight for index in (0, 2)))  # no colour


def test_only_unequal_means_shift_the_responses_of_shipped_weights():
    name = "inverted_resnet_cifar10"
    colour, grey = (create_model(name, pretrained=True, in_channels=c).eval() for c in (3, 1))
    images = torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        seen = [
            m.backbone[0](m.normalize(images.expand(-1, c, -1, -1)))
            for m, c in ((colour, 3), (grey, 1))
        ]
        tint = (grey.normalize.mean - colour.normalize.mean) / colour.normalize.std
        shift = (colour.backbone[0].weight * tint).sum(dim=(1, 2, 3))
    inside = (slice(None), slice(None), slice(1, -1), slice(1, -1))  # the border sees padding
    torch.testing.assert_close(seen[0][inside], seen[1][inside] + shift.view(-1, 1, 1))


def test_channels_that_no_weights_fit():
    with pytest.raises(ValueError, match=r"`in_channels` must be 3, or 1 for grey, .* got 2"):
        create_model("inverted_resnet_cifar10", pretrained=True, in_channels=2)
    two = create_model("inverted_resnet_cifar10", in_channels=2)
    assert load_backbone(two, "inverted_resnet_cifar10") == ["backbone.0.weight"]


def test_weights_made_to_fit_leave_the_random_numbers_alone():
    model = create_model(SMALL, in_channels=3)
    before = torch.get_rng_state()
    load_backbone(model, SMALL)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_is_a_start_as_well(tmp_path):
    trained = create_model(SMALL, num_classes=3)
    save_model(trained, tmp_path / "model.safetensors")
    for source in (tmp_path, str(tmp_path), tmp_path / "model.safetensors"):
        model = create_model(SMALL, num_classes=3)
        assert load_backbone(model, source) == []
        for key, value in model.state_dict().items():
            assert torch.equal(value, trained.state_dict()[key]), key
    with pytest.raises(ValueError, match="no such model; expected a run's folder"):
        load_backbone(model, tmp_path / "missing" / "run")


def test_models_whose_weights_ship():
    assert list_models(pretrained=True) == list_pretrained()
    assert list_models("*cifar10", pretrained=True) == ["inverted_resnet_cifar10"]


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


@pytest.fixture
def tool():
    return load_tool("ship_weights")


def test_a_sheet_gives_back_its_images(tool, tmp_path):
    images = torch.randint(256, (40, 3, 32, 32), dtype=torch.uint8)
    tool.write_sheet(images, tmp_path / "sheet.png")
    pictures = read_sheet(tmp_path / "sheet.png")
    for image, picture in zip(images, pictures, strict=True):
        assert torch.equal(torch.from_numpy(np.array(picture)).permute(2, 0, 1), image)


def test_which_images_are_sampled(tool):
    one_class = torch.arange(100).repeat(3).flip(0)
    rows = tool.choose(one_class)
    assert rows[:4].tolist() == [99, 199, 98, 198] and len(rows) == 200
    assert tool.rule(one_class) == "the first 2 test images of each class"
    several = torch.zeros(300, 10)
    assert tool.choose(several).tolist() == list(range(200))
    assert tool.rule(several) == "the first 200 test images"


def test_answers_that_rounding_could_change_are_marked(tool):
    def close(multilabel, *probabilities):
        ranked = [(str(index), p) for index, p in enumerate(probabilities)]
        return tool.too_close(Prediction(["0"], ranked), multilabel)

    assert close(False, 0.4509, 0.4491, 0.1) and not close(False, 0.46, 0.44, 0.1)
    assert close(True, 0.9, 0.4995) and not close(True, 0.9, 0.89, 0.1)

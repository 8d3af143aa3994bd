"""The hub's mixin without a network: folders, and an upload that goes nowhere."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

import capsroute
from capsroute.export import hub
from capsroute.inference import Predictor
from capsroute.models.base import count_parameters
from capsroute.models.weights import save_model


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = capsroute.create_model("inverted_small_multimnist", image_size=20, num_classes=3)
    made.class_names = ["ant", "bee", "cat"]
    return made.eval()


def test_a_folder_there_and_back(tmp_path, model):
    hub.HubModel(model).save_pretrained(tmp_path / "saved")
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["README.md", "config.json", "model.safetensors"]
    images = torch.rand(2, 1, 20, 20)
    loaded = hub.HubModel.from_pretrained(str(tmp_path / "saved")).model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), model(images))
    assert loaded.class_names == model.class_names
    once = hub.HubModel.from_pretrained(str(tmp_path / "saved"), iterations=1).model
    assert once.iterations == 1
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["capsroute"]["model"] == "inverted_small_multimnist"
    assert Predictor.load(tmp_path / "saved").class_names == ["ant", "bee", "cat"]


def test_the_model_card_says_what_the_model_is(model):
    card = hub.HubModel(model, license="mit").generate_model_card(
        repo_id="someone/insects", results={"test accuracy": "93.1 %"}
    )
    assert card.data.library_name == "capsroute" and card.data.license == "mit"
    text = card.content
    assert "\n# insects\n" in text and 'from_pretrained("someone/insects")' in text
    assert "| classes | ant, bee, cat |" in text and "| routing iterations | 2 |" in text
    assert "| image size | 20×20, channels: 1 |" in text and "20×20 grey images into 3" in text
    assert f"| parameters | {count_parameters(model):,} |" in text
    assert "| test accuracy | 93.1 % |" in text


def card_of(folder):
    return ModelCard.load(folder / "README.md")


def test_a_card_has_the_folders_name_and_no_licence_of_ours(tmp_path, model):
    hub.HubModel(model).save_pretrained(tmp_path / "insects")
    card = card_of(tmp_path / "insects")
    assert card.data.license is None and "license" not in card.content
    assert "\n# insects\n" in card.text and 'from_pretrained("insects")' in card.text
    named = {"repo_id": "someone/bugs", "model_card_kwargs": {"license": "cc-by-4.0"}}
    hub.HubModel(model).save_pretrained(tmp_path / "other", **named)
    card = card_of(tmp_path / "other")
    assert card.data.license == "cc-by-4.0" and "\n# bugs\n" in card.text


def test_a_card_without_a_folder_has_the_models_name(model):
    assert "\n# inverted_small_multimnist\n" in hub.HubModel(model).generate_model_card().text


def test_class_names_cannot_break_the_table(model):
    model.class_names = ["a|b", "c\nd", "e"]
    assert r"| classes | a\|b, c d, e |" in hub.HubModel(model).generate_model_card().text
    model.class_names = [str(index) for index in range(102)]
    assert "98, 99 and 2 more |" in hub.HubModel(model).generate_model_card().text


@pytest.fixture
def run_folder(tmp_path, model):
    """As training leaves it: its own config.json, and a summary."""
    folder = tmp_path / "runs" / "insects"
    folder.mkdir(parents=True)
    save_model(model, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model": {"model": model.name}, "seed": 3}))
    summary = {
        **{"model": model.name, "iterations": 2, "params": count_parameters(model)},
        **{"dataset": "/home/someone/insects", "seed": 3, "epochs": 6.0, "steps": 1200},
        **{"test_accuracy_last": 70.7, "test_accuracy_best": 71.2, "val_accuracy": None},
        **{"dtype": "float32", "device": "NVIDIA H200"},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_of_a_run_the_card_tells_what_it_measured(tmp_path, run_folder):
    hub.HubModel.of(run_folder, license="mit").save_pretrained(tmp_path / "saved")
    text = card_of(tmp_path / "saved").text
    assert "| test accuracy | 70.70 % of the images (every label right), after the last" in text
    assert "| data | insects |" in text and "someone" not in text and "validation" not in text
    assert "| trained | 1,200 steps, seed 3, float32, on NVIDIA H200 |" in text
    loaded = hub.HubModel.from_pretrained(str(run_folder))  # a run's folder is one of a model too
    assert loaded.results["test accuracy"].startswith("70.70 %")


def test_a_model_that_is_another_now_has_no_accuracy(run_folder):
    assert hub.HubModel.of(run_folder, iterations=1).results == {}


def test_a_run_is_not_saved_over(run_folder):
    before = {path.name: path.read_bytes() for path in run_folder.iterdir()}
    with pytest.raises(ValueError, match="`save_directory` must be a new folder or one saved for"):
        hub.HubModel.of(run_folder).save_pretrained(run_folder)
    assert before == {path.name: path.read_bytes() for path in run_folder.iterdir()}


def test_a_folder_of_the_hub_is_saved_again(tmp_path, model):
    for _ in range(2):
        hub.HubModel(model).save_pretrained(tmp_path / "saved")
    assert hub.HubModel.from_pretrained(str(tmp_path / "saved")).model.name == model.name


def test_a_download_is_loaded(tmp_path, model, monkeypatch):
    hub.HubModel(model).save_pretrained(tmp_path / "remote")
    asked = []

    def download(repo_id, filename, **options):
        asked.append((repo_id, filename, options["revision"]))
        return str(tmp_path / "remote" / filename)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", download)
    loaded = hub.HubModel.from_pretrained("someone/insects", revision="v1").model
    assert loaded.class_names == ["ant", "bee", "cat"]
    assert ("someone/insects", "model.safetensors", "v1") in asked


@pytest.mark.parametrize("asked", ["someone/insects", "insects"])
def test_a_push_uploads_the_folder(model, monkeypatch, asked):
    uploaded = {}
    cards = []

    class Api:
        def __init__(self, *_, **__):
            pass

        def create_repo(self, repo_id, **_):
            class Repo:
                pass

            Repo.repo_id = repo_id if "/" in repo_id else f"someone/{repo_id}"
            return Repo

        def upload_folder(self, *, repo_id, folder_path, **_):
            cards.append(card_of(Path(folder_path)))
            uploaded[repo_id] = sorted(path.name for path in Path(folder_path).iterdir())
            return "done"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    monkeypatch.setattr(hub, "HfApi", Api)
    hub.HubModel(model).push_to_hub(asked)
    (card,) = cards
    assert card.data.license is None and 'from_pretrained("someone/insects")' in card.text
    assert uploaded == {"someone/insects": ["README.md", "config.json", "model.safetensors"]}

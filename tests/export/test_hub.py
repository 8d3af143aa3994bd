"""The hub's mixin without a network: folders, and an upload that goes nowhere."""

import json

import pytest
import torch

import capsroute
from capsroute.export import hub
from capsroute.inference import Predictor


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
    card = hub.HubModel(model).generate_model_card(
        repo_id="someone/insects", results={"test accuracy": "93.1 %"}
    )
    assert card.data.library_name == "capsroute" and card.data.license == "apache-2.0"
    text = card.content
    assert "# insects" in text and 'from_pretrained("someone/insects")' in text
    assert "ant, bee, cat" in text and "2 routing iterations" in text
    assert "| test accuracy | 93.1 % |" in text and "20×20 grey images into 3 classes" in text


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


def test_a_push_uploads_the_folder(model, monkeypatch):
    uploaded = {}

    class Api:
        def __init__(self, *_, **__):
            pass

        def create_repo(self, repo_id, **_):
            class Repo:
                pass

            Repo.repo_id = repo_id
            return Repo

        def upload_folder(self, *, repo_id, folder_path, **_):
            from pathlib import Path

            uploaded[repo_id] = sorted(path.name for path in Path(folder_path).iterdir())
            return "done"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    hub.HubModel(model).push_to_hub("someone/insects")
    assert uploaded == {"someone/insects": ["README.md", "config.json", "model.safetensors"]}

"""The committed numbers: whole, of one definition, and told as they are."""

import importlib.util
import json
from pathlib import Path

import pytest

from capsroute.experiments.cards import study_name
from capsroute.explain import DEFAULT_MAP, ROUTING_MAPS
from capsroute.explain.deletion import Deletion
from capsroute.models.sources import pretrained_path
from capsroute.models.weights import read_metadata

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "separation"
DELETION = ROOT / "results" / "deletion"


def results(split):
    files = [FOLDER / f"inverted_small_multimnist_r{count}_{split}.json" for count in (1, 2, 4)]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("split", ["test", "choice"])
def test_each_file_says_where_it_came_from(split):
    for iterations, result in zip((1, 2, 4), results(split), strict=True):
        assert (result["iterations"], result["images"]) == (iterations, 1000)
        assert result["split"] == split and "--separation 1000" in result["command"]
        assert result["weights_sha256"] and len(result["commit"]) == 40
        assert result["dirty"] is False
        assert set(ROUTING_MAPS) <= set(result["maps"])


def test_the_default_map_is_the_best_on_the_images_it_was_chosen_on():
    for result in results("choice"):
        shares = {name: result["maps"][name]["share"] for name in ROUTING_MAPS}
        assert max(shares, key=shares.__getitem__) == DEFAULT_MAP


def test_uniform_routing_is_the_control():
    assert results("test")[0]["maps"]["coefficients"]["share"] == pytest.approx(0.5, abs=1e-9)


def load_script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_table_is_made_from_the_files():
    table = load_script(FOLDER / "table.py")
    expected = table.table(table.load("test"), table.load("choice"))
    assert (FOLDER / "table.md").read_text() == expected


def deletion(part):
    shipped = pretrained_path("inverted_resnet_cifar10")
    path = DELETION / f"{study_name(shipped, read_metadata(shipped))}_{part}.json"
    return json.loads(path.read_text())


@pytest.mark.parametrize("part", ["test", "choice"])
def test_a_deep_backbones_map_shows_more_of_what_the_answer_hangs_on(part):
    result = deletion(part)
    assert (result["images"], result["part"], result["iterations"]) == (100, part, 2)
    shipped = read_metadata(pretrained_path("inverted_resnet_cifar10"))
    assert result["weights_sha256"] == shipped["sha256"]
    grid, by_pixel = result["maps"]["grid"], result["maps"]["contribution"]
    assert grid["gain"] > by_pixel["gain"] + grid["error"]
    assert grid["kept"] > 2 * by_pixel["kept"]


def test_the_table_of_deletion_is_made_from_its_file():
    script = load_script(ROOT / "tools" / "map_deletion.py")
    maps = {name: Deletion(**found) for name, found in deletion("test")["maps"].items()}
    assert (DELETION / "table.md").read_text() == script.table(maps)

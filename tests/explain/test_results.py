"""The committed numbers: whole, of one definition, and told as they are."""

import importlib.util
import json
from pathlib import Path

import pytest

from capsroute.explain import DEFAULT_MAP, ROUTING_MAPS

FOLDER = Path(__file__).parents[2] / "results" / "separation"


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


def test_the_table_is_made_from_the_files():
    spec = importlib.util.spec_from_file_location("table", FOLDER / "table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    expected = table.table(table.load("test"), table.load("choice"))
    assert (FOLDER / "table.md").read_text() == expected

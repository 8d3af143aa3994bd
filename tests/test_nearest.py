"""Hints in error messages: a near name, or what there is."""

from pathlib import Path

import pytest

from capsroute import list_models
from capsroute.experiments import list_presets
from capsroute.explain.heat import MAPS
from capsroute.nearest import FEW, nearest, nearest_path


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("inverted_smal", "inverted_small_multimnist"),
        ("small_multimnist", "inverted_small_multimnist"),
        ("inverted_resnet_cifar_10", "inverted_resnet_cifar10"),
        ("inverted-resnet-cifar10", "inverted_resnet_cifar10"),
        ("inverted_rsenet_cifar10", "inverted_resnet_cifar10"),
    ],
)
def test_a_typo_gets_the_name(given, meant):
    assert nearest(given, list_models()) == f"; did you mean {meant!r}?"


def test_a_number_that_is_not_there_gets_one_that_is():
    assert nearest("em_resnet_cifar10_r3", list_presets()).startswith("; did you mean 'em_resnet")


def test_one_word_in_common_is_no_typo():
    hint = nearest("hesitant_multimnist", list_models())
    assert "did you mean" not in hint and "cnn_multimnist" in hint
    assert hint.endswith(f" and {len(list_models()) - 3} more")


def test_few_choices_are_listed():
    assert len(MAPS) <= FEW
    assert nearest("nonsense", MAPS) == f"; choose from {', '.join(sorted(MAPS))}"


def test_a_path_is_near_by_its_name_and_not_by_its_folder(tmp_path):
    (tmp_path / "huge").mkdir()
    (tmp_path / "mine").mkdir()
    assert nearest_path(tmp_path / "nothing") is None
    assert nearest_path(tmp_path / "mien") == tmp_path / "mine"
    assert nearest_path(Path("no/such/folder")) is None

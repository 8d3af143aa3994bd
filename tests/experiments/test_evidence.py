"""What a tool measured, written with the command that it was given."""

import json

import torch

from capsroute.experiments.evidence import study_name, write_measurement


def test_a_study_is_named_after_the_run_or_the_weights(tmp_path):
    weights = {"model": "inverted_resnet_cifar10", "iterations": 2}
    assert study_name("inverted_resnet_cifar10", weights) == "inverted_resnet_cifar10_r2"
    (tmp_path / "config.json").write_text('{"experiment": "fast_cifar10"}')
    assert study_name(tmp_path, weights) == "fast_cifar10"


def test_a_measurement_names_the_command_that_it_was_told(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest", "of no interest"])
    argv = ["/somewhere/tools/pose_movement.py", "a model", "--images", "10"]
    path = tmp_path / "new" / "found.json"
    assert write_measurement(path, {"share": 0.5}, torch.device("cpu"), argv) == path
    told = json.loads(path.read_text())
    assert told["command"] == "python tools/pose_movement.py 'a model' --images 10"
    assert told["share"] == 0.5 and "CPU" in told["device"] and "commit" in told

"""What a tool measured, written with the command that it was given."""

import json

import torch

from capsroute.experiments.evidence import write_measurement


def test_a_measurement_names_the_command_that_it_was_told(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest", "of no interest"])
    argv = ["/somewhere/tools/pose_movement.py", "a model", "--images", "10"]
    path = tmp_path / "new" / "found.json"
    assert write_measurement(path, {"share": 0.5}, torch.device("cpu"), argv) == path
    told = json.loads(path.read_text())
    assert told["command"] == "python tools/pose_movement.py 'a model' --images 10"
    assert told["share"] == 0.5 and "CPU" in told["device"] and "commit" in told

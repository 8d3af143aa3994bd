"""How far poses move: against models that stop there, and in the report."""

import json

import torch

from capsroute import create_model
from capsroute.experiments.movement import pose_movement, read_movements
from capsroute.experiments.report import Measured, write_report


def small(iterations):
    torch.manual_seed(0)
    return create_model("inverted_small_multimnist", image_size=24, iterations=iterations)


def test_movement_and_accuracy_are_those_of_models_that_stop_there():
    torch.manual_seed(1)
    images, targets = torch.rand(6, 1, 24, 24), (torch.rand(6, 10) > 0.5).float()
    found = pose_movement(small(4), [(images[:4], targets[:4]), (images[4:], targets[4:])])
    assert found["images"] == 6 and len(found["accuracy"]) == 4
    assert [len(layer) for layer in found["movement"]] == [3, 3]
    with torch.no_grad():
        third, fourth = (small(t).route(images).poses[-1][-1].double() for t in (3, 4))
    step = ((fourth - third).norm(dim=-1) / fourth.norm(dim=-1)).mean().item()
    assert abs(found["movement"][-1][-1] - step) < 1e-6
    with torch.no_grad():
        shares = small(4).route(images).coefficients[-1][-1]
    uneven = (10 * shares.double() - 1).square().mean().sqrt().item()
    assert uneven > 0 and abs(found["unevenness"][-1][-1] - uneven) < 1e-6
    assert found["unevenness"][-1][0] < 1e-6  # the first iteration is uniform
    for t in (1, 4):
        predicted = small(t)(images) > 0
        right = (predicted == targets.bool()).all(dim=1).float().mean().item()
        assert abs(found["accuracy"][t - 1] - 100 * right) < 1e-4


def test_the_report_shows_what_was_measured(tmp_path):
    folder = tmp_path / "results" / "pose_movement"
    folder.mkdir(parents=True)
    for initial in ("random", "zeros"):
        lines = {"movement": [[0.1] * 49, [0.25] * 49], "accuracy": [10.0, 70.5] + [20.0] * 48}
        lines["unevenness"] = [[0.0] * 50, [0.0, 0.125] + [0.5] * 48]
        about = {"images": 1000, "model": "m", "trained_with": 2, "initial_poses": initial}
        (folder / f"m_r2_{initial}.json").write_text(json.dumps(about | lines))
    assert list(read_movements(tmp_path / "results")) == ["m_r2", "m_r2, random start"]
    page, *figures = write_report(
        Measured.read(tmp_path / "results", tmp_path / "none.csv"), tmp_path
    )
    text = page.read_text()
    assert "## Does the routing settle?" in text
    assert "| m_r2 | 1,000 | 0.125 | 70.5 | 20.0 | 0.2500 |" in text
    assert [path.name for path in figures] == ["settling.png"]

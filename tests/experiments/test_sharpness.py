"""Agreements scaled up: against models built that way, and in the report."""

import json

import torch

from capsroute import create_model
from capsroute.experiments.report import Measured, write_report
from capsroute.experiments.sharpness import FACTORS, sharper_routing, vote_scales


def small(**options):
    torch.manual_seed(0)
    return create_model("inverted_small_multimnist", image_size=24, iterations=2, **options)


def test_a_factor_is_another_scale_of_the_agreement():
    torch.manual_seed(1)
    images, targets = torch.rand(6, 1, 24, 24), (torch.rand(6, 10) > 0.5).float()
    model = small()
    batches = [(images[:4], targets[:4]), (images[4:], targets[4:])]
    found = sharper_routing(model, lambda: iter(batches))
    assert found["factors"] == list(FACTORS) and found["images"] == 6
    assert found["unevenness"] == sorted(found["unevenness"])  # more decided, factor by factor
    with torch.no_grad():
        sharp = small(scale=FACTORS[-1] / 4).eval()
        shares = sharp.route(images).coefficients[-1][-1]
        right = ((sharp(images) > 0) == targets.bool()).all(dim=1).double().mean().item()
    uneven = (10 * shares.double() - 1).square().mean().sqrt().item()
    assert abs(found["unevenness"][-1] - uneven) < 1e-5
    assert abs(found["accuracy"][-1] - 100 * right) < 1e-4
    assert all(layer.scale is None for layer in model.capsules.layers)  # put back


def test_votes_are_measured_beside_those_of_a_new_model():
    model = small()
    found = vote_scales(model)
    assert all(abs(scale - 1) < 0.1 for scale in found["transforms"])
    assert found["gains"] == [1.0] * 3
    with torch.no_grad():
        model.capsules.layers[1].weight /= 5
        model.primary.norm.weight /= 2
    shrunk = vote_scales(model)
    assert abs(shrunk["transforms"][1] / found["transforms"][1] - 0.2) < 1e-6
    assert shrunk["gains"] == [0.5, 1.0, 1.0]


def test_the_report_shows_what_was_measured(tmp_path):
    folder = tmp_path / "results" / "sharper_routing"
    folder.mkdir(parents=True)
    found = {"model": "m", "trained_with": 2, "images": 2000, "factors": [1, 1000]}
    found |= {"transforms": [0.043, 0.175], "gains": [1.0, 0.2, 0.34]}
    found |= {"accuracy": [94.6, 93.9], "unevenness": [0.003, 1.72]}
    (folder / "m_r2.json").write_text(json.dumps(found))
    page, *_ = write_report(Measured.read(tmp_path / "results", tmp_path / "none.csv"), tmp_path)
    text = page.read_text()
    assert "| model | images | transforms | gains | × 1 | × 1,000 |" in text
    row = "| m_r2 | 2,000 | 0.043, 0.17 | 1, 0.2, 0.34 | 94.6 (0.003) | 93.9 (1.7) |"
    assert row in text

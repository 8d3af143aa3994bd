"""The authors' checkpoints give the authors' logits. Their code made `authors_golden.npz`."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from capsroute import create_model
from capsroute.interop import from_authors
from capsroute.models.backbones import simple_backbone
from capsroute.models.base import Task
from capsroute.models.inverted import Conv, InvertedCapsNet, Linear, Primary

GOLDEN = np.load(Path(__file__).with_name("authors_golden.npz"))
CASES = ("matrix", "matrix_fc", "vector", "vector_fc")


def checkpoint(case):
    prefix = f"{case}/weights/"
    return {
        name.removeprefix(prefix): torch.from_numpy(GOLDEN[name])
        for name in GOLDEN.files
        if name.startswith(prefix)
    }


def our_model(case, iterations, schedule):
    rows = [Primary(3), Conv(5, stride=2), *([Linear(7)] if case.endswith("fc") else []), Linear(4)]
    return InvertedCapsNet(
        Task(4, 14, 2, iterations),
        simple_backbone(2, 6),
        rows,
        pose_dim=4,
        pose=case.removesuffix("_fc"),
        schedule=schedule,
    )


@pytest.mark.parametrize("iterations", range(1, 5))
@pytest.mark.parametrize("schedule", ["concurrent", "sequential"])
@pytest.mark.parametrize("case", CASES)
def test_golden_logits(case, schedule, iterations):
    model = our_model(case, iterations, schedule)
    model.load_state_dict(from_authors(checkpoint(case)))
    logits = model.double()(torch.from_numpy(GOLDEN[f"{case}/images"]).double())
    expected = torch.from_numpy(GOLDEN[f"{case}/logits/{schedule}/{iterations}"])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_data_parallel_prefix_and_whole_checkpoints_are_understood():
    plain = from_authors(checkpoint("matrix"))
    wrapped = {f"module.{key}": value for key, value in checkpoint("matrix").items()}
    whole = {"net": wrapped, "acc": 94.0, "epoch": 3}
    for other in (from_authors(wrapped), from_authors(whole)):
        assert other.keys() == plain.keys()
        assert all(torch.equal(other[key], plain[key]) for key in plain)


def test_resnet_backbone_keys_fit_our_model():
    """The authors nest the blocks of their ResNet as 3.0–3.2 and 4.0–4.3."""
    model = create_model("inverted_resnet_cifar10")
    theirs = {}
    for key, value in model.state_dict().items():
        if key.startswith("backbone."):
            _, index, rest = key.split(".", 2)
            group = int(index)
            if group >= 6:
                index = f"4.{group - 6}"
            elif group >= 3:
                index = f"3.{group - 3}"
            theirs[f"pre_caps.pre_caps.{index}.{rest}"] = value
    w = model.capsules.layers[0].weight.detach()
    theirs |= {
        "pc_layer.weight": model.primary.conv.weight,
        "nonlinear_act.weight": model.primary.norm.weight,
        "nonlinear_act.bias": model.primary.norm.bias,
        "capsule_layers.0.w": w.permute(0, 1, 2, 4, 5, 3),
        "capsule_layers.0.nonlinear_act.weight": model.capsules.layers[0].norm.weight,
        "final_fc.weight": model.classifier.weight,
        "final_fc.bias": model.classifier.bias,
    }
    ours = from_authors(theirs)
    own = model.state_dict()
    assert {key for key in own if key.startswith("backbone.")} <= ours.keys()
    assert all(torch.equal(value, own[key]) for key, value in ours.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer1.0.conv1.weight": torch.zeros(1)}, "must hold keys of the authors' code"),
        ({"capsule_layers.1.w": torch.zeros(40, 2, 2, 4)}, "square images"),
    ],
)
def test_other_checkpoints_are_refused_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        from_authors(checkpoint("matrix") | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "final_fc.weight",
        "pc_layer.weight",
        "capsule_layers.0.w",
        "capsule_layers.1.nonlinear_act.weight",
    ],
)
def test_a_checkpoint_that_lacks_a_part_is_refused(key):
    theirs = checkpoint("matrix")
    del theirs[key]
    with pytest.raises(ValueError, match=f"must hold '{re.escape(key)}'"):
        from_authors(theirs)


def test_the_checkpoint_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"keys of the authors' code, .* got 'fc\.weight'"):
        from_authors({"fc.weight": torch.zeros(1)})

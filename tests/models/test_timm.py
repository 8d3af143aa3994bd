"""Backbones of timm: a stand-in here, the real one where it imports (it needs torchvision)."""

import re
import sys
import types

import pytest
import torch
from torch import nn

from capsroute import create_model
from capsroute.extras import install_hint
from capsroute.models import load_backbone, save_model


class Features(nn.Module):
    """Two feature maps, at strides 8 and 16, as timm's `features_only` gives them."""

    def __init__(self, in_chans, out_indices=(0, 1)):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(in_chans, 6, 8, 8), nn.Conv2d(6, 12, 2, 2)])
        self.out_indices = out_indices
        self.feature_info = types.SimpleNamespace(
            reduction=lambda: [8, 16], channels=lambda: [6, 12]
        )

    def forward(self, images):
        maps = []
        for conv in self.convs:
            images = conv(images)
            maps.append(images)
        return [maps[index] for index in self.out_indices]


@pytest.fixture
def stand_in(monkeypatch):
    def build(name, in_chans, features_only, out_indices=(0, 1), pretrained=False):
        assert features_only
        return Features(in_chans, out_indices)

    settings = types.SimpleNamespace(mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2))
    timm = types.SimpleNamespace(
        is_model=lambda name: name == "tiny",
        list_models=lambda pattern: ["tiny"] if pattern == "*tin*" else [],
        create_model=build,
        get_pretrained_cfg=lambda name: settings,
    )
    monkeypatch.setitem(sys.modules, "timm", timm)


def test_a_named_backbone_carries_the_capsules(stand_in):
    model = create_model("inverted_resnet_cifar10", backbone="timm/tiny", image_size=128)
    assert model.config == {"backbone": "timm/tiny", "image_size": 128}
    assert model.task.mean == (0.5, 0.4, 0.3)
    images = torch.rand(2, 3, 128, 128)
    assert model.backbone(images).shape == (2, 12, 8, 8)  # stride 16
    scores = model(images)
    scores.sum().backward()
    assert scores.shape == (2, 10)
    assert all(p.grad is not None for p in model.backbone.parameters())


def test_a_normalisation_of_ones_own_stays(stand_in):
    own = {"mean": (0.1, 0.1, 0.1), "std": (1.0, 1.0, 1.0)}
    model = create_model("inverted_resnet_cifar10", backbone="timm/tiny", image_size=128, **own)
    assert model.task.mean == own["mean"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backbone": "timm/tin"}, "did you mean timm/tiny"),
        ({"backbone": "resnet50"}, "`backbone` must be timm/NAME"),
        ({"backbone": "timm/tiny", "bn_group": 16}, "`bn_group` must not be given"),
    ],
)
def test_bad_backbones_are_told(stand_in, options, said):
    with pytest.raises(ValueError, match=said):
        create_model("inverted_resnet_cifar10", image_size=128, **options)


def test_without_timm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=re.escape(install_hint("timm"))):
        create_model("inverted_resnet_cifar10", backbone="timm/resnet50")


def test_a_timm_that_does_not_import_is_told_with_the_reason(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    told = "`backbone` needs timm, which is installed but cannot be imported: operator nms does"
    with pytest.raises(ValueError, match=told) as raised:
        create_model("inverted_resnet_cifar10", backbone="timm/resnet50")
    assert "pip install" not in str(raised.value)


@pytest.fixture
def timm():
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm does not import here: {error}")
    return timm


@pytest.mark.parametrize("name", ["resnet50", "convnext_tiny", "swin_tiny_patch4_window7_224"])
def test_the_real_ones_at_224(timm, name):
    model = create_model("inverted_resnet_cifar10", backbone=f"timm/{name}", image_size=224)
    model.eval()
    with torch.no_grad():
        assert model(torch.rand(1, 3, 224, 224)).shape == (1, 10)


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny"])
def test_a_model_on_a_real_one_starts_another_for_as_many_other_classes(timm, name, tmp_path):
    options = {"backbone": f"timm/{name}", "image_size": 160, "num_classes": 3}
    trained, other = (create_model("inverted_resnet_cifar10", **options) for _ in range(2))
    trained.class_names, other.class_names = ["a", "b", "c"], ["d", "e", "f"]
    save_model(trained, tmp_path / "model.safetensors")
    assert load_backbone(other, tmp_path) == ["capsules.layers.2.weight"]
    for own, given in zip(other.backbone.parameters(), trained.backbone.parameters(), strict=True):
        assert torch.equal(own, given)

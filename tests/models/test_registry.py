"""Every registered model, one alive at a time, and the registry itself."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch

import capsroute
from capsroute import create_model, list_models
from capsroute.models import load_model, model_info, registry, save_model
from capsroute.models.backbones import simple_backbone
from capsroute.models.base import CapsuleClassifier, Routing
from capsroute.models.inverted import InvertedCapsNet, Linear, Primary

# another size and channel count that every architecture can hold
SMALLER = {"dynamic_simple": 28, "dynamic_resnet": 26, "multimnist": 28}


def smaller_size(name):
    return next((size for part, size in SMALLER.items() if part in name), 24)


def images_for(model, batch):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(batch, model.in_channels, *model.image_size, generator=generator)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", list_models())
def test_model(name):
    info = model_info(name)
    torch.manual_seed(0)
    model = create_model(name)
    if name == "inverted_small_multimnist":
        assert parameters(model) <= 1_000_000
    assert parameters(model) == info.parameters

    images = images_for(model, 2)
    scores = model(images)
    assert scores.shape == (2, info.task.num_classes)
    probabilities = model.probabilities(scores)
    assert (probabilities >= 0).all() and (probabilities <= 1 + 1e-6).all()
    scores.square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), key
    model.zero_grad()

    model.eval()
    with torch.no_grad():
        one = model(images[:1])
        assert one.shape == (1, info.task.num_classes)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        del model
        again = create_model(name).eval()
        again.load_state_dict(state)
        torch.testing.assert_close(again(images[:1]), one)


@pytest.mark.parametrize("name", list_models())
def test_another_image_size_channel_count_and_class_count(name):
    info = model_info(name)
    size, channels = smaller_size(name), 4 - info.task.in_channels
    changes = {"image_size": (size, size + 1), "in_channels": channels, "num_classes": 3}
    if info.task.iterations is not None:
        changes["iterations"] = 1
    model = create_model(name, **changes).eval()
    with torch.no_grad():
        assert model(torch.rand(1, channels, size, size + 1)).shape == (1, 3)


DEFAULT_ITERATIONS = {
    "inverted_simple_cifar": 4,
    "inverted_resnet_cifar": 2,
    "dynamic_simple_cifar": 1,
    "dynamic_resnet_cifar": 1,
    "em_simple_cifar": 2,
    "em_resnet_cifar": 2,
    "cnn_": None,
    "resnet18_": None,
    "inverted_matrix_multimnist": 2,
    "inverted_vector_multimnist": 2,
    "inverted_small_multimnist": 2,
    "dynamic_vector_multimnist": 3,
}


@pytest.mark.parametrize("name", list_models())
def test_iterations_unless_given(name):
    expected = [count for part, count in DEFAULT_ITERATIONS.items() if name.startswith(part)]
    assert [model_info(name).task.iterations] == expected


def test_every_model_of_the_paper_is_there():
    names = set(list_models())
    for family in ("inverted", "dynamic", "em"):
        for backbone in ("simple", "resnet"):
            assert {f"{family}_{backbone}_cifar10", f"{family}_{backbone}_cifar100"} <= names
    assert {"cnn_cifar10", "cnn_cifar100", "resnet18_cifar10", "resnet18_cifar100"} <= names
    assert len([name for name in names if name.endswith("_wide")]) == 1
    assert len(names) == 23


FAMILIES = {
    "inverted_simple_cifar10": {"image_size": 14, "iterations": 3},
    "dynamic_simple_cifar10": {"image_size": 26, "iterations": 2},
    "em_simple_cifar10": {"image_size": 14, "iterations": 2},
    "resnet18_cifar10": {"image_size": 16},
}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAMILIES)
# torch's own internals warn while tracing; ours are covered by the eager tests
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_compile(name, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = create_model(name, **FAMILIES[name])
    images = images_for(model, 2)
    exact = scores_and_gradients(copy.deepcopy(model).double(), images.double())
    eager = scores_and_gradients(copy.deepcopy(model), images)
    compiled = scores_and_gradients(model, images, torch.compile(model, backend=backend))
    # rounding may fall differently, but not be worse: against fp64, three times eager's error
    floor = 1e-6 * max(gradient.abs().max().item() for gradient in exact)
    for want, plain, got in zip(exact, eager, compiled, strict=True):
        allowed = 3 * (plain.double() - want).abs().max().item() + floor
        assert (got.double() - want).abs().max().item() <= allowed


def scores_and_gradients(model, images, call=None):
    scores = (model if call is None else call)(images)
    return [scores, *torch.autograd.grad(scores.square().sum(), list(model.parameters()))]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_images_have_no_scores(name):
    model = create_model(name, **FAMILIES[name])
    scores = model(images_for(model, 0))
    assert scores.shape == (0, 10) and scores.dtype == torch.float32
    assert model.decide(scores).shape == model.probabilities(scores).shape == (0, 10)


def test_numpy_integers_count(tmp_path):
    model = create_model("inverted_small_multimnist", num_classes=np.int64(3))
    save_model(model, tmp_path / "model.safetensors")
    assert load_model(tmp_path / "model.safetensors").num_classes == 3


def test_the_iterations_of_a_stack_are_the_models(tmp_path):
    model = create_model("inverted_small_multimnist", image_size=20)
    model.capsules.iterations = 5
    assert model.iterations == 5 == len(model.route(images_for(model, 1)).poses[0])
    save_model(model, tmp_path / "model.safetensors")
    assert load_model(tmp_path / "model.safetensors").capsules.iterations == 5


@pytest.mark.parametrize("name", ["dynamic_simple_cifar10", "em_simple_cifar10"])
def test_the_iterations_of_a_layer_are_those_that_count(name):
    model = create_model(name, image_size=28)
    for layer in model.capsules:
        layer.iterations = 3
    routing = model.route(images_for(model, 1))
    assert routing.used == [2] * len(model.capsules)
    assert [len(layer) for layer in routing.coefficients] == [3] * len(model.capsules)


def test_normalisation_can_be_switched_off(tmp_path):
    plain = create_model("inverted_simple_cifar10", image_size=14)
    bare = create_model("inverted_simple_cifar10", image_size=14, mean=None, std=None)
    images = images_for(bare, 2)
    assert torch.equal(bare.prepare(images), images)
    assert not torch.equal(plain.prepare(images), images)
    save_model(bare, tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors")
    assert torch.equal(again.prepare(images), images)
    with pytest.raises(ValueError, match="`mean` and `std` go together"):
        create_model("inverted_simple_cifar10", mean=None)


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        (0.5, 0.5, "`mean` must be a number for each channel, got 0.5"),
        ((0.5, "x", 0.5), (0.5,) * 3, r"`mean` must be a number for each channel, got \(0.5, 'x'"),
        ((0.5,) * 3, (0.5, 0.0, 0.5), r"`std` must be a positive number for each channel, got \(0"),
        (torch.full((3, 1, 1), 0.5), (0.5,) * 3, r"`mean` must be a number .* got \(\(\(0.5,"),
        ((0.5,) * 2, (0.5,) * 3, r"`mean` must be .* \(`in_channels` is 3\), got \(0.5, 0.5\)"),
        ((0.5,) * 3, (0.5,), r"`std` must be .* \(`in_channels` is 3\), got \(0.5,\)"),
    ],
)
def test_normalisations_without_sense_are_told_in_one_line(mean, std, message):
    with pytest.raises(ValueError, match=message) as caught:
        create_model("inverted_simple_cifar10", image_size=14, mean=mean, std=std)
    assert "\n" not in str(caught.value)


def test_numbers_may_come_from_data(tmp_path):
    """As NumPy and PyTorch count and measure them; the file that is saved has Python's."""
    images = torch.rand(5, 3, 14, 15)
    model = create_model(
        "inverted_simple_cifar10",
        num_classes=torch.tensor([0, 2]).max() + 1,
        image_size=np.array(images.shape[2:]),
        mean=images.mean(dim=(0, 2, 3)),
        std=images.numpy().std(axis=(0, 2, 3)),
        scale=np.float32(0.5),
    ).eval()
    assert (model.num_classes, model.image_size) == (3, (14, 15))
    save_model(model, tmp_path / "model.safetensors")
    assert torch.equal(load_model(tmp_path / "model.safetensors").eval()(images), model(images))


def test_a_number_that_would_have_to_learn_is_none():
    with pytest.raises(TypeError, match="`scale` must be a number, got a Tensor"):
        create_model("inverted_small_multimnist", scale=torch.nn.Parameter(torch.tensor(0.5)))


def test_a_file_is_no_value_of_pretrained():
    with pytest.raises(ValueError, match=r"True or False, got 'x\.pt'; `load_model` reads files"):
        create_model("inverted_small_multimnist", pretrained="x.pt")


@pytest.fixture
def own_models(monkeypatch):
    """Two models of one's own, gone after the test."""
    monkeypatch.setattr(registry, "_REGISTRY", {})

    @registry.register(InvertedCapsNet, "diverse_multimnist", iterations=2)
    def strict(task, *, schedule="concurrent"):
        return small(task, schedule=schedule)

    @registry.register(InvertedCapsNet, "diverse_multimnist", iterations=2)
    def lenient(task, *, schedule="sequential", **options):
        return small(task, schedule=schedule, **options)


def small(task, **options):
    rows = [Primary(2), Linear(task.num_classes)]
    return InvertedCapsNet(task, simple_backbone(1, 4), rows, pose_dim=4, **options)


def test_options_are_those_that_a_models_function_takes(own_models):
    assert model_info("strict").options == ["schedule"]
    assert create_model("strict", schedule="sequential").capsules.schedule == "sequential"
    with pytest.raises(ValueError, match="strict has no option `layer_norm`"):
        create_model("strict", layer_norm=False)
    assert sorted(model_info("lenient").options) == sorted(InvertedCapsNet.OPTIONS)
    model = create_model("lenient", layer_norm=False)
    assert model.capsules.schedule == "sequential" and model.config == {"layer_norm": False}


def test_a_function_that_returns_no_model_is_named(own_models):
    @registry.register(InvertedCapsNet, "diverse_multimnist", iterations=2)
    def forgetful(task):
        small(task)

    with pytest.raises(TypeError, match="forgetful must return an ImageClassifier, got NoneType"):
        create_model("forgetful")


def test_a_name_may_be_registered_again_unless_it_is_one_of_ours(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    add = registry.register(InvertedCapsNet, "diverse_multimnist", iterations=2)

    def mine(task):
        return small(task)

    add(add(mine))  # as a cell of a notebook that runs twice
    mine.__name__ = "inverted_resnet_cifar10"
    with pytest.raises(ValueError, match=r"of its own, got 'inverted_resnet_cifar10' of capsroute"):
        add(mine)


@pytest.mark.parametrize("name", ["inverted_simple_cifar10", "em_simple_cifar10"])
def test_autocast_gives_float32_scores(name):
    model = create_model(name, image_size=14, iterations=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(images_for(model, 2))
    assert scores.dtype == torch.float32 and torch.isfinite(scores).all()


@pytest.mark.parametrize(
    ("name", "options", "used"),
    [
        ("inverted_simple_cifar10", {"image_size": 14, "iterations": 4}, [1, 2, 3]),
        ("inverted_simple_cifar10", {"image_size": 14, "iterations": 2}, [0, 0, 1]),
        (
            "inverted_simple_cifar10",
            {"image_size": 14, "iterations": 2, "schedule": "sequential"},
            [1, 1, 1],
        ),
        (
            "inverted_simple_cifar10",
            {"image_size": 14, "iterations": 2, "activations": True},
            [0, 0, 1],
        ),
        ("dynamic_simple_cifar10", {"image_size": 26, "iterations": 3}, [2]),
        ("em_simple_cifar10", {"image_size": 14, "iterations": 2}, [1, 1, 1]),
    ],
)
def test_route_shows_what_forward_did(name, options, used):
    torch.manual_seed(0)
    model = create_model(name, **options).eval()
    assert isinstance(model, CapsuleClassifier)
    images = images_for(model, 2)
    with torch.no_grad():
        routing = model.route(images)
        torch.testing.assert_close(routing.scores, model(images))
    assert isinstance(routing, Routing) and routing.used == used
    for poses, coefficients in zip(routing.poses, routing.coefficients, strict=True):
        assert len(poses) == len(coefficients) == options["iterations"]
        assert len(coefficients[0].shape) in (3, 7)
        torch.testing.assert_close(
            coefficients[0], torch.full_like(coefficients[0], 1 / coefficients[0].shape[-1])
        )
        for step in coefficients:
            torch.testing.assert_close(step.sum(-1), torch.ones_like(step[..., 0]))


class TestMistakes:
    """Each a one-line error that names the argument, the expectation and the value."""

    @staticmethod
    def one_line(caught):
        assert "\n" not in str(caught.value)

    def test_unknown_name_suggests_the_nearest(self):
        with pytest.raises(ValueError, match="did you mean 'inverted_resnet_cifar10'") as caught:
            create_model("inverted_resnet_cifar")
        self.one_line(caught)

    def test_unknown_option_suggests_the_nearest(self):
        with pytest.raises(ValueError, match="did you mean 'initial_poses'") as caught:
            create_model("inverted_simple_cifar10", initial_pose="random")
        self.one_line(caught)

    def test_models_that_do_not_route_take_no_iterations(self):
        with pytest.raises(ValueError, match="cnn_cifar10 has no option `iterations`"):
            create_model("cnn_cifar10", iterations=2)

    @pytest.mark.parametrize("name", [name for name in FAMILIES if "resnet18" not in name])
    def test_iterations_zero(self, name):
        with pytest.raises(ValueError, match=r"`iterations` must be .* at least 1, got 0"):
            create_model(name, iterations=0)

    def test_kernel_larger_than_the_input(self):
        with pytest.raises(ValueError, match="`kernel_size` of capsule layer 2 must be") as caught:
            create_model("inverted_simple_cifar10", image_size=8)
        self.one_line(caught)
        with pytest.raises(ValueError, match=r"`image_size` .* is too small") as caught:
            create_model("dynamic_simple_cifar10", image_size=8)
        self.one_line(caught)

    def test_integer_images(self):
        model = create_model("inverted_small_multimnist")
        with pytest.raises(TypeError, match=r"`images` must be floating point .* got torch.uint8"):
            model(torch.zeros(1, 1, 36, 36, dtype=torch.uint8))

    def test_images_of_another_shape(self):
        model = create_model("inverted_small_multimnist")
        with pytest.raises(ValueError, match=r"shape \(batch, 1, 36, 36\), got \(1, 3, 36, 36\)"):
            model(torch.zeros(1, 3, 36, 36))

    def test_no_image_to_route(self):
        model = create_model("inverted_small_multimnist")
        with pytest.raises(ValueError, match="`images` must hold one image at least, got none"):
            model.route(torch.zeros(0, 1, 36, 36))

    def test_checkpoint_of_another_model(self):
        state = create_model("inverted_small_multimnist").state_dict()
        with pytest.raises(ValueError, match="does not fit inverted_simple_cifar10") as caught:
            create_model("inverted_simple_cifar10").load_state_dict(state)
        self.one_line(caught)

    def test_pretrained_weights_that_do_not_exist(self):
        with pytest.raises(ValueError, match="`pretrained` must be False for cnn_cifar10"):
            create_model("cnn_cifar10", pretrained=True)

    @pytest.mark.parametrize("size", [0, (32,), "32", (32, 0), 36.5, (32, 32.0), True])
    def test_image_size(self, size):
        with pytest.raises(ValueError, match="`image_size` must be a positive integer or a pair"):
            create_model("cnn_cifar10", image_size=size)


def test_ablations_and_initial_poses(tmp_path):
    images = torch.rand(2, 3, 14, 14)
    torch.manual_seed(0)
    plain = create_model("inverted_simple_cifar10", image_size=14, iterations=2)
    count = parameters(plain)
    without_norm = create_model("inverted_simple_cifar10", image_size=14, layer_norm=False)
    assert count - parameters(without_norm) == 3 * 32  # the primary capsules keep theirs
    learned = create_model("inverted_simple_cifar10", image_size=14, initial_poses="learned")
    assert parameters(learned) - count == (32 + 32 + 10) * 16
    learned.load_state_dict(
        plain.state_dict() | {k: v for k, v in learned.state_dict().items() if "initial" in k}
    )
    # learned poses start at zero, where they are the default
    torch.testing.assert_close(
        learned(images), create_same(plain, iterations=4)(images), rtol=1e-4, atol=1e-5
    )
    random = create_model("inverted_simple_cifar10", image_size=14, initial_poses="random")
    assert not torch.allclose(random(images), random(images))
    activated = create_model("inverted_simple_cifar10", image_size=14, activations=True)
    # one more convolution with bias, and two betas for every capsule type
    assert parameters(activated) - count == 256 * 32 + 32 + 2 * (32 + 32 + 10)
    mixed = create_same(plain, windows="mixed")
    assert not torch.allclose(mixed(images), plain(images), atol=1e-3)
    torch.testing.assert_close(mixed.route(images).scores, mixed(images))
    save_model(mixed, tmp_path / "model.safetensors")
    assert torch.equal(load_model(tmp_path / "model.safetensors")(images), mixed(images))
    for model in (without_norm, learned, random, activated, mixed):
        model(images).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name


def create_same(model, **changes):
    other = create_model(model.name, **{**model.config, **changes})
    other.load_state_dict(model.state_dict())
    return other


def test_a_linear_layer_past_a_hundred_million_weights_warns():
    from capsroute.layers import LinearCaps

    with (
        torch.device("meta"),
        pytest.warns(UserWarning, match="holds 102,400,000 weights"),
    ):
        LinearCaps(64_000, 100, 16)


def test_names_that_are_imported_when_asked_for_are_listed():
    listed = dir(capsroute)
    assert {"create_model", "list_models", "load_model", "__version__"} <= set(listed)
    assert not {"Any", "TYPE_CHECKING"} & set(listed)
    assert all(hasattr(capsroute, name) for name in listed)


def test_importing_is_light():
    """Nor do exported files import the predictors that build on them."""
    modules = ("capsroute.data", "capsroute.export", "capsroute.ops.inverted.triton")
    heavy = ("triton", "matplotlib", "onnx", "fastapi", "capsroute.inference")
    code = f"import sys, {', '.join(modules)}; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["inverted_simple_cifar10", "em_simple_cifar10"])
def test_shapes_are_known_without_numbers(name):
    with torch.device("meta"):
        model = create_model(name)
        scores = model(torch.empty(2, 3, 32, 32))
    assert scores.device.type == "meta" and scores.shape == (2, 10)

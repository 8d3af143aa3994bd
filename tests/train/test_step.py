"""One training step: its loss, its limits, what of it is compiled."""

from copy import deepcopy

import pytest
import torch
from torch.optim.sgd import sgd

from capsroute import create_model, losses
from capsroute.losses import multi_hot
from capsroute.train.config import Config, OptimConfig
from capsroute.train.metrics import correct
from capsroute.train.optim import make_optimizer
from capsroute.train.step import Moment, TrainStep, choose_loss


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("inverted_simple_cifar10", "cross_entropy"),
        ("dynamic_simple_cifar10", "margin"),
        ("em_simple_cifar10", "spread"),
        ("cnn_multimnist", "binary_cross_entropy"),
        ("dynamic_vector_multimnist", "margin"),
    ],
)
def test_the_default_loss_is_the_familys(name, expected):
    with torch.device("meta"):
        model = create_model(name)
    loss = choose_loss(OptimConfig(), model)
    scores, targets = torch.rand(4, 10), torch.tensor([1, 2, 3, 4])
    wanted = getattr(losses, expected)
    options = {"margin": losses.spread_margin(3.0)} if expected == "spread" else {}
    torch.testing.assert_close(loss(scores, targets, 3.0), wanted(scores, targets, **options))


def test_a_family_of_ones_own_brings_its_loss(monkeypatch):
    with torch.device("meta"):
        model = create_model("dynamic_simple_cifar10")
    scores, targets = torch.rand(4, 10), torch.tensor([1, 2, 3, 4])
    monkeypatch.setattr(type(model), "loss", "spread")
    wanted = losses.spread(scores, targets, margin=losses.spread_margin(0.0))
    torch.testing.assert_close(choose_loss(OptimConfig(), model)(scores, targets, 0.0), wanted)
    monkeypatch.setattr(type(model), "loss", None)  # a cross entropy would take them for logits
    with pytest.raises(ValueError, match="`loss` must be given for dynamic_simple_cifar10, whose"):
        choose_loss(OptimConfig(), model)


@pytest.mark.parametrize(
    ("name", "loss", "message"),
    [
        ("inverted_small_multimnist", "margin", "binary_cross_entropy for .* logits of several"),
        ("inverted_small_multimnist", "cross_entropy", "binary_cross_entropy for .* of several"),
        ("inverted_simple_cifar10", "margin", "cross_entropy or binary_cross_entropy for .* one"),
        ("cnn_cifar10", "spread", "cross_entropy or binary_cross_entropy for cnn_cifar10, whose"),
        ("dynamic_vector_multimnist", "binary_cross_entropy", "margin for .* probabilities of sev"),
        ("dynamic_vector_multimnist", "spread", "margin for dynamic_vector_multimnist, whose"),
        ("em_simple_cifar10", "cross_entropy", "margin or spread for em_simple_cifar10, whose"),
    ],
)
def test_a_loss_must_read_the_scores_as_the_model_does(name, loss, message):
    with torch.device("meta"):
        model = create_model(name)
    with pytest.raises(ValueError, match=f"`loss` must be {message}.* got '{loss}'"):
        choose_loss(OptimConfig(loss=loss), model)


def test_a_mixed_image_costs_its_shares_of_two_classes():
    with torch.device("meta"):
        model, other = create_model("inverted_simple_cifar10"), create_model("em_simple_cifar10")
    loss = choose_loss(OptimConfig(label_smoothing=0.1), model, mixed=True)
    scores, one, two = torch.randn(1, 10), torch.tensor([3]), torch.tensor([7])
    mixed = 0.25 * multi_hot(scores, one) + 0.75 * multi_hot(scores, two)
    expected = 0.25 * loss(scores, one, 0.0) + 0.75 * loss(scores, two, 0.0)
    torch.testing.assert_close(loss(scores, mixed, 0.0), expected)
    assert correct(model, multi_hot(scores, two), mixed).all()
    with pytest.raises(ValueError, match="`cutmix` must be 0 with the spread loss"):
        choose_loss(OptimConfig(), other, mixed=True)


def test_smoothed_labels_of_several_classes_move_towards_one_half():
    with torch.device("meta"):
        model = create_model("cnn_multimnist")
    scores, targets = torch.randn(4, 10), (torch.rand(4, 10) > 0.5).float()
    smoothed = choose_loss(OptimConfig(label_smoothing=0.2), model)(scores, targets, 0.0)
    wanted = targets.where(targets == 0, 0.9).where(targets == 1, 0.1)
    torch.testing.assert_close(smoothed, losses.binary_cross_entropy(scores, wanted))


def one_step(model, **optim):
    """Of plain gradient descent, on images that three pieces share unequally."""
    torch.manual_seed(1)
    images, targets = torch.rand(5, 1, 24, 24), (torch.rand(5, 10) > 0.5).float()
    settings = OptimConfig(momentum=0.0, weight_decay=0.0, **optim)
    step = TrainStep(model, model, Config(optim=settings), world=1)
    step(images, targets, 1.0, Moment(step=0, lr=0.25, epoch=0.0))
    return step


def test_pieces_of_a_batch_weigh_as_their_images_do():
    whole = create_model("inverted_small_multimnist", image_size=24)
    pieces = deepcopy(whole)
    one_step(whole)
    one_step(pieces, accumulate=3)
    for one, other in zip(whole.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_average_takes_in_the_step_and_every_group_its_learning_rate():
    model = create_model("inverted_small_multimnist", image_size=24)
    before = deepcopy(model.state_dict())
    step = one_step(model, ema=0.9, capsule_decay=0.0)
    assert [group["lr"] for group in step.optimizer.param_groups] == [0.25, 0.25]
    for key, after in model.state_dict().items():
        assert not torch.equal(after, before[key])
        torch.testing.assert_close(step.average.values[key], before[key].lerp(after, 0.1))


def test_state_of_another_layout_takes_the_parameters_strides():
    """As a CPU's run that goes on on a GPU: convolutions are channels-last there, kernels fused."""
    torch.manual_seed(0)
    model = create_model("inverted_small_multimnist", image_size=24)
    step = TrainStep(model, model, Config(), world=1)
    step(torch.rand(2, 1, 24, 24), torch.ones(2, 10), 1.0, Moment(0, 0.1, 0.0))
    other = create_model("inverted_small_multimnist", image_size=24)
    for module in other.modules():
        if isinstance(module, torch.nn.Conv2d):
            weight = module.weight.data
            module.weight.data = weight.contiguous(memory_format=torch.channels_last)
    resumed = TrainStep(other, other, Config(), world=1)
    resumed.load_state_dict(step.state_dict())
    kept = zip(resumed.optimizer.state.items(), step.optimizer.state.values(), strict=True)
    for (parameter, state), before in kept:
        assert state["momentum_buffer"].stride() == parameter.stride()
        assert torch.equal(state["momentum_buffer"], before["momentum_buffer"])


def test_clipping_bounds_the_update():
    torch.manual_seed(0)
    model = create_model("inverted_small_multimnist", image_size=24)
    optim = OptimConfig(momentum=0.0, weight_decay=0.0, clip=1e-3)
    step = TrainStep(model, model, Config(optim=optim), world=1)
    before = {key: value.clone() for key, value in model.named_parameters()}
    step(torch.rand(4, 1, 24, 24), torch.ones(4, 10), 1.0, Moment(step=0, lr=1.0, epoch=0.0))
    moved = sum((value - before[key]).square().sum() for key, value in model.named_parameters())
    assert moved.sqrt().item() == pytest.approx(1e-3, rel=1e-3)


def test_the_first_bad_step_is_remembered_without_waiting():
    model = create_model("inverted_small_multimnist", image_size=24)
    step = TrainStep(model, model, Config(), world=1)
    images, targets = torch.rand(2, 1, 24, 24), torch.ones(2, 10)
    step(images, targets, 1.0, Moment(0, 0.0, 0.0))
    assert step.first_bad_step.item() == -1
    for index in (1, 2):
        step(images * float("nan"), targets, 1.0, Moment(index, 0.0, 0.0))
    assert step.first_bad_step.item() == 1


class Recorder:
    """A compiler that compiles nothing and remembers what it was asked for, and what was called."""

    def __init__(self):
        self.calls = []

    def __call__(self, function):
        def called(*arguments, **options):
            self.calls.append(function)
            return function(*arguments, **options)

        return called


def test_only_whole_batches_run_compiled():
    compiler = Recorder()
    model = create_model("inverted_small_multimnist", image_size=24)
    step = TrainStep(model, model, Config(batch_size=4), 1, compiler)
    images, targets = torch.rand(4, 1, 24, 24), (torch.rand(4, 10) > 0.5).float()
    step(images[:2], targets[:2], 1.0, Moment(0, 0.1, 0.0), whole=False)
    assert not compiler.calls
    step(images, targets, 1.0, Moment(1, 0.1, 0.0))
    assert len(compiler.calls) == 2  # the loss and the counting; the model came compiled or not


@pytest.mark.parametrize("on_device", [False, True])
def test_the_update_is_compiled_where_the_learning_rate_is_a_tensor(on_device, monkeypatch):
    model = create_model("inverted_small_multimnist", image_size=24)
    optimizer = make_optimizer(OptimConfig(), model)
    if on_device:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    monkeypatch.setattr("capsroute.train.step.make_optimizer", lambda *_: optimizer)
    compiler = Recorder()
    step = TrainStep(model, model, Config(batch_size=2), 1, compiler)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    images, targets = torch.rand(2, 1, 24, 24), (torch.rand(2, 10) > 0.5).float()
    step(images, targets, 1.0, Moment(0, 0.1, 0.0))
    assert (sgd in compiler.calls) == on_device
    moved = zip(before, model.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in moved)

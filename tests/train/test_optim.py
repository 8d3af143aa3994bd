"""Optimisers, learning rates and the average of the weights."""

import pytest
import torch
from torch.optim.sgd import sgd

from capsroute import create_model
from capsroute.train.config import OptimConfig
from capsroute.train.optim import (
    WeightAverage,
    learning_rate,
    make_optimizer,
    update_by_sgd,
)


def test_step_schedule_divides_after_its_milestones():
    config = OptimConfig(lr=0.1, milestones=(2, 4))
    rates = [learning_rate(config, step, 60, 10) for step in (0, 19, 20, 39, 40, 59)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    config = OptimConfig(lr=0.1, milestones=(2, 4), warmup=0.1)
    rates = [learning_rate(config, step, 60, 10) for step in (0, 2, 5, 6, 20)]
    assert rates == pytest.approx([0.1 / 6, 0.05, 0.1, 0.1, 0.01])


def test_cosine_schedule_with_warmup():
    config = OptimConfig(lr=1.0, lr_schedule="cosine", warmup=0.1)
    rates = [learning_rate(config, step, 100, 10) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(1.0) and rates[55] == pytest.approx(0.5)
    assert rates[99] < 1e-3
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("steps", [10, 30, 50])
def test_warmup_never_exceeds_the_learning_rate(steps):
    config = OptimConfig(lr=1.0, lr_schedule="constant", warmup=0.05)
    rates = [learning_rate(config, step, steps, 10) for step in range(steps)]
    assert max(rates) == 1.0 and rates == sorted(rates)


def test_constant_schedule():
    config = OptimConfig(lr=0.3, lr_schedule="constant")
    assert {learning_rate(config, step, 100, 10) for step in (0, 50, 99)} == {0.3}


def test_optimizers_are_the_papers():
    model = torch.nn.Linear(2, 2)
    sgd = make_optimizer(OptimConfig(), model)
    assert isinstance(sgd, torch.optim.SGD)
    group = sgd.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.9, 5e-4)
    adam = make_optimizer(OptimConfig(optimizer="adam", lr=1e-3), model)
    assert isinstance(adam, torch.optim.Adam) and adam.param_groups[0]["lr"] == 1e-3


def test_what_routes_may_have_a_decay_of_its_own():
    model = create_model("inverted_small_multimnist")
    groups = make_optimizer(OptimConfig(capsule_decay=0.0), model).param_groups
    assert [group["weight_decay"] for group in groups] == [5e-4, 0.0]
    assert [id(p) for p in groups[1]["params"]] == [id(p) for p in model.capsules.parameters()]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    with pytest.raises(ValueError, match="`capsule_decay` must not be given for a model without"):
        make_optimizer(OptimConfig(capsule_decay=0.0), create_model("cnn_cifar10"))


@pytest.mark.parametrize(
    "options",
    [{"weight_decay": 5e-4}, {"nesterov": True}, {"momentum": 0.0}],
    ids=["weight decay", "Nesterov", "no momentum"],
)
def test_the_update_that_is_compiled_is_the_optimizers(options):
    config = OptimConfig(**options)
    ours, theirs = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(config, ours)
    lr = torch.tensor(0.1)  # as on a GPU
    optimizer.param_groups[0]["lr"] = lr
    settings = {"momentum": config.momentum, "nesterov": config.nesterov}
    plain = torch.optim.SGD(theirs.parameters(), 0.1, weight_decay=config.weight_decay, **settings)
    compiled = torch.compile(sgd, fullgraph=True, backend="aot_eager")
    images = torch.randn(4, 5)
    for rate in (0.1, 0.1, 0.01):
        lr.fill_(rate)
        plain.param_groups[0]["lr"] = rate
        for model in (ours, theirs):
            model.zero_grad()
            model(images).square().sum().backward()
        update_by_sgd(optimizer, compiled)
        plain.step()
    for got, want in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got, want)


def test_average_of_the_weights():
    model = torch.nn.BatchNorm1d(2)
    average = WeightAverage(model, 0.9)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.num_batches_tracked.fill_(7)
    average.update(model)
    torch.testing.assert_close(average.values["weight"], torch.full((2,), 1.1))
    assert average.values["num_batches_tracked"] == 7


def test_averaged_statistics_are_those_of_the_averaged_weights():
    """Exactly so for means, behind a linear layer that moves and a BatchNorm that follows."""
    torch.manual_seed(0)
    images = torch.randn(64, 5, dtype=torch.float64)
    norm = torch.nn.BatchNorm1d(3, momentum=1.0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), norm).double()
    model(images)
    average = WeightAverage(model, 0.7)
    for _ in range(20):
        torch.nn.init.normal_(model[0].weight)
        model(images)
        average.update(model)
    model.load_state_dict(average.values)
    torch.testing.assert_close(model[0](images).mean(dim=0), model[1].running_mean)

"""Steps of the paper's recipe beside plain PyTorch that does what the authors' DataParallel did."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from capsroute import create_model
from capsroute.experiments.presets import preset
from capsroute.train.optim import learning_rate
from capsroute.train.step import Moment, TrainStep

SHARE = 16  # of a batch of 128, on each of 8 GPUs
EPOCH = 391
RATES = {0: 0.1, 150 * EPOCH - 1: 0.1, 150 * EPOCH: 0.01, 250 * EPOCH: 0.001}  # by step


def make_model(name, **options):
    torch.manual_seed(0)
    return create_model(name, image_size=16, **options).double().train()


def scores_of_all_devices(model, images):
    """Each device normalises its own share, and BatchNorm's statistics are those of the first."""
    scores = []
    for device, share in enumerate(images.split(SHARE)):
        before = [buffer.clone() for buffer in model.buffers()]
        scores.append(model(share))
        if device > 0:
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.data.copy_(value)  # which autograd does not count as a change
    return torch.cat(scores)


def step_by_hand(model, momenta, images, targets, lr):
    """Cross entropy; SGD with momentum and a weight decay of everything that is learned."""
    loss = F.cross_entropy(scores_of_all_devices(model, images), targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient, momentum in zip(
            model.parameters(), gradients, momenta, strict=True
        ):
            momentum.mul_(0.9).add_(gradient + 5e-4 * parameter)
            parameter.sub_(lr * momentum)


@pytest.mark.parametrize("name", ["inverted_resnet_cifar10", "inverted_resnet_cifar100"])
def test_steps_are_those_of_the_authors(name):
    config = dataclasses.replace(preset(f"{name}_r2").config, dtype="float32")
    ours, theirs = make_model(name, **config.model.options()), make_model(name)
    train_step = TrainStep(ours, ours, config, world=1)
    momenta = [torch.zeros_like(parameter) for parameter in theirs.parameters()]
    for step, lr in RATES.items():
        generator = torch.Generator().manual_seed(step)
        images = torch.rand(2 * SHARE, 3, 16, 16, generator=generator, dtype=torch.float64)
        targets = torch.randint(ours.num_classes, (2 * SHARE,), generator=generator)
        step_by_hand(theirs, momenta, images, targets, lr)
        found = learning_rate(config.optim, step, 350 * EPOCH, EPOCH)
        assert found == pytest.approx(lr)
        train_step(images, targets, 1.0, Moment(step, lr, step / EPOCH))
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-8, atol=1e-10)

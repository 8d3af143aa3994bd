"""Training with the fused kernels follows training without them."""

import pytest
import torch

from capsroute import create_model
from capsroute.train.config import Config, OptimConfig
from capsroute.train.step import Moment, TrainStep

STEPS, BATCH, LR = 50, 64, 0.002


def batches(seed=0):
    """Images whose class is a colour under noise: something that can be learned in 50 steps."""
    generator = torch.Generator().manual_seed(seed)
    colours = torch.rand(10, 3, 1, 1, generator=generator)
    for _ in range(STEPS):
        labels = torch.randint(10, (BATCH,), generator=generator)
        noise = torch.rand(BATCH, 3, 32, 32, generator=generator)
        yield (0.5 * colours[labels] + 0.5 * noise).cuda(), labels.cuda()


def loss_curve(impl, dtype, nudge=0.0):
    """Losses of the steps; `nudge` moves every weight by about that much of itself at the start."""
    torch.manual_seed(0)
    model = create_model("inverted_resnet_cifar10", iterations=3, impl=impl).cuda()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + nudge * torch.randn_like(weight))
    optim = OptimConfig(lr=LR, momentum=0.0)  # calm: with momentum, rounding decides the curve
    step = TrainStep(model, model, Config(optim=optim, dtype=dtype), world=1)
    curve = []
    for index, (images, labels) in enumerate(batches()):
        before = step.totals.sums[0].clone()
        step(images, labels, 1.0, Moment(index, LR, 0.0))
        curve.append((step.totals.sums[0] - before) / BATCH)
    return torch.stack(curve).float().cpu()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-6), ("bfloat16", 2**-9)])
def test_the_loss_curves_are_one(dtype, rounding):
    """Training amplifies rounding, so the measure is what rounding the weights once does to it."""
    plain, fused = loss_curve("tiled", dtype), loss_curve("triton", dtype)
    rounded = loss_curve("tiled", dtype, nudge=rounding)
    assert plain[-10:].mean() < 0.7 * plain[:5].mean()  # it did learn
    assert (fused - plain).abs().max() <= 3 * (rounded - plain).abs().max()
    assert (rounded - plain).abs().max() < 0.1 * plain[0]  # else the measure would allow anything

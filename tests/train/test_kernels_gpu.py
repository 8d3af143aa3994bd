"""Training with the fused kernels follows training without them."""

import pytest
import torch

from capsroute import create_model
from capsroute.train.config import Config, OptimConfig
from capsroute.train.step import Moment, TrainStep

STEPS, BATCH = 50, 64


def batches(seed=0):
    """Images whose class is a colour under noise: something that can be learned in 50 steps."""
    generator = torch.Generator().manual_seed(seed)
    colours = torch.rand(10, 3, 1, 1, generator=generator)
    for _ in range(STEPS):
        labels = torch.randint(10, (BATCH,), generator=generator)
        noise = torch.rand(BATCH, 3, 32, 32, generator=generator)
        yield (0.5 * colours[labels] + 0.5 * noise).cuda(), labels.cuda()


def loss_curve(impl, dtype):
    torch.manual_seed(0)
    model = create_model("inverted_resnet_cifar10", iterations=3, impl=impl).cuda()
    config = Config(optim=OptimConfig(lr=0.01), dtype=dtype)
    step = TrainStep(model, model, config, world=1)
    curve = []
    for index, (images, labels) in enumerate(batches()):
        before = step.totals.sums[0].clone()
        step(images, labels, 1.0, Moment(index, 0.01, 0.0))
        curve.append((step.totals.sums[0] - before) / BATCH)
    return torch.stack(curve).float().cpu()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 0.02), ("bfloat16", 0.1)])
def test_the_loss_curves_are_one(dtype, allowed):
    fused, plain = loss_curve("triton", dtype), loss_curve("tiled", dtype)
    assert plain[-10:].mean() < 0.7 * plain[:5].mean()  # it did learn
    assert (fused - plain).abs().max() <= allowed * plain[0]

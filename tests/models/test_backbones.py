"""Ghost BatchNorm is DataParallel's BatchNorm: a replica for each group of images."""

import copy

import pytest
import torch
from torch import nn

from capsroute import create_model
from capsroute.models.backbones import GhostBatchNorm2d


def replicas(norm, images, group):
    """What DataParallel does: each chunk by itself; the first replica's buffers survive."""
    outputs = []
    for index, chunk in enumerate(images.split(group)):
        replica = copy.deepcopy(norm)
        replica.weight, replica.bias = norm.weight, norm.bias  # their gradients are added
        outputs.append(replica(chunk))
        if index == 0:
            survivor = replica
    return torch.cat(outputs), survivor


@pytest.mark.parametrize("batch", [3, 4, 8, 10])
def test_groups_are_normalised_by_themselves(batch):
    torch.manual_seed(0)
    images = torch.randn(batch, 5, 3, 2, dtype=torch.float64, requires_grad=True)
    norm = nn.BatchNorm2d(5).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    ghost = GhostBatchNorm2d(5, 4).double()
    ghost.load_state_dict(norm.state_dict())
    expected, survivor = replicas(norm, images, 4)
    actual = ghost(images)
    torch.testing.assert_close(actual, expected)
    cotangent = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, [images, ghost.weight, ghost.bias], cotangent),
        torch.autograd.grad(expected, [images, norm.weight, norm.bias], cotangent),
    )
    for key, value in survivor.state_dict().items():
        torch.testing.assert_close(ghost.state_dict()[key], value, msg=key)
    torch.testing.assert_close(ghost.eval()(images), survivor.eval()(images))


# torch's own internals warn while tracing
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_it_has_the_same_gradients(dtype):
    torch._dynamo.reset()
    ghost = GhostBatchNorm2d(5, 4)
    images = torch.randn(8, 5, 3, 2).to(dtype).requires_grad_()

    def gradients(norm):
        inputs = [images, ghost.weight, ghost.bias]
        return torch.autograd.grad(norm(1.0 * images).float().pow(3).sum(), inputs)

    torch.testing.assert_close(gradients(torch.compile(ghost, backend="eager")), gradients(ghost))


def test_channels_stay_last_there_and_back():
    """A convolution copies what comes otherwise, forward and backward."""
    images = torch.randn(8, 5, 3, 2).to(memory_format=torch.channels_last).requires_grad_()
    seen, gradients = images * 1.0, []
    seen.register_hook(gradients.append)
    normed = GhostBatchNorm2d(5, 4)(seen)
    assert normed.is_contiguous(memory_format=torch.channels_last)
    (normed**2).sum().backward()
    assert gradients[0].is_contiguous(memory_format=torch.channels_last)


def test_bn_group_is_an_option_of_the_resnet_backbone():
    model = create_model("inverted_resnet_cifar10", bn_group=2)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms and all(isinstance(m, GhostBatchNorm2d) and m.group == 2 for m in norms)
    plain = create_model("inverted_resnet_cifar10")
    assert plain.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(ValueError, match="`bn_group` must be at least 1, got 0"):
        create_model("inverted_resnet_cifar10", bn_group=0)

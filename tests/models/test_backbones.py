"""Ghost BatchNorm is, for whole batches, DataParallel's BatchNorm: a replica for each group."""

import copy

import pytest
import torch
from torch import nn

from capsroute import create_model, list_models
from capsroute.models import model_info
from capsroute.models.backbones import GhostBatchNorm2d
from capsroute.models.factory import load_model
from capsroute.models.weights import read_metadata, save_model


def replicas(norm, chunks):
    """Each chunk through a replica of its own; the first one's buffers survive.

    DataParallel does that to `images.chunk(devices)`, ghost BatchNorm to `images.split(group)`.
    The two are the same for a batch of devices · group images; where fewer are left, DataParallel
    makes smaller chunks of them, and ghost BatchNorm fewer groups.
    """
    outputs = []
    for index, chunk in enumerate(chunks):
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
    expected, survivor = replicas(norm, images.split(4))
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


def test_a_whole_batch_is_cut_as_the_authors_8_gpus_did_and_the_last_one_is_not():
    """80 images are left at the end of an epoch of CIFAR: 8 times 10 there, 5 times 16 here."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    whole, last = torch.randn(128, 3, 2, 2), torch.randn(80, 3, 2, 2)
    assert [len(chunk) for chunk in last.chunk(8)] == [10] * 8
    for images, same in ((whole, True), (last, False)):
        ghost = GhostBatchNorm2d(3, 16)
        normed = ghost(images)
        theirs, survivor = replicas(norm, images.chunk(8))
        assert torch.allclose(normed, theirs, atol=1e-5) == same
        assert torch.allclose(ghost.running_mean, survivor.running_mean) == same


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


def test_second_derivatives():
    torch.manual_seed(0)
    ghost = GhostBatchNorm2d(2, 2).double()
    images = torch.randn(5, 2, 2, 1, dtype=torch.float64, requires_grad=True)

    def normed(images, weight, bias):
        return torch.func.functional_call(ghost, {"weight": weight, "bias": bias}, images)

    assert torch.autograd.gradgradcheck(normed, (images, ghost.weight, ghost.bias))


def test_channels_stay_last_there_and_back():
    """A convolution copies what comes otherwise, forward and backward."""
    images = torch.randn(8, 5, 3, 2).to(memory_format=torch.channels_last).requires_grad_()
    seen, gradients = images * 1.0, []
    seen.register_hook(gradients.append)
    normed = GhostBatchNorm2d(5, 4)(seen)
    assert normed.is_contiguous(memory_format=torch.channels_last)
    (normed**2).sum().backward()
    assert gradients[0].is_contiguous(memory_format=torch.channels_last)


def on_meta(name, **options):
    with torch.device("meta"):
        return create_model(name, **options)


def batch_norms(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize("name", list_models())
def test_bn_group_is_an_option_where_there_is_batch_norm(name):
    plain = on_meta(name)
    assert not any(isinstance(norm, GhostBatchNorm2d) for norm in batch_norms(plain))
    if not batch_norms(plain):
        with pytest.raises(ValueError, match=f"{name} has no option `bn_group`"):
            on_meta(name, bn_group=16)
        return
    grouped = on_meta(name, bn_group=16)
    assert all(isinstance(m, GhostBatchNorm2d) and m.group == 16 for m in batch_norms(grouped))
    shapes, expected = ({k: v.shape for k, v in m.state_dict().items()} for m in (grouped, plain))
    assert list(shapes.items()) == list(expected.items())
    weights = sum(parameter.numel() for parameter in grouped.parameters())
    assert weights == model_info(name).parameters
    with pytest.raises(ValueError, match="`bn_group` must be at least 1, got 0"):
        on_meta(name, bn_group=0)


@pytest.mark.parametrize("name", ["em_simple_cifar10", "inverted_resnet_cifar10", "cnn_cifar10"])
def test_groups_matter_in_training_alone(name):
    torch.manual_seed(0)
    grouped, plain = create_model(name, bn_group=2), create_model(name)
    plain.load_state_dict(grouped.state_dict())
    images = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(grouped.eval()(images), plain.eval()(images))
        assert not torch.allclose(grouped.train()(images), plain.train()(images))


def test_a_file_names_the_groups_it_was_trained_with(tmp_path):
    grouped, plain = (
        create_model("em_simple_cifar10", bn_group=16),
        create_model("em_simple_cifar10"),
    )
    paths = [tmp_path / "grouped.safetensors", tmp_path / "plain.safetensors"]
    for model, path in zip((grouped, plain), paths, strict=True):
        save_model(model, path)
    assert [read_metadata(path)["config"] for path in paths] == [{"bn_group": 16}, {}]
    assert [norm.group for norm in batch_norms(load_model(paths[0]))] == [16]
    for again in (load_model(paths[1]), load_model(paths[0], bn_group=None)):
        assert not any(isinstance(norm, GhostBatchNorm2d) for norm in batch_norms(again))
    images = torch.rand(2, 3, 32, 32)
    again = load_model(paths[0])
    assert torch.equal(again.eval()(images), grouped.eval()(images))

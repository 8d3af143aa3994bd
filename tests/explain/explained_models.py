"""Small models of every family that routes, with weights that decide something."""

import torch

import capsroute

FAMILIES = {
    "inverted": ("inverted_small_multimnist", {"image_size": 24, "iterations": 3}),
    "inverted_linear": (
        "inverted_simple_cifar100",
        {"image_size": 16, "num_classes": 6, "iterations": 3, "in_channels": 1},
    ),
    "sequential": (
        "inverted_small_multimnist",
        {"image_size": 24, "schedule": "sequential", "iterations": 2},
    ),
    "no_layer_norm": ("inverted_small_multimnist", {"image_size": 24, "layer_norm": False}),
    "activations": ("inverted_small_multimnist", {"image_size": 24, "activations": True}),
    "dynamic": (
        "dynamic_simple_cifar10",
        {"image_size": 24, "num_classes": 5, "in_channels": 1, "iterations": 3},
    ),
    "em": (
        "em_simple_cifar10",
        {"image_size": 16, "num_classes": 5, "in_channels": 1, "iterations": 2},
    ),
}
LINEAR = [family for family in FAMILIES if family != "em"]


def make(family, **options):
    """An untrained model in evaluation mode, its transforms large enough to route by."""
    name, defaults = FAMILIES[family]
    torch.manual_seed(0)
    model = capsroute.create_model(name, **(defaults | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(1.5)
    return model


def images(model, count=2):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, model.in_channels, *model.image_size, generator=generator)

"""Shapes for the kernel tests, and the check that every tier shares. Not a test module."""

import itertools

import torch

from capsroute.ops.inverted import reference
from capsroute.ops.inverted import triton as kernels

# children, weight, stride
TINY = {
    "conv 2×2, stride 2": ((2, 5, 4, 3, 4), (2, 2, 3, 5, 2, 2), 2),
    "conv 4×4": ((1, 4, 3, 2, 16), (3, 3, 2, 3, 4, 4), 1),
    "conv, pixels unseen": ((1, 6, 6, 1, 9), (2, 2, 1, 2, 3, 3), 3),
    "linear 4×4": ((3, 1, 1, 11, 16), (1, 1, 11, 5, 4, 4), 1),
    "linear 6×6": ((2, 1, 1, 3, 36), (1, 1, 3, 3, 6, 6), 1),
    "linear 8×8": ((2, 1, 1, 2, 64), (1, 1, 2, 2, 8, 8), 1),
    "linear small vector": ((3, 1, 1, 5, 3), (1, 1, 5, 4, 3, 6), 1),
    "linear many parents": ((2, 1, 1, 2, 4), (1, 1, 2, 70, 2, 2), 1),
    "linear 6×6, 40 parents": ((3, 1, 1, 3, 36), (1, 1, 3, 40, 6, 6), 1),
    "one parent": ((2, 1, 1, 3, 4), (1, 1, 3, 1, 2, 2), 1),
    "conv vector": ((2, 3, 4, 2, 12), (2, 2, 2, 3, 12, 20), 1),
    "linear vector": ((3, 1, 1, 4, 24), (1, 1, 4, 3, 24, 17), 1),
    "conv vector, in twos": ((3, 4, 4, 1, 16), (3, 3, 1, 3, 16, 24), 1),
    "linear vector, two tiles": ((70, 1, 1, 3, 16), (1, 1, 3, 2, 16, 16), 1),
    "linear 9×9": ((2, 1, 1, 2, 81), (1, 1, 2, 3, 9, 9), 1),
}
# odd sizes, for a card
ODD = {
    "conv 4×4, stride 2": ((5, 11, 9, 7, 16), (3, 3, 7, 13, 4, 4), 2),
    "conv 4×4, 32 parents": ((7, 6, 7, 32, 16), (3, 3, 32, 32, 4, 4), 1),
    "conv 6×6": ((3, 9, 8, 5, 36), (3, 3, 5, 33, 6, 6), 2),
    "conv 8×8": ((2, 7, 6, 9, 64), (3, 3, 9, 17, 8, 8), 1),
    "conv 5×5": ((3, 6, 5, 4, 25), (2, 2, 4, 6, 5, 5), 1),
    "linear 4×4": ((100, 1, 1, 63, 16), (1, 1, 63, 10, 4, 4), 1),
    "linear 6×6, 100 parents": ((63, 1, 1, 20, 36), (1, 1, 20, 100, 6, 6), 1),
    "linear 8×8": ((33, 1, 1, 100, 64), (1, 1, 100, 10, 8, 8), 1),
    "conv 8×8, 64 parents": ((3, 5, 6, 5, 64), (3, 3, 5, 64, 8, 8), 1),
    "linear 8×8, 130 parents": ((9, 1, 1, 7, 64), (1, 1, 7, 130, 8, 8), 1),
    "conv 3×3": ((3, 6, 5, 5, 9), (2, 2, 5, 7, 3, 3), 1),
    "linear 2×2": ((70, 1, 1, 19, 4), (1, 1, 19, 21, 2, 2), 1),
    "linear small vector": ((37, 1, 1, 21, 5), (1, 1, 21, 11, 5, 7), 1),
    "linear vector": ((63, 1, 1, 37, 64), (1, 1, 37, 10, 64, 64), 1),
    "linear vector, odd": ((37, 1, 1, 21, 24), (1, 1, 21, 11, 24, 41), 1),
    "conv vector": ((3, 5, 6, 5, 64), (3, 3, 5, 7, 64, 64), 1),
    "conv vector, several tiles": ((20, 5, 6, 5, 64), (3, 3, 5, 7, 64, 64), 1),
    "linear vector, 130 parents": ((37, 1, 1, 9, 16), (1, 1, 9, 130, 16, 24), 1),
    "linear vector, 128": ((70, 1, 1, 5, 128), (1, 1, 5, 6, 128, 128), 1),
    "conv 12×12": ((2, 5, 5, 3, 144), (3, 3, 3, 5, 12, 12), 2),
}


def layer(shapes, dtype, seed, device="cpu"):
    """children, weight, parents, the cotangent of the poses, the stride and the scale."""
    children, weight, stride = shapes
    k, _, n_in, n_out, a, b = weight
    rows = children[-1] // a
    size = [(extent - k) // stride + 1 for extent in children[1:3]]
    generator = torch.Generator().manual_seed(seed)
    parents = (children[0], *size, n_out, rows * b)
    tensors = [
        torch.randn(shape, generator=generator) for shape in (children, weight, parents, parents)
    ]
    tensors[1] *= (n_out / (a * n_in * k * k)) ** 0.5
    made = [tensor.to(device, dtype) for tensor in tensors]
    return made, stride, (rows * b) ** -0.5


def run(step, tensors, stride, scale):
    """Poses and the three gradients."""
    *inputs, cotangent = [tensor.detach() for tensor in tensors]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    poses = step(*inputs, stride=stride, scale=scale)
    return [poses, *torch.autograd.grad(poses, inputs, cotangent)]


def plain(children, weight, parents, *, stride, scale):
    return reference.routing_step(children, weight, parents, stride=stride, scale=scale)[0]


BUDGETS = {"poses": 2.0, "∂children": 3.0, "∂weight": 3.0, "∂parents": 3.0}
MEASURES = {"norm": torch.linalg.vector_norm, "largest": lambda values: values.abs().max()}


def errors(shapes, dtype, seed, device="cpu", draws=1):
    """By (what, measure): the kernels' error against fp64, and plain PyTorch's, both relative.

    Plain PyTorch's is the largest over `draws` seeds: the largest element's error is a matter of
    luck, at tiny sizes the norm too.
    """
    found = {key: [0.0, torch.finfo(dtype).eps] for key in itertools.product(BUDGETS, MEASURES)}
    for draw in range(seed, seed + draws):
        tensors, stride, scale = layer(shapes, dtype, draw, device)
        exact = run(plain, [tensor.double() for tensor in tensors], stride, scale)
        theirs = run(plain, tensors, stride, scale)
        ours = run(kernels.routing_step, tensors, stride, scale) if draw == seed else theirs
        for name, want, got, low in zip(BUDGETS, exact, ours, theirs, strict=True):
            assert got.dtype == dtype and got.shape == want.shape, name
            for measure, size in MEASURES.items():
                distance = [
                    (size(x.double() - want) / (size(want) + 1e-30)).item() for x in (got, low)
                ]
                row = found[name, measure]
                if draw == seed:
                    row[0] = distance[0]
                row[1] = max(row[1], distance[1])
    return found


def check(shapes, dtype, seed, device="cpu", draws=1):
    for (name, measure), (ours, theirs) in errors(shapes, dtype, seed, device, draws).items():
        # `not <=` and not `>`: NaN fails
        budget = BUDGETS[name]
        assert ours <= budget * theirs, f"{name}, {measure}: {ours:.3g} > {budget} × {theirs:.3g}"

"""The paper's two procedures as plain loops over scalars and small vectors, in float64.

Deliberately naive: no broadcasting, no einsum, one capsule at a time, so that a reader can hold it
beside the paper. Autograd runs through it, which gives the gradients to compare with.
"""

import math

import torch
from torch import Tensor


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Within `tolerance`, in units of the largest element where that exceeds one.

    A sharp softmax under LayerNorm gives gradients of 10³, whose last bit alone is 10⁻¹³ and whose
    sums round accordingly: an absolute bound would fail for one drawn shape in some hundreds.
    """
    bound = tolerance * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


def vote(pose: Tensor, transform: Tensor) -> Tensor:
    """pose · W, the pose taken as a matrix when W is smaller than the pose."""
    a = transform.shape[0]
    if pose.numel() == a:
        return pose @ transform
    return (pose.reshape(a, a) @ transform).reshape(-1)


def route(
    children: list[Tensor], transforms: list[list[Tensor]], parents: list[Tensor]
) -> list[Tensor]:
    """Procedure 1 for one set of competing parents, up to and excluding LayerNorm.

    `transforms[i][j]` takes child i to parent j.
    """
    scale = 1.0 / math.sqrt(parents[0].numel())
    totals = [torch.zeros_like(parent) for parent in parents]
    for i, child in enumerate(children):
        votes = [vote(child, transforms[i][j]) for j in range(len(parents))]
        agreements = [scale * torch.dot(parents[j], votes[j]) for j in range(len(parents))]
        exponentials = [torch.exp(agreement) for agreement in agreements]
        denominator = sum(exponentials)
        for j in range(len(parents)):
            totals[j] = totals[j] + exponentials[j] / denominator * votes[j]
    return totals


def layer_norm(pose: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    mean = sum(pose) / pose.numel()
    variance = sum((x - mean) ** 2 for x in pose) / pose.numel()
    return (pose - mean) / torch.sqrt(variance + eps) * gain + bias


def linear_step(children: Tensor, weight: Tensor, parents: Tensor) -> Tensor:
    """(B, in, d), (in, out, a, b), (B, out, d') -> (B, out, d')."""
    transforms = [[weight[i, j] for j in range(weight.shape[1])] for i in range(weight.shape[0])]
    return torch.stack(
        [
            torch.stack(route(list(c), transforms, list(p)))
            for c, p in zip(children, parents, strict=True)
        ]
    )


def conv_step(children: Tensor, weight: Tensor, parents: Tensor, stride: int) -> Tensor:
    """(B, H, W, in, d), (k, k, in, out, a, b), (B, H', W', out, d') -> like parents."""
    k, _, n_in, n_out = weight.shape[:4]
    batch, height, width = parents.shape[:3]
    images = []
    for n in range(batch):
        rows = []
        for h in range(height):
            row = []
            for w in range(width):
                seen, transforms = [], []
                for y in range(k):
                    for x in range(k):
                        for i in range(n_in):
                            seen.append(children[n, stride * h + y, stride * w + x, i])
                            transforms.append([weight[y, x, i, j] for j in range(n_out)])
                row.append(torch.stack(route(seen, transforms, list(parents[n, h, w]))))
            rows.append(torch.stack(row))
        images.append(torch.stack(rows))
    return torch.stack(images)


class Layer:
    """A capsule layer for `inference`: its weight, LayerNorm and geometry."""

    def __init__(self, weight: Tensor, gain: Tensor, bias: Tensor, stride: int = 1) -> None:
        self.weight, self.gain, self.bias, self.stride = weight, gain, bias, stride

    @property
    def linear(self) -> bool:
        return self.weight.ndim == 4

    def zero_poses(self, children: Tensor) -> Tensor:
        a, b = self.weight.shape[-2:]
        d = children.shape[-1] // a * b
        n_out = self.weight.shape[-3]
        if self.linear:
            return children.new_zeros(children.shape[0], n_out, d)
        k = self.weight.shape[0]
        size = [(s - k) // self.stride + 1 for s in children.shape[1:3]]
        return children.new_zeros(children.shape[0], *size, n_out, d)

    def __call__(self, children: Tensor, parents: Tensor) -> Tensor:
        if self.linear:
            flat = children.flatten(1, -2)
            poses = linear_step(flat, self.weight, parents)
        else:
            poses = conv_step(children, self.weight, parents, self.stride)
        flat_poses = poses.reshape(-1, poses.shape[-1])
        normed = [layer_norm(pose, self.gain, self.bias) for pose in flat_poses]
        return torch.stack(normed).reshape(poses.shape)


def inference(
    primary: Tensor, layers: list[Layer], iterations: int, concurrent: bool = True
) -> list[Tensor]:
    """Procedure 2 from the primary capsules to the class capsules; all layers' final poses.

    With `concurrent=False` each layer finishes its iterations before the next one starts.
    """
    poses = [primary]
    for layer in layers:
        children = poses[-1]
        parents = layer.zero_poses(children)
        for _ in range(1 if concurrent else iterations):
            parents = layer(children, parents)
        poses.append(parents)
    if concurrent:
        for _ in range(iterations - 1):
            updated = [layer(poses[n], poses[n + 1]) for n, layer in enumerate(layers)]
            poses[1:] = updated
    return poses[1:]

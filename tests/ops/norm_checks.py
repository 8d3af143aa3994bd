"""LayerNorm by rows against plain PyTorch, on a card or in the interpreter. Not a test module.

Run by test_triton_interpreter.py in a process with TRITON_INTERPRET=1.
"""

import torch
from triton_interpreter_checks import poison_allocations

from capsroute.layers.primary import PoseNorm
from capsroute.ops.inverted.api import first_step, routing_step
from capsroute.ops.inverted.norm import Norm, Unfinished
from capsroute.ops.inverted.triton import geometry

# poses, rows
TINY = {
    "4×4": ((3, 5, 4, 6, 16), 4),
    "4×4, several tiles a program": ((40, 4, 4, 8, 16), 4),
    "6×6": ((2, 3, 3, 5, 36), 6),
    "6×6, several tiles a program": ((9, 4, 4, 8, 36), 6),
    "8×8": ((2, 3, 3, 4, 64), 8),
    "4 rows of 3": ((3, 2, 3, 3, 12), 4),
    "3×3": ((5, 2, 3, 2, 9), 3),
    "vector": ((2, 1, 1, 7, 24), 1),
}
PRIMARY = {
    "primary capsules, 4×4": ((37, 16, 16, 32, 16), 4),
    "primary capsules, 6×6": ((37, 16, 16, 32, 36), 6),
}
# image, capsules, elements of a pose, channels, rows
PROJECTED = {
    "4×4": ((3, 5, 4), 8, 16, 32, 4),
    "4×4, several tiles a program": ((9, 4, 4), 16, 16, 128, 4),
    "2×2": ((2, 3, 3), 32, 4, 16, 2),
    "vector": ((2, 3, 5), 8, 32, 16, 1),
    "one position": ((1, 1, 1), 8, 16, 64, 4),
}
LARGE_PROJECTED = {"primary capsules": ((37, 16, 16), 32, 16, 128, 4)}
BUDGETS = {"poses": 2.0, "∂poses": 3.0, "∂weight": 3.0, "∂bias": 3.0}


def plain(poses, norm, rows):
    return norm(poses).unflatten(-1, (rows, -1)).permute(0, 4, 1, 2, 3, 5)


def by_kernel(poses, norm, rows):
    from capsroute.ops.inverted.triton.norm import norm_by_rows

    return norm_by_rows(poses, norm.weight, norm.bias, norm.eps, rows)


def run(function, poses, norm, rows, cotangent):
    """Normalised poses and the three gradients."""
    inputs = [poses.requires_grad_(), norm.weight, norm.bias]
    out = function(poses, norm, rows)
    return [out, *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))]


def tensors(shape, rows, dtype, seed, device):
    generator = torch.Generator().manual_seed(seed)
    poses, cotangent = (torch.randn(shape, generator=generator) for _ in range(2))
    norm = PoseNorm(shape[-1])
    with torch.no_grad():
        norm.weight.copy_(torch.randn(shape[-1], generator=generator))
        norm.bias.copy_(torch.randn(shape[-1], generator=generator))
    cotangent = cotangent.unflatten(-1, (rows, -1)).permute(0, 4, 1, 2, 3, 5)
    poses = (3 * poses + 1).to(device, dtype)
    return poses, norm.to(device), rows, cotangent.to(device, dtype)


def check(shape, rows, dtype, seed=0, device="cpu"):
    """The kernels' error against fp64 is at most a few times plain PyTorch's."""
    poses, norm, rows, cotangent = tensors(shape, rows, dtype, seed, device)
    ours = run(by_kernel, poses.clone(), norm, rows, cotangent)
    theirs = run(plain, poses.clone(), norm, rows, cotangent)
    exact = run(plain, poses.double(), norm.double(), rows, cotangent.double())
    for (name, budget), got, low, want in zip(BUDGETS.items(), ours, theirs, exact, strict=True):
        assert got.dtype == low.dtype and got.shape == want.shape, name
        error, allowed = ((x.double() - want).norm() / want.norm() for x in (got, low))
        allowed = max(allowed, torch.finfo(low.dtype).eps)
        assert error <= budget * allowed, f"{name}: {error:.3g} > {budget} × {allowed:.3g}"


def unfinished(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    poses, *affine = (torch.randn(size, generator=generator) for size in (shape, *[shape[-1:]] * 2))
    return Unfinished(poses.to(dtype), Norm(*affine, 1e-5))


def projected(image, capsules, d, channels, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(*image, channels, generator=generator)
    projection = torch.randn(capsules, d, channels, generator=generator) / channels**0.5
    weight, bias = (torch.randn(d, generator=generator) for _ in range(2))
    eps = 0.1  # so large that it shows
    return Unfinished(features.to(dtype), Norm(weight, bias, eps), projection.to(dtype))


def check_projected(image, capsules, d, channels, rows, dtype, seed=0, device="cpu"):
    """Convolution, LayerNorm and move at once: the error is at most twice plain PyTorch's."""
    from capsroute.ops.inverted.triton.projection import fits, project_by_rows

    source, norm, projection = projected(image, capsules, d, channels, dtype, seed)
    source, projection = source.to(device), projection.to(device)
    norm = Norm(norm.weight.to(device), norm.bias.to(device), norm.eps)
    assert fits(source, projection, dtype)
    got = project_by_rows(source, projection, *norm, rows)
    low, want = (
        Unfinished(source, norm, projection).to(kind).finished() for kind in (dtype, torch.float64)
    )
    low, want = (x.unflatten(-1, (rows, -1)).permute(0, 4, 1, 2, 3, 5) for x in (low, want))
    assert got.dtype == dtype and got.shape == want.shape
    error, allowed = ((x.double() - want).norm() / want.norm() for x in (got, low))
    allowed = max(allowed, torch.finfo(dtype).eps)
    assert error <= BUDGETS["poses"] * allowed, f"{error:.3g} > 2 × {allowed:.3g}"


def check_operators():
    """Schema, fake tensors and autograd registration, as PyTorch checks them."""
    from capsroute.ops.inverted.triton import norm as kernels
    from capsroute.ops.inverted.triton.projection import project_by_rows

    poses, norm, rows, cotangent = tensors(*TINY["3×3"], torch.float32, 0, "cpu")
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (poses.requires_grad_(), norm.weight, norm.bias, norm.eps, rows)
    torch.library.opcheck(kernels.norm_by_rows, arguments, test_utils=utilities)
    without = ("test_schema", "test_faketensor")
    arguments = (cotangent.contiguous(), poses.detach(), norm.weight.detach(), norm.eps)
    torch.library.opcheck(kernels.norm_by_rows_backward, arguments, test_utils=without)
    source, norm, projection = projected((2, 3, 3), 8, 16, 16, torch.float16)
    arguments = (source, projection, *norm, 4)
    torch.library.opcheck(project_by_rows, arguments, test_utils=without)


def check_strides():
    """Poses and what the norm has learned may lie anywhere, as columns of a matrix do."""
    from capsroute.ops.inverted.triton.projection import project_by_rows

    poses, norm, rows, cotangent = tensors(*TINY["3×3"], torch.float32, 0, "cpu")
    apart = Norm(*(torch.stack([x, x + 1], 1)[:, 0] for x in (norm.weight, norm.bias)), norm.eps)
    strided = torch.stack([poses, poses + 1], -1)[..., 0]
    got = run(by_kernel, strided, apart, rows, cotangent)
    for one, other in zip(got, run(by_kernel, poses, norm, rows, cotangent), strict=True):
        assert torch.equal(one, other)
    children = projected((2, 3, 3), 8, 16, 16, torch.float16)
    source, (weight, bias, eps), projection = children
    apart = [torch.stack([x, x + 1], -1)[..., 0] for x in (source, projection, weight, bias)]
    want = project_by_rows(source, projection, weight, bias, eps, 4)
    assert torch.equal(project_by_rows(*apart, eps, 4), want)


def check_transforms():
    """Kernels know nothing of tangents: a step is refused, a first one goes without them."""
    generator = torch.Generator().manual_seed(0)
    weight, parents = (torch.randn(s, generator=generator) for s in ((12, 3, 2, 2), (2, 3, 4)))
    children = unfinished((2, 2, 2, 3, 4), torch.float32)
    poses = children.finished().flatten(1, -2)

    def step(poses):
        return routing_step(poses, weight, parents, impl="triton")

    def begin(source, impl):
        return first_step(children._replace(source=source), weight, impl=impl)

    tangent = torch.randn(children.shape, generator=generator)
    results = [
        torch.func.jvp(lambda x, impl=impl: begin(x, impl), (children.source,), (tangent,))[1]
        for impl in ("triton", "reference")
    ]
    torch.testing.assert_close(*results)
    try:
        torch.func.jvp(step, (poses,), (tangent.flatten(1, -2),))
    except ValueError as error:
        assert "`impl` must be 'reference' inside torch.func" in str(error), error
    else:
        raise AssertionError("a tangent was lost")


def check_first_step():
    """A first step finishes its children by one kernel, and gives what it gives after that."""
    from unittest import mock

    from capsroute.ops.inverted.triton import norm as kernels

    generator = torch.Generator().manual_seed(1)
    conv, linear = (
        torch.randn(shape, generator=generator) for shape in ((3, 3, 3, 5, 4, 4), (60, 5, 4, 4))
    )
    for dtype in (torch.float32, torch.float16):
        children = unfinished((2, 4, 5, 3, 16), dtype)
        for weight, stride in ((conv.to(dtype), 2), (linear.to(dtype), 1)):
            poses = children.finished()
            poses = poses.flatten(1, -2) if weight.ndim == 4 else poses
            want = routing_step(poses, weight, stride=stride)
            options = {"stride": stride, "impl": "triton"}
            spy = mock.patch.object(kernels, "norm_by_rows", wraps=kernels.norm_by_rows)
            with spy as taken:
                got = first_step(children, weight, **options)
            assert taken.call_count == 1
            tolerance = {"atol": 0.02, "rtol": 0.02} if dtype == torch.float16 else {}
            torch.testing.assert_close(got, want, **tolerance)
    compiled = torch.compile(first_step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(children, weight, **options), want, **tolerance)


def check_first_step_of_features():
    """Of features a first step makes its children, by one kernel where that fits, else by two."""
    from unittest import mock

    from capsroute.ops.inverted import triton
    from capsroute.ops.inverted.triton import norm, projection

    def calls(children, weight):
        with (
            mock.patch.object(projection, "project_by_rows", wraps=by_one) as one,
            mock.patch.object(norm, "norm_by_rows", wraps=by_two) as two,
        ):
            got = first_step(children, weight, impl="triton")
            assert got.requires_grad == torch.is_grad_enabled()
        want = routing_step(children.finished(), weight)
        torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
        return one.call_count, two.call_count

    by_one, by_two = projection.project_by_rows, norm.norm_by_rows
    generator = torch.Generator().manual_seed(1)
    for capsules, dtype, expected in (
        (8, torch.float16, (1, 0)),
        (7, torch.float16, (0, 1)),  # no whole tile
        (8, torch.float32, (0, 1)),
    ):
        children = projected((2, 4, 5), capsules, 16, 32, dtype)
        children.norm.weight.requires_grad_()
        weight = torch.randn(3, 3, capsules, 5, 4, 4, generator=generator).to(dtype)
        with torch.no_grad():
            assert calls(children, weight) == expected, (capsules, dtype)
        assert calls(children, weight) == (0, 1)  # there may be gradients
        assert not triton.can_project(*children[::2])  # the interpreter is for tests


if __name__ == "__main__":
    check_operators()
    check_first_step_of_features()
    check_strides()
    check_transforms()
    check_first_step()
    poison_allocations()
    geometry.multiprocessors = lambda device: 1  # so that programs get several tiles
    for shape, rows in TINY.values():
        for dtype in (torch.float32, torch.float16):  # bf16 is wrong in the interpreter
            check(shape, rows, dtype)
    for sizes in PROJECTED.values():
        check_projected(*sizes, torch.float16)

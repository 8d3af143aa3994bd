"""Run by test_triton_interpreter.py in a process with TRITON_INTERPRET=1.

Every tensor that the kernels allocate starts as NaN, so that an element nobody wrote shows.
"""

import itertools
import sys

import torch
import triton_cases as cases

from capsroute.ops.inverted import reference
from capsroute.ops.inverted import triton as kernels

# bf16 arithmetic is wrong in the interpreter, and torch's bf16 is no numpy type
DTYPES = (torch.float32, torch.float16)


def poison_allocations():
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poisoned(make):
        def allocate(*arguments, **options):
            made = make(*arguments, **options)
            if made.is_floating_point():
                made.detach().fill_(float("nan"))
            return made

        return allocate

    torch.empty, torch.empty_like = poisoned(empty), poisoned(empty_like)
    torch.Tensor.new_empty = poisoned(new_empty)


def check_coefficients(shapes):
    tensors, stride, scale = cases.layer(shapes, torch.float32, 0)
    children, weight, parents, _ = tensors
    options = {"stride": stride, "scale": scale}
    poses, coefficients = kernels.routing_step_with_coefficients(
        children, weight, parents, **options
    )
    want = reference.routing_step(children, weight, parents, **options)
    torch.testing.assert_close(poses, want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(coefficients, want[1], rtol=1e-4, atol=1e-5)


def check_operator(shapes):
    """Schema, fake tensors and autograd registration, as PyTorch checks them."""
    from capsroute.ops.inverted.triton.geometry import Geometry
    from capsroute.ops.inverted.triton.operators import inverted_backward, inverted_forward
    from capsroute.ops.inverted.triton.tile import Tile

    (children, weight, parents, cotangent), stride, scale = cases.layer(shapes, torch.float32, 0)
    numbers = (weight.shape[0], weight.shape[4], stride)
    weight = Tile.of(Geometry.of(children, parents, *numbers)).pack(weight)
    tensors = [tensor.requires_grad_() for tensor in (children, weight, parents)]
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    for keep in (False, True):
        arguments = (*tensors, *numbers, scale, keep)
        torch.library.opcheck(inverted_forward, arguments, test_utils=utilities)
    tensors = [tensor.detach() for tensor in (cotangent, *tensors)]
    torch.library.opcheck(
        inverted_backward,
        (*tensors, *numbers, scale),
        test_utils=("test_schema", "test_faketensor"),
    )


def check_one_graph(shapes):
    """The whole step, traced forward and backward by a compiler that may not leave its graph."""
    tensors, stride, scale = cases.layer(shapes, torch.float32, 0)
    compiled = torch.compile(kernels.routing_step, fullgraph=True, backend="aot_eager")
    want = cases.run(kernels.routing_step, tensors, stride, scale)
    for got, wanted in zip(cases.run(compiled, tensors, stride, scale), want, strict=True):
        torch.testing.assert_close(got, wanted)


def check_refusal(shapes):
    """Second derivatives are refused, also where no cotangent depends on what is differentiated."""
    (children, weight, parents, _), stride, scale = cases.layer(shapes, torch.float32, 0)
    children.requires_grad_()
    poses = kernels.routing_step(children, weight, parents, stride=stride, scale=scale)
    (slope,) = torch.autograd.grad(poses.sum(), children, create_graph=True)
    try:
        slope.sum().backward()
    except RuntimeError as error:
        assert "differentiated twice with impl='reference' only" in str(error), error
    else:
        raise AssertionError("a second derivative was not refused")


def check_errors(name, dtype):
    """Whether they are within the budget; says so if they are not."""
    try:
        cases.check(cases.TINY[name], dtype, seed=0, draws=10)
    except Exception as error:  # name every case that fails, not the first alone
        print(f"{name}, {dtype}: {type(error).__name__}: {error}")
        return False
    return True


def check_chunks():
    """Backward with two stacks at a time of five, and with one of three."""
    from capsroute.ops.inverted.triton import tuning

    whole, tuning.COEFFICIENT_BYTES = tuning.COEFFICIENT_BYTES, 512
    good = [check_errors(name, torch.float32) for name in ("conv 4×4", "linear 4×4")]
    tuning.COEFFICIENT_BYTES = whole
    return all(good)


def check_parts():
    """∂L/∂children from one part of the parents at a time, and from two, of four."""
    from capsroute.ops.inverted.triton import tuning

    whole, good = tuning.WINDOW_BYTES, []
    for tuning.WINDOW_BYTES in (0, 3 * 3 * 36 * 4 * 2):
        good += [check_errors("linear 6×6, 40 parents", dtype) for dtype in DTYPES]
    tuning.WINDOW_BYTES = whole
    return all(good)


def check_reads(shapes):
    """Nothing outside the children is read, though the last stack is not full of them."""
    from capsroute.ops.inverted.triton.geometry import Geometry
    from capsroute.ops.inverted.triton.operators import inverted_backward
    from capsroute.ops.inverted.triton.tile import Tile

    (children, weight, parents, cotangent), stride, scale = cases.layer(shapes, torch.float32, 0)
    numbers = (weight.shape[0], weight.shape[4], stride)
    packed = Tile.of(Geometry.of(children, parents, *numbers)).pack(weight)
    within = torch.full((2 * children.numel(),), float("nan"))[: children.numel()]
    within = within.view(children.shape).copy_(children)  # and NaN after it
    gradients = inverted_backward(cotangent, within, packed, parents, *numbers, scale)
    assert all(gradient.isfinite().all() for gradient in gradients), shapes


def check_groups():
    """Large poses in fp32 with four children a program, of nine, and tiles of different sizes."""
    from capsroute.ops.inverted.triton import tuning

    rows = {"large_shares": 32, "large_slopes": 16, "large_children": 64, "large_weight": 64}
    tuning.OVERRIDES.update({kernel: {"group": 4, "rows": rows[kernel]} for kernel in rows})
    good = check_errors("conv vector, in twos", torch.float32)
    tuning.OVERRIDES.clear()
    return good


def main():
    check_operator(cases.TINY["conv 2×2, stride 2"])
    check_refusal(cases.TINY["conv 2×2, stride 2"])
    check_one_graph(cases.TINY["linear 6×6"])
    check_one_graph(cases.TINY["linear vector"])
    check_reads(((2, 4, 3, 3, 64), (3, 3, 3, 4, 8, 8), 1))
    check_reads(((2, 1, 1, 6, 16), (1, 1, 6, 4, 4, 4), 1))
    check_reads(((2, 1, 1, 12, 4), (1, 1, 12, 4, 2, 2), 1))
    poison_allocations()
    good = [check_errors(name, dtype) for name, dtype in itertools.product(cases.TINY, DTYPES)]
    good.append(check_chunks())
    good.append(check_parts())
    good.append(check_groups())
    check_coefficients(cases.TINY["conv 2×2, stride 2"])
    check_coefficients(cases.TINY["conv vector"])
    sys.exit(not all(good))


if __name__ == "__main__":
    main()

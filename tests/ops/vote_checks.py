"""Moments of routed votes by kernel, on a card or in the interpreter. Not a test module.

Run by test_triton_interpreter.py in a process with TRITON_INTERPRET=1.
"""

import itertools
import math
import sys

import torch
import torch.nn.functional as F
import triton_interpreter_checks as interpreter

from capsroute.ops.em import em_routing
from capsroute.ops.inverted.activations import activated_routing_step
from capsroute.ops.inverted.triton.geometry import coefficient_dtype
from capsroute.ops.votes import votes_of
from capsroute.ops.votes.moments import Contest

# children, weight, stride; parents that compete by distance, by agreement, or not at all
TINY = {
    "conv 2×2, stride 2": ((2, 5, 4, 3, 4), (2, 2, 3, 5, 2, 2), 2),
    "conv 4×4": ((1, 4, 3, 2, 16), (3, 3, 2, 3, 4, 4), 1),
    "classes with coordinates": ((2, 1, 1, 7, 20), (1, 1, 7, 5, 5, 4), 1),
    "linear 6×6": ((2, 1, 1, 3, 36), (1, 1, 3, 3, 6, 6), 1),
    "linear 8×8": ((2, 1, 1, 2, 64), (1, 1, 2, 2, 8, 8), 1),
    "linear small vector": ((3, 1, 1, 5, 3), (1, 1, 5, 4, 3, 6), 1),
    "linear many parents": ((2, 1, 1, 2, 4), (1, 1, 2, 70, 2, 2), 1),
    "linear 6×6, 100 parents": ((2, 1, 1, 3, 36), (1, 1, 3, 100, 6, 6), 1),
    "one parent": ((2, 1, 1, 3, 4), (1, 1, 3, 1, 2, 2), 1),
}
# odd sizes, for a card
ODD = {
    "conv 4×4, stride 2": ((5, 11, 9, 7, 16), (3, 3, 7, 13, 4, 4), 2),
    "conv 4×4, 32 parents": ((7, 6, 7, 32, 16), (3, 3, 32, 32, 4, 4), 1),
    "conv 6×6": ((3, 9, 8, 5, 36), (3, 3, 5, 33, 6, 6), 2),
    "conv 3×3": ((3, 6, 5, 5, 9), (2, 2, 5, 7, 3, 3), 1),
    "classes with coordinates": ((37, 1, 1, 512, 20), (1, 1, 512, 10, 5, 4), 1),
    "100 classes": ((33, 1, 1, 130, 20), (1, 1, 130, 100, 5, 4), 1),
    "linear 6×6, 100 parents": ((33, 1, 1, 20, 36), (1, 1, 20, 100, 6, 6), 1),
    "linear small vector": ((37, 1, 1, 21, 5), (1, 1, 21, 11, 5, 7), 1),
}
COMPETING = ("by distance", "by agreement", "not at all")
FORWARD, BACKWARD = 2.0, 3.0  # how many times the allowed error


def layer(shapes, dtype, seed, device="cpu"):
    """Children, log-activations, weight, centre, query and prior; three cotangents; the stride."""
    children, weight, stride = shapes
    k, _, _, n_out, a, b = weight
    size = [(extent - k) // stride + 1 for extent in children[1:3]]
    parents = (children[0], *size, n_out, children[-1] // a * b)
    generator = torch.Generator().manual_seed(seed)

    def normal(shape):
        return torch.randn(shape, generator=generator).to(device)

    inputs = [
        normal(children).to(dtype),
        F.logsigmoid(normal(children[:-1])),
        (normal(weight) / a**0.5).to(dtype),
        normal(parents),
        F.softplus(normal(parents)) / parents[-1] ** 0.5,
        normal(parents[:-1]),
    ]
    # what the masses are given in common, no share may notice
    return inputs, [100 + normal(parents[:-1]), normal(parents), normal(parents)], stride


def moments(inputs, stride, competing, impl):
    children, log_activations, weight, centre, query, prior = inputs
    votes = votes_of(children, log_activations, weight, stride=stride, impl=impl)
    contest = None
    if competing != "not at all":
        contest = Contest(query, prior, gaussian=competing == "by distance")
    return votes.moments(centre, contest)[0]


def with_gradients(function, inputs, cotangents):
    """Results, then the gradients of those inputs that they depend on."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    results = function(inputs)
    cotangents = [x.to(y.dtype) for x, y in zip(cotangents, results, strict=True)]
    return results, torch.autograd.grad(results, inputs, cotangents, allow_unused=True)


def compare(function, inputs, cotangents, rounding=None, draws=()):
    """`function(inputs, impl)` by kernel is within a few times the error of plain fp32 PyTorch.

    That error is the largest over `draws` of inputs. `rounding` is what storage of less than fp32
    costs each result, and each gradient; that of fp32 unless given.
    """
    ours = with_gradients(lambda x: function(x, "triton"), inputs, cotangents)
    double, wide = ([x.to(t) for x in inputs] for t in (torch.float64, torch.float32))
    exact = with_gradients(lambda x: function(x, "tiled"), double, cotangents)
    theirs = [with_gradients(lambda x: function(x, "tiled"), wide, cotangents)]
    exacts = [exact]
    for others in draws:
        theirs.append(with_gradients(lambda x: function(x, "tiled"), others, cotangents))
        doubles = [x.double() for x in others]
        exacts.append(with_gradients(lambda x: function(x, "tiled"), doubles, cotangents))
    eps = torch.finfo(torch.float32).eps
    for part, budget in enumerate((FORWARD, BACKWARD)):
        rounded = rounding[part] if rounding else [eps] * len(ours[part])
        for index, (got, want, step) in enumerate(
            zip(ours[part], exact[part], rounded, strict=True)
        ):
            assert (got is None) == (want is None), (part, index)
            if got is None:
                continue
            allowed = [
                distance(t[part][index], e[part][index])
                for t, e in zip(theirs, exacts, strict=True)
            ]
            allowed = max(step, *allowed)
            error = distance(got, want)
            # `not <=` and not `>`: NaN fails
            assert error <= budget * allowed, (
                f"{part, index}: {error:.3g} > {budget} × {allowed:.3g}"
            )


def distance(x, exact):
    return ((x.double() - exact).norm() / (exact.norm() + 1e-30)).item()


def moments_rounding(shapes, dtype, competing):
    """What rounded shares, slopes and votes' gradients cost each result, and each gradient.

    Roundings of shares average out over the children that a parent sums up, or a stack that a
    kernel leaves out would pass for one. Of 16 bits an element loses eps / 4 in the mean.
    """
    _, weight, _ = shapes
    step = torch.finfo(coefficient_dtype(dtype)).eps
    # sums are fp32 themselves, so they cannot be closer than that
    of_parents = max(step / math.sqrt(math.prod(weight[:3])), torch.finfo(torch.float32).eps)
    stored = torch.finfo(dtype).eps / 2
    # an agreement's gradient sums up votes of either sign, which nothing averages out
    of_query = step / 2 if competing == "by agreement" else of_parents
    return [of_parents] * 3, [stored] * 3 + [of_parents, of_query, of_parents]


def check(shapes, dtype, competing, seed=0, device="cpu", draws=10):
    """The operator alone, with all its gradients."""
    inputs, cotangents, stride = layer(shapes, dtype, seed, device)
    others = [layer(shapes, torch.float32, seed + n, device)[0] for n in range(1, draws)]
    rounding = moments_rounding(shapes, dtype, competing)
    compare(
        lambda x, impl: moments(x, stride, competing, impl), inputs, cotangents, rounding, others
    )


def em_layer(size, kernel, stride, seed=0, device="cpu", n_in=3, n_out=5, batch=2):
    """Operands of EM routing between 4×4 poses; no kernel makes the class layer."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    window = (kernel, kernel) if kernel else ()
    inputs = [
        normal(batch, *size, n_in, 16),
        F.logsigmoid(normal(batch, *size, n_in)),
        0.5 * normal(*window, n_in, n_out, 4, 4) + torch.eye(4, device=device),
        normal(n_out),
        normal(n_out),
    ]
    above = [(extent - kernel) // stride + 1 for extent in size] if kernel else []
    return inputs, [normal(batch, *above, n_out, 16), normal(batch, *above, n_out)]


def check_em(size, kernel, stride=1, iterations=3, **options):
    """Routing as a whole, its iterations one upon another."""
    inputs, cotangents = em_layer(size, kernel, stride, **options)
    others = [em_layer(size, kernel, stride, **{**options, "seed": n})[0] for n in range(1, 6)]
    compare(
        lambda x, impl: em_routing(*x, iterations=iterations, stride=stride, impl=impl),
        inputs,
        cotangents,
        draws=others,
    )


def sharp_layer(seed, device="cpu"):
    """As trained: children agree, their poses are far from zero, and only some are active."""
    inputs, cotangents = em_layer((4, 5), 2, 1, seed, device, n_in=8, n_out=8)
    poses, log_activations, weight, *_ = inputs
    identity = torch.eye(4, device=device)
    inputs[0] = 30 + 0.05 * poses
    inputs[1] = F.logsigmoid(8 * (log_activations + 1))
    inputs[2] = identity + 0.002 * (weight - identity)
    return inputs, cotangents


def check_sharp(device="cpu"):
    inputs, cotangents = sharp_layer(0, device)
    others = [sharp_layer(seed, device)[0] for seed in range(1, 6)]
    compare(
        lambda x, impl: em_routing(*x, iterations=3, impl=impl),
        inputs,
        cotangents,
        draws=others,
    )


def check_strides(device="cpu"):
    """Of children, of what belongs to parents, and of gradients."""
    inputs, cotangents, stride = layer(TINY["conv 4×4"], torch.float32, 0, device)
    cotangents = [x[:1, :1, :1].expand(x.shape) for x in cotangents]
    others = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    assert not any(x.is_contiguous() for x in (*others, *cotangents))

    def step(inputs):
        return moments(inputs, stride, "by distance", "triton")

    contiguous = with_gradients(step, inputs, [x.contiguous() for x in cotangents])
    for some, same in zip(contiguous, with_gradients(step, others, cotangents), strict=True):
        for one, other in zip(some, same, strict=True):
            assert torch.equal(one, other)


def activated_layer(seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    inputs = [
        normal(2, 5, 4, 3, 16),
        F.logsigmoid(normal(2, 5, 4, 3)),
        normal(3, 3, 3, 5, 4, 4),
        normal(2, 3, 2, 5, 16),
        F.logsigmoid(normal(2, 3, 2, 5)),
        normal(5),
        normal(5),
    ]
    return inputs, [normal(2, 3, 2, 5, 16), normal(2, 3, 2, 5)]


def check_activated(device="cpu"):
    """A step of ablation C."""
    inputs, cotangents = activated_layer(device=device)
    others = [activated_layer(seed, device)[0] for seed in range(1, 6)]
    compare(
        lambda x, impl: activated_routing_step(*x, inverse_temperature=0.1, impl=impl)[:2],
        inputs,
        cotangents,
        draws=others,
    )


def check_nobody_is_active(device="cpu"):
    """Children without any activity at all: finite, as with tiles."""
    inputs, cotangents = em_layer((4, 4), 3, 1, device=device)
    inputs[1].fill_(-torch.inf)
    results, gradients = with_gradients(
        lambda x: em_routing(*x, iterations=2, impl="triton"), inputs, cotangents
    )
    assert all(x.isfinite().all() for x in (*results, *gradients))


def check_operator(shapes):
    """Schema, fake tensors and autograd registration, as PyTorch checks them."""
    from capsroute.ops.inverted.triton.geometry import Geometry
    from capsroute.ops.inverted.triton.tile import Tile
    from capsroute.ops.votes.triton.operators import vote_moments, vote_moments_backward

    (children, log_a, weight, centre, query, prior), cotangents, stride = layer(
        shapes, torch.float32, 0
    )
    numbers = (weight.shape[0], weight.shape[4], stride)
    packed = Tile.of(Geometry.of(children, centre, *numbers)).pack(weight)
    none = centre.new_empty(0)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    for above in ((query, prior), (none, none)):
        operands = [x.requires_grad_() for x in (children, log_a.exp(), packed, centre, *above)]
        arguments = (*operands, *numbers, True)
        torch.library.opcheck(vote_moments, arguments, test_utils=utilities)
        with torch.no_grad():
            mass, first, _ = vote_moments(*arguments)
            saved = [x.detach() for x in (*cotangents, mass, first, *operands)]
            torch.library.opcheck(
                vote_moments_backward,
                (*saved, *numbers, True),
                test_utils=("test_schema", "test_faketensor"),
            )


def check_one_graph():
    """All of EM routing, traced forward and backward by a compiler that may not leave its graph."""
    inputs, cotangents = em_layer((4, 4), 3, 1)

    def route(inputs):
        return em_routing(*inputs, iterations=2, impl="triton")

    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
    want = with_gradients(route, inputs, cotangents)
    got = with_gradients(compiled, inputs, cotangents)
    for some, others in zip(got, want, strict=True):
        for one, other in zip(some, others, strict=True):
            torch.testing.assert_close(one, other)


def check_autocast(device="cpu", dtype=torch.float16):
    """Poses and transforms are rounded to autocast's dtype, and nothing else."""
    inputs, _ = em_layer((4, 4), 3, 1, device=device)
    rounded = [x.to(dtype).float() if at in (0, 2) else x for at, x in enumerate(inputs)]
    want = em_routing(*rounded, iterations=2, impl="tiled")
    with torch.autocast(device, dtype=dtype):
        got = em_routing(*inputs, iterations=2, impl="triton")
    bound = FORWARD * max(1e-5, torch.finfo(coefficient_dtype(dtype)).eps)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.float32 and distance(one, other.double()) <= bound


def check_reads(shapes):
    """Nothing outside the children is read, though the last stack is not full of them."""
    inputs, cotangents, stride = layer(shapes, torch.float32, 0)
    for at in (0, 1):
        within = torch.full((2 * inputs[at].numel(),), float("nan"))[: inputs[at].numel()]
        inputs[at] = within.view(inputs[at].shape).copy_(inputs[at])  # and NaN after it
    results, gradients = with_gradients(
        lambda x: moments(x, stride, "by distance", "triton"), inputs, cotangents
    )
    assert all(x.isfinite().all() for x in (*results, *gradients)), shapes


def check_refusals():
    """Second derivatives, and shares that kernels do not keep."""
    inputs, _ = em_layer((4, 4), 3, 1)
    poses = inputs[0].requires_grad_()
    out, _ = em_routing(*inputs, iterations=2, impl="triton")
    (slope,) = torch.autograd.grad(out.sum(), poses, create_graph=True)
    for function, message in (
        (lambda: slope.sum().backward(), "differentiated twice"),
        (
            lambda: votes_of(*inputs[:3], impl="triton", keep=True),
            "got 'triton': the shares are wanted",
        ),
        (
            lambda: em_routing(*[x.double() for x in inputs], iterations=1, impl="triton"),
            "not torch.float64",
        ),
    ):
        try:
            function()
        except (RuntimeError, ValueError) as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"{message!r} was not said")


def check_chunks():
    """Some stacks at a time, of several, forward and backward."""
    from capsroute.ops.inverted.triton import tuning

    whole, tuning.COEFFICIENT_BYTES = tuning.COEFFICIENT_BYTES, 512
    for competing in COMPETING:
        check(TINY["conv 4×4"], torch.float32, competing)
        check(TINY["classes with coordinates"], torch.float32, competing)
    tuning.COEFFICIENT_BYTES = whole


def main():
    check_operator(TINY["conv 2×2, stride 2"])
    check_one_graph()
    check_refusals()
    check_reads(((2, 4, 3, 3, 64), (3, 3, 3, 4, 8, 8), 1))
    check_reads(((2, 1, 1, 6, 20), (1, 1, 6, 4, 5, 4), 1))
    interpreter.poison_allocations()
    good = True
    for name, dtype, competing in itertools.product(TINY, interpreter.DTYPES, COMPETING):
        try:
            check(TINY[name], dtype, competing)
        except Exception as error:  # name every case that fails, not the first alone
            print(f"{name}, {dtype}, {competing}: {type(error).__name__}: {error}")
            good = False
    check_chunks()
    check_sharp()
    check_strides()
    check_em((5, 4), 3)
    check_em((5, 6), 2, stride=2)
    check_em((2, 3), None)
    check_activated()
    check_nobody_is_active()
    check_autocast()
    sys.exit(not good)


if __name__ == "__main__":
    main()

"""`routing_step(norm=…)`: a LayerNorm that the first iteration takes along."""

import os
import subprocess
import sys
from pathlib import Path

import norm_checks
import pytest
import torch

from capsroute.layers import CapsuleStack, ConvCaps, LinearCaps, PrimaryCaps
from capsroute.layers.primary import PoseNorm
from capsroute.ops.inverted import routing_step


@pytest.mark.parametrize("impl", ["auto", "tiled", "reference"])
@pytest.mark.parametrize("with_parents", [False, True])
def test_is_the_same_as_normalising_before(impl, with_parents):
    torch.manual_seed(0)
    children, weight = torch.randn(2, 4, 4, 3, 4), torch.randn(3, 3, 3, 5, 2, 2)
    parents = torch.randn(2, 2, 2, 5, 4) if with_parents else None
    norm = PoseNorm(4)
    want = routing_step(norm(children), weight, parents, impl=impl)
    assert torch.equal(
        routing_step(children, weight, parents, impl=impl, norm=norm.learned()), want
    )


def test_a_norm_of_other_poses_is_refused():
    children, weight = torch.randn(2, 3, 4), torch.randn(3, 5, 2, 2)
    with pytest.raises(ValueError, match="`norm` must be over poses of 4 elements, got 16"):
        routing_step(children, weight, norm=PoseNorm(16).learned())


@pytest.mark.parametrize("schedule", ["concurrent", "sequential"])
@pytest.mark.parametrize("initial_poses", ["zeros", "learned"])
@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
def test_a_stack_normalises_its_primary_capsules(schedule, initial_poses, iterations):
    torch.manual_seed(0)
    primary = PrimaryCaps(3, 4, 16)
    options = {"initial_poses": initial_poses}
    layers = [ConvCaps(4, 4, 16, **options), LinearCaps(4 * 9, 3, 16, **options)]
    stack = CapsuleStack(layers, iterations=iterations, schedule=schedule)
    features = torch.randn(2, 3, 5, 5)
    got = stack(primary.poses(features), primary.norm)
    torch.testing.assert_close(got, stack(primary(features)))


def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    script = Path(__file__).with_name("norm_checks.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernels_compile(capability, dtype):
    pytest.importorskip("triton")
    import triton_compiler

    from capsroute.ops.inverted.triton import norm

    poses, weight = torch.empty((128, 16, 16, 32, 16), dtype=dtype), torch.empty(16)
    with triton_compiler.compiling(capability) as compiled:
        out = norm.norm_by_rows._init_fn(poses, weight, weight, 1e-5, 4)
        norm.norm_by_rows_backward._init_fn(out, poses, weight, 1e-5)
    names = [kernel.__name__ for kernel, _, _ in compiled]
    assert names == ["norm_kernel", "norm_gradient_kernel", "add_kernel"]
    for _, _, made in compiled:
        assert triton_compiler.resources(made)[1] == 0  # nothing is spilled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*norm_checks.TINY, "primary capsules"])
def test_the_kernels_on_a_card(name, dtype):
    shape, rows = norm_checks.TINY.get(name, ((37, 16, 16, 32, 16), 4))
    for seed in range(5):
        norm_checks.check(shape, rows, dtype, seed, "cuda")

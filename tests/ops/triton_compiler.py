"""Compiles the kernels that a step would launch, for a GPU that need not exist."""

import contextlib

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from capsroute.ops.inverted.triton import geometry

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages")


def _signature(value):
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compile_launch(kernel, arguments, capability):
    """What `kernel[grid](**arguments)` would compile, with the specialisations that matter."""
    constants = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
    signature, attributes = {}, {}
    for p in kernel.params:
        if p.is_constexpr:
            signature[p.name] = "constexpr"
            continue
        value = arguments[p.name]
        signature[p.name] = _signature(value)
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if isinstance(value, int) and value == 1:  # as the launcher does
            signature[p.name], constants[p.name] = "constexpr", 1
        elif aligned:
            attributes[(p.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@contextlib.contextmanager
def compiling(monkeypatch, capability, multiprocessors=132):
    """Inside, launches compile instead of running; yields the list of what was compiled."""
    compiled = []

    def launch(kernel, grid, **arguments):
        compiled.append((kernel, grid, compile_launch(kernel, arguments, capability)))

    with monkeypatch.context() as patch:
        patch.setattr(geometry, "launch", launch)
        patch.setattr(geometry, "multiprocessors", lambda device: multiprocessors)
        yield compiled

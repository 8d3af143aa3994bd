"""Compiles the kernels that a step would launch, for a GPU that need not exist, and reads them."""

import contextlib
import re
import subprocess
import tempfile

import torch
import triton
import vote_checks
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.backward import gradients
from capsroute.ops.inverted.triton.forward import weighted_votes
from capsroute.ops.inverted.triton.geometry import Geometry
from capsroute.ops.inverted.triton.tile import Tile, is_small
from capsroute.ops.votes.moments import Contest
from capsroute.ops.votes.triton import backward as votes_backward
from capsroute.ops.votes.triton import forward as votes_forward
from capsroute.ops.votes.triton.launch import Operands

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
        if p.do_not_specialize:
            continue
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if isinstance(value, int) and value == 1:  # as the launcher does
            signature[p.name], constants[p.name] = "constexpr", 1
        elif aligned:
            attributes[(p.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@contextlib.contextmanager
def compiling(capability, multiprocessors=132):
    """Inside, launches compile instead of running; yields (kernel, arguments, compiled) of each."""
    compiled, saved = [], (geometry.launch, geometry.multiprocessors)

    def launch(kernel, grid, **arguments):
        made = compile_launch(kernel, arguments, capability)
        compiled.append((kernel, {"grid": grid, **arguments}, made))

    geometry.launch, geometry.multiprocessors = launch, lambda device: multiprocessors
    try:
        yield compiled
    finally:
        geometry.launch, geometry.multiprocessors = saved


def compile_step(shapes, dtype, capability):
    """Every kernel of a forward and a backward pass, as `compiling` gives them."""
    children, weight, stride = shapes
    children, weight = torch.empty(children, dtype=dtype), torch.empty(weight, dtype=dtype)
    k, _, _, n_out, a, b = weight.shape
    size = [(extent - k) // stride + 1 for extent in children.shape[1:3]]
    parents = children.new_empty(len(children), *size, n_out, children.shape[-1] // a * b)
    sizes = Geometry.of(children, parents, k, a, stride)
    if is_small(sizes):
        weight = Tile.of(sizes).pack(weight)
    with compiling(capability) as compiled:
        weighted_votes(children, weight, parents, sizes, 0.25, keep=False)
        gradients(parents.clone(), children, weight, parents, sizes, 0.25)
    return compiled


def compile_moments(shapes, dtype, capability, competing):
    """Every kernel of the moments of votes and their gradients, as `compiling` gives them."""
    (children, log_activations, weight, centre, query, prior), _, stride = vote_checks.layer(
        shapes, dtype, 0
    )
    sizes = Geometry.of(children, centre, weight.shape[0], weight.shape[4], stride)
    packed = Tile.of(sizes).pack(weight)
    given = Operands(sizes, children, log_activations.exp(), packed, centre)
    contest = None
    if competing != "not at all":
        contest = Contest(query, prior, gaussian=competing == "by distance")
    with compiling(capability) as compiled:
        found = votes_forward.moments(given, contest)
        votes_backward.gradients(given, contest, found[:2], found)
    return compiled


def _dump(tool, *options, cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(compiled):
    """Registers a thread, and bytes of stack, which is where spilled registers go."""
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    usage = _dump(cuobjdump, "--dump-resource-usage", cubin=compiled.asm["cubin"])
    return tuple(int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK"))


def main_loop(compiled):
    """Opcodes of the longest loop, in order."""
    listing = _dump(triton.knobs.nvidia.nvdisasm.path, "-c", cubin=compiled.asm["cubin"])
    code, labels, loops = [], {}, [(0, 0)]
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
            code.append(found.group(1).split()[0])
            back = re.search(r"BRA.*`\((\.L_\w+)\)", found.group(1))
            if back and labels.get(back.group(1), len(code)) < len(code):
                loops.append((labels[back.group(1)], len(code)))
    first, last = max(loops, key=lambda loop: loop[1] - loop[0])
    return code[first:last]

"""A model as a graph: `torch.export`, and from there ONNX.

Graphs hold the plain formula of a routing step (see `ops.inverted.api`): tiles and fused
kernels depend on the batch or on the device, which a graph must not.
"""

import copy
import importlib
import io
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from capsroute.extras import why_unusable
from capsroute.logs import errors_only
from capsroute.models.base import ImageClassifier

EXAMPLES = 2  # images to trace with: PyTorch would take 0 or 1 for a constant
INPUT, OUTPUT = "images", "scores"
METADATA = "capsroute"
"""Key of the description in an ONNX file's metadata."""
EXTRA_FILE = "capsroute.json"
"""Where a .pt2 file keeps it."""


def torch_program(model: ImageClassifier, batch: int | None) -> torch.export.ExportedProgram:
    """The model as `torch.export` sees it, for `batch` images or, without one, for any number."""
    model = copy.deepcopy(model).cpu().eval()
    count = EXAMPLES if batch is None else batch
    images = torch.rand(count, model.in_channels, *model.image_size)
    shapes = None if batch else ({0: torch.export.Dim("batch", min=1)},)
    with torch.no_grad():
        return torch.export.export(model, (images,), dynamic_shapes=shapes)


def pt2_bytes(model: ImageClassifier, description: dict[str, Any], batch: int | None) -> bytes:
    data = io.BytesIO()
    extra = {EXTRA_FILE: json.dumps(description)}
    torch.export.save(torch_program(model, batch), data, extra_files=extra)
    return data.getvalue()


def onnx_bytes(model: ImageClassifier, description: dict[str, Any], batch: int | None) -> bytes:
    check_usable("onnx", "onnxscript", "onnxruntime")
    program = torch_program(model, batch)
    with _quiet():
        converted = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[INPUT],
            output_names=[OUTPUT],
            external_data=False,
            verbose=False,
        )
    assert converted is not None  # it is, with `dynamo`
    proto = converted.model_proto
    entry = proto.metadata_props.add()
    entry.key, entry.value = METADATA, json.dumps(description)
    return proto.SerializeToString()


def check_usable(*packages: str) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except (ImportError, RuntimeError) as error:
            why = why_unusable(package, "export", error)
            raise ValueError(f"an ONNX file needs {package}, which {why}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's word that torchvision is missing, and about its own old names."""
    with errors_only("torch.onnx"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        yield

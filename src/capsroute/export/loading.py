"""Exported files read back: the model's description, and a function that runs it on the CPU."""

import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsroute.export.graph import EXTRA_FILE, INPUT, METADATA, check_usable
from capsroute.logs import errors_only
from capsroute.models.description import Description, Run

PROBABILITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda scores: scores.softmax(dim=-1),
    "sigmoid": lambda scores: scores.sigmoid(),
    "identity": lambda scores: scores,
}


def load_exported(path: str | Path) -> tuple[Description, Run]:
    """What an `.onnx` or `.pt2` file of `capsroute export` says of its model, and the model.

    The function takes float images (B, C, H, W) to probabilities (B, classes), on the CPU.
    """
    metadata, scores = load_scores(Path(path))
    to_probabilities = PROBABILITIES[metadata["probabilities"]]
    return (
        Description(
            name=metadata["model"],
            class_names=metadata["class_names"],
            image_size=(metadata["image_size"][0], metadata["image_size"][1]),
            in_channels=metadata["in_channels"],
            multilabel=metadata["multilabel"],
            iterations=metadata["iterations"],
            resize=None if metadata["resize"] is None else tuple(metadata["resize"]),
        ),
        lambda images: to_probabilities(scores(images)),
    )


def load_scores(path: Path) -> tuple[dict[str, Any], Run]:
    """An exported file's metadata, and a function from images to scores."""
    metadata, run = _load_onnx(path) if path.suffix == ".onnx" else _load_pt2(path)
    fixed = metadata["batch"]
    return metadata, run if fixed is None else _in_batches_of(fixed, run)


def _load_onnx(path: Path) -> tuple[dict[str, Any], Run]:
    check_usable("onnxruntime")
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has classes of its own for every kind of failure
        raise _broken(path, error) from None
    held = session.get_modelmeta().custom_metadata_map

    def run(images: Tensor) -> Tensor:
        (scores,) = session.run(None, {INPUT: images.detach().cpu().float().numpy()})
        return torch.from_numpy(scores)

    return _read(path, held.get(METADATA)), run


def _load_pt2(path: Path) -> tuple[dict[str, Any], Run]:
    if not zipfile.is_zipfile(path):
        raise _broken(path, "it is no zip archive, or is cut short")
    extra = {EXTRA_FILE: ""}
    try:
        # it logs a traceback before it raises, and 2.11 warns of how it reads its own weights
        with errors_only("torch.export"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            module = torch.export.load(path, extra_files=extra).module()
    except Exception as error:  # zip, pickle and torch errors alike, whose words point to that log
        raise _broken(path, "PyTorch finds no program in it") from error
    return _read(path, extra[EXTRA_FILE]), lambda images: module(images.detach().cpu().float())


def _read(path: Path, text: str | None) -> dict[str, Any]:
    if not text:
        raise ValueError(f"{path} must be a file of `capsroute export`: it describes no model")
    return json.loads(text)


def _broken(path: Path, error: Exception | str) -> ValueError:
    why = str(error).strip().split("\n")[0]
    return ValueError(f"{path} must be a whole file of `capsroute export`: {why}")


def _in_batches_of(size: int, run: Run) -> Run:
    """For a graph whose batch is fixed: the last batch is filled up with its last image."""

    def padded(images: Tensor) -> Tensor:
        parts = []
        for part in images.split(size):
            filling = part[-1:].expand(size - len(part), *part.shape[1:])
            parts.append(run(torch.cat([part, filling]))[: len(part)])
        return torch.cat(parts)

    return padded

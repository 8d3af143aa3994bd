"""A trained model that takes pictures, whatever file it came from.

    predictor = Predictor.load("runs/pets")
    predictor.predict([Image.open("cat.jpg")])[0].labels

How a picture becomes the model's input is written in the checkpoint, and it is what
`data/image_folder.py` does in training: EXIF rotations applied, 16 bits scaled to 8, transparency
laid on white, one channel or three, scaled to cover the model's size, the middle cut out. Nothing
is guessed from the picture itself. In particular nothing is inverted: a model that learned light
digits on a dark ground (MNIST) reads dark ink on white paper badly, and `Predictor.remark` says so.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from capsroute.data.datasets import DIGITS
from capsroute.data.decoding import fitted
from capsroute.devices import choose_device
from capsroute.export import load_exported
from capsroute.models.base import THRESHOLD, ImageClassifier
from capsroute.models.description import Description, Run
from capsroute.models.factory import load_model
from capsroute.models.sources import EXPORTED, find_checkpoint

KINDS = "a run's folder, a checkpoint, an exported file or a pretrained model"
BRIGHT = 0.5  # mean of an image from which on its ground is taken to be light


@dataclass(frozen=True)
class Prediction:
    """What the model sees in one image."""

    labels: list[str]
    """The predicted class; for a multi-label model, any number of them, most likely first."""
    ranked: list[tuple[str, float]]
    """The `top_k` likeliest classes with their probabilities, most likely first."""
    remark: str | None = None
    """What to know about the image, such as that its background is light."""

    def as_dict(self, top_k: int | None = None) -> dict[str, Any]:
        """As a dictionary, like those of `capsroute predict --json` and the server's API."""
        ranked = [{"label": name, "probability": share} for name, share in self.ranked[:top_k]]
        return {"labels": self.labels, "ranked": ranked, "remark": self.remark}


class Predictor:
    """Classifies pictures with a trained model."""

    def __init__(
        self, description: Description, run: Run, model: ImageClassifier | None = None
    ) -> None:
        self.description = description
        self.name = description.name
        self.class_names = description.class_names
        self.image_size = description.image_size
        self.in_channels = description.in_channels
        self.multilabel = description.multilabel
        self.iterations = description.iterations
        self.model = model  # None for an exported file, which cannot be explained
        self.checkpoint: Path | None = None  # the file that the weights came from, if any
        self.source: str | None = None  # what the user called it, without the way there
        self._run = run

    @classmethod
    def load(
        cls, source: str | Path, *, iterations: int | None = None, device: str = "auto"
    ) -> "Predictor":
        """Load a run's folder, a checkpoint, a pretrained model or an exported file.

        Args:
            source: a folder that holds `model.safetensors`, such a file, the name of a model whose
                weights ship with the package, or an `.onnx` or `.pt2` file of `capsroute export`.
            iterations: number of routing iterations, if not the model's own.
            device: `auto`, `cpu` or `cuda`; an exported file runs on the CPU and takes only the
                first two.
        """
        path = Path(source).expanduser()
        if path.suffix in EXPORTED and path.is_file():
            predictor = cls._from_exported(path, iterations, device)
        else:
            checkpoint = find_checkpoint(source, iterations, expected=KINDS)
            predictor = cls._from_checkpoint(checkpoint, iterations, device)
        # of `.` and `..` too, and of a link its own name, not that of what it leads to
        predictor.source = os.path.basename(os.path.abspath(path))  # noqa: PTH100, PTH119
        return predictor

    @classmethod
    def from_model(cls, model: ImageClassifier, *, device: str = "auto") -> "Predictor":
        """Wrap a model in memory, which is moved to `device` and put in evaluation mode."""
        where = choose_device(device)
        model = model.to(where).eval()

        def run(images: Tensor) -> Tensor:
            return model.probabilities(model(images.to(where))).float().cpu()

        return cls(Description.of(model), run, model)

    @classmethod
    def _from_checkpoint(cls, path: Path, iterations: int | None, device: str) -> "Predictor":
        changes = {} if iterations is None else {"iterations": iterations}
        model = load_model(path, **changes)
        predictor = cls.from_model(model, device=device)
        predictor.checkpoint = path
        return predictor

    @classmethod
    def _from_exported(cls, path: Path, iterations: int | None, device: str) -> "Predictor":
        if device not in ("auto", "cpu"):
            raise ValueError(
                f"`device` must be auto or cpu for {path}, got {device!r}: "
                "an exported file runs on the CPU"
            )
        description, run = load_exported(path)
        if iterations not in (None, description.iterations):
            raise ValueError(
                f"`iterations` must be {description.iterations} for {path}, got {iterations}: "
                "an exported file's routing is fixed; export the model again"
            )
        return cls(description, run)

    @property
    def title(self) -> str:
        """The run or file with the model in it, such as `pets (inverted_resnet_cifar10)`."""
        if self.source in (None, "", self.name):
            return self.name
        return f"{self.source} ({self.name})"

    def prepare(self, image: Image.Image) -> Tensor:
        """A picture as the model's input, (C, H, W), floats in [0, 1].

        A JPEG that was opened and not yet read is decoded at a fraction of its size.
        """
        if not isinstance(image, Image.Image):
            raise TypeError(
                f"`image` must be a picture of Pillow, got a {type(image).__name__}; "
                "`Image.open` reads a file, `answer` takes prepared tensors"
            )
        if self.in_channels not in (1, 3):
            raise ValueError(
                f"{self.name} takes images of {self.in_channels} channels; "
                "pictures have 1 (grey) or 3 (colour)"
            )
        height, width = self.description.resize or self.image_size
        pixels = fitted(image, (height, width), self.in_channels)
        rows, columns = self.image_size
        top, left = (height - rows) // 2, (width - columns) // 2
        cut = pixels[top : top + rows, left : left + columns].transpose(2, 0, 1)
        return torch.from_numpy(cut.astype(np.float32) / 255.0)

    def remark(self, image: Tensor) -> str | None:
        """What a user should know of a prepared image, if anything."""
        if _learned_digits_on_black(self.description) and image.mean().item() > BRIGHT:
            return (
                "a light background; this model learned light digits on a dark one: "
                "if the digits are dark, invert the image first"
            )
        return None

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """(B, C, H, W) floats in [0, 1] to (B, classes), float32 on the CPU."""
        result = self._run(images)
        if not result.isfinite().all():
            raise ValueError(f"{self.name} gave scores that are not finite; its weights are broken")
        return result

    def decide(self, probabilities: Tensor, top_k: int = 5) -> list[Prediction]:
        """The answer for each row of probabilities, and its `top_k` likeliest classes."""
        if top_k < 1:
            raise ValueError(f"`top_k` must be at least 1, got {top_k}")
        return [self._decide(row, top_k) for row in probabilities.tolist()]

    def _decide(self, row: list[float], top_k: int) -> Prediction:
        pairs = zip(self.class_names, row, strict=True)
        ranked = sorted(pairs, key=lambda pair: -pair[1])
        if self.multilabel:
            labels = [name for name, probability in ranked if probability > THRESHOLD]
        else:
            labels = [ranked[0][0]]
        return Prediction(labels, ranked[:top_k])

    def answer(self, images: Sequence[Tensor], top_k: int = 5) -> list[Prediction]:
        """What each prepared image shows, with what is to be remarked on; one batch."""
        if not images:
            return []
        answers = self.decide(self.probabilities(torch.stack(list(images))), top_k)
        return [
            replace(answer, remark=self.remark(image))
            for answer, image in zip(answers, images, strict=True)
        ]

    def predict(self, images: Sequence[Image.Image], top_k: int = 5) -> list[Prediction]:
        """Classify pictures, all in one batch."""
        return self.answer([self.prepare(image) for image in images], top_k)


def _learned_digits_on_black(description: Description) -> bool:
    """Whether it is a model of DiverseMultiMNIST; a folder's model need not have its classes."""
    return description.multilabel and description.class_names == list(DIGITS)

"""What is known of a model without its code: enough to give it images and to name its answers."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from capsroute.models.base import ImageClassifier, class_names_of


@dataclass(frozen=True)
class Description:
    """What a file says of its model, beside the weights."""

    name: str
    class_names: list[str]
    image_size: tuple[int, int]
    in_channels: int
    multilabel: bool
    iterations: int | None = None
    """Routing iterations; None for a model that does not route."""
    resize: tuple[int, int] | None = None
    """Size that pictures are brought to before the middle is cut out; `image_size` if None."""

    @classmethod
    def of(cls, model: ImageClassifier) -> "Description":
        return cls(
            model.name,
            class_names_of(model),
            model.image_size,
            model.in_channels,
            model.task.multilabel,
            model.iterations,
            model.resize,
        )


Run = Callable[[Tensor], Tensor]
"""Float images (B, C, H, W) on the CPU to probabilities (B, classes) on the CPU."""

"""What every model of the registry has in common."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from capsroute.layers.checks import check_counts
from capsroute.ops.precision import widened
from capsroute.ops.tracing import cast

Size = int | tuple[int, int]

CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2023, 0.1994, 0.2010)
# what convolutions and poolings of PyTorch say of an image without room for their kernel
TOO_SMALL = ("Kernel size can't be greater", "Output size is too small")
THRESHOLD = 0.5  # probability above which a class belongs to a multi-label answer


@dataclass(frozen=True)
class Routing:
    """What routing did with one batch.

    `poses[layer][iteration]` and `coefficients[layer][iteration]` cover every iteration of every
    routed layer; layer 0 is the first above the primary capsules. Late updates of a lower layer may
    never reach the scores: `used[layer]` is the index of its last iteration that does, so
    `coefficients[layer][used[layer]]` are the ones that explain a prediction.
    """

    scores: Tensor
    poses: list[list[Tensor]]
    coefficients: list[list[Tensor]]
    used: list[int]


class Normalize(nn.Module):
    """(images − mean) / std, channel by channel.

    Buffers, so that exports carry them; not part of the state dict, since they follow from the
    `Task` and were never learned. A model that was built on the meta device has lost them: they
    are filled again when its weights are loaded.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.values = {"mean": tuple(mean), "std": tuple(std)}
        for name, value in self.values.items():
            self.register_buffer(name, torch.tensor(value).view(-1, 1, 1), persistent=False)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        assign = local_metadata.get("assign_to_params_buffers", False)
        for name, value in self.values.items():
            buffer = getattr(self, name)
            if buffer.is_meta and assign:
                buffer = torch.empty_like(buffer, device="cpu")
                setattr(self, name, buffer)
            buffer.copy_(torch.tensor(value, device="cpu").view(-1, 1, 1))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


def as_size(image_size: Size) -> tuple[int, int]:
    """`32` or `(32, 48)` -> (height, width), or a one-line error."""
    match image_size:
        case (height, width) if _is_count(height) and _is_count(width):
            return height, width
        case int() as side if _is_count(side):
            return side, side
    raise ValueError(f"`image_size` must be a positive integer or a pair, got {image_size!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_channels(argument: str, values: Any, above: float) -> None:
    if values is None:
        return
    numbers = isinstance(values, Sequence) and all(isinstance(v, int | float) for v in values)
    if not numbers or not values or not all(above < value < math.inf for value in values):
        sign = "positive " if above == 0 else ""
        raise ValueError(f"`{argument}` must be a {sign}number for each channel, got {values!r}")


@dataclass(frozen=True)
class Task:
    """What a model is built for. Every field can be changed through `create_model`."""

    num_classes: int
    image_size: Size
    in_channels: int
    iterations: int | None = None  # None for models that do not route
    multilabel: bool = False  # any number of classes an image, not exactly one
    mean: tuple[float, ...] | None = None  # per-channel normalisation; none for digits
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        as_size(self.image_size)
        check_counts(num_classes=self.num_classes, in_channels=self.in_channels)
        if self.iterations is not None:
            check_counts(iterations=self.iterations)
        if (self.mean is None) != (self.std is None):
            raise ValueError(f"`mean` and `std` go together, got {self.mean} and {self.std}")
        _check_channels("mean", self.mean, -math.inf)
        _check_channels("std", self.std, 0)

    def normalization(self) -> nn.Module:
        """For another number of channels than `mean` has, its average serves all of them."""
        if self.mean is None or self.std is None:
            return nn.Identity()
        if len(self.mean) == len(self.std) == self.in_channels:
            return Normalize(self.mean, self.std)
        mean, std = sum(self.mean) / len(self.mean), sum(self.std) / len(self.std)
        return Normalize([mean] * self.in_channels, [std] * self.in_channels)


TASKS = {
    "cifar10": Task(10, 32, 3, mean=CIFAR_MEAN, std=CIFAR_STD),
    "cifar100": Task(100, 32, 3, mean=CIFAR_MEAN, std=CIFAR_STD),
    "diverse_multimnist": Task(10, 36, 1, multilabel=True),
}


class ImageClassifier(nn.Module):
    """Maps images (B, C, H, W), floats in [0, 1], to class scores (B, classes).

    A subclass implements `compute_scores` on normalised images. Its scores are logits unless it
    sets `scores_are_probabilities`; it then also names the `loss` to train with by default.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ()  # keywords that any model of the family takes
    scores_are_probabilities: ClassVar[bool] = False
    loss: ClassVar[str | None] = None  # of `capsroute.losses`; a cross entropy unless given

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.name = type(self).__name__  # the registry puts the model's own name here
        self.config: dict[str, Any] = {}  # and here what `create_model` was asked for
        self.class_names: list[str] | None = None
        self.resize: tuple[int, int] | None = None  # size that pictures have before a centre crop
        self.task = task
        self.normalize = task.normalization()

    @property
    def image_size(self) -> tuple[int, int]:
        return as_size(self.task.image_size)

    @property
    def in_channels(self) -> int:
        return self.task.in_channels

    @property
    def num_classes(self) -> int:
        return self.task.num_classes

    @property
    def iterations(self) -> int | None:
        return self.task.iterations

    def compute_scores(self, images: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not define `compute_scores`")

    def forward(self, images: Tensor) -> Tensor:
        """Compute class scores (B, classes), in float32 or wider."""
        images = self._checked(images)
        if images.shape[0] == 0:  # a filter upstream may leave none; there is nothing to route
            scores = images.new_zeros(0, self.num_classes)
        else:
            scores = self.compute_scores(self.normalize(images))
        return widened(scores)

    def prepare(self, images: Tensor) -> Tensor:
        """Check a batch of at least one image and normalise it."""
        images = self._checked(images)
        if images.shape[0] == 0:
            raise ValueError("`images` must hold one image at least, got none")
        return self.normalize(images)

    def _checked(self, images: Tensor) -> Tensor:
        """The images in the precision of the weights: NumPy's come in double."""
        if not images.is_floating_point():
            raise TypeError(
                f"`images` must be floating point in [0, 1], got {images.dtype}: "
                "divide integer images by 255"
            )
        expected = (self.in_channels, *self.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            wanted = ", ".join(map(str, expected))
            raise ValueError(
                f"`images` must have shape (batch, {wanted}), got {tuple(images.shape)}"
            )
        first = next(self.parameters(), None)
        return images if first is None else cast(images, first.dtype)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Scores as probabilities: softmax or sigmoid of logits; lengths and activations as is."""
        if self.scores_are_probabilities:
            return scores
        return scores.sigmoid() if self.task.multilabel else scores.softmax(dim=-1)

    def decide(self, scores: Tensor) -> Tensor:
        """Booleans (B, classes): the likeliest class, or every class above 0.5 if multi-label."""
        if self.task.multilabel:
            return self.probabilities(scores) > THRESHOLD
        classes = torch.arange(self.num_classes, device=scores.device)
        return scores.argmax(dim=-1, keepdim=True) == classes

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As in PyTorch, but weights of another model are a ValueError of one line."""
        if strict:
            self._check_state(state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def _check_state(self, state_dict: Mapping[str, Any]) -> None:
        own = self.state_dict()
        problems = [f"{key!r} is missing" for key in own if key not in state_dict]
        problems += [f"{key!r} is unexpected" for key in state_dict if key not in own]
        problems += [
            f"{key!r} must have shape {tuple(own[key].shape)}, got {tuple(value.shape)}"
            for key, value in state_dict.items()
            if key in own and value.shape != own[key].shape
        ]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise ValueError(f"`state_dict` does not fit {self.name}: {problems[0]}{more}")


class CapsuleClassifier(ImageClassifier):
    """A classifier whose routing can be inspected."""

    def route(self, images: Tensor) -> Routing:
        """Return the scores, and the poses and coefficients of every layer and iteration."""
        raise TypeError(f"{type(self).__name__} does not define `route`")


def class_names_of(model: ImageClassifier) -> list[str]:
    """The model's own, or numbers where it has none; one for each score, or a one-line error."""
    if model.class_names is None:
        return [str(index) for index in range(model.num_classes)]
    if len(model.class_names) != model.num_classes:
        raise ValueError(
            f"`class_names` must name the {model.num_classes} classes of {model.name}, "
            f"got {len(model.class_names)}"
        )
    return list(model.class_names)


def count_parameters(module: nn.Module) -> int:
    """Learned numbers."""
    return sum(parameter.numel() for parameter in module.parameters())


def unwrapped(model: nn.Module) -> ImageClassifier:
    """The model itself, also where `torch.compile` wrapped it, or a one-line TypeError."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, ImageClassifier):
        return model
    inside = [
        n for n in ("model", "module") if isinstance(getattr(model, n, None), ImageClassifier)
    ]
    hint = f"; pass its `.{inside[0]}`" if inside else ""
    raise TypeError(f"`model` must be a model of capsroute, got a {type(model).__name__}{hint}")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode inside, and each of its modules as it was after."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def probe(backbone: nn.Module, task: Task) -> tuple[int, int, int]:
    """(channels, height, width) of a backbone's features, by running it once on one image."""
    height, width = as_size(task.image_size)
    image = torch.zeros(1, task.in_channels, height, width)
    if (parameter := next(backbone.parameters(), None)) is not None:
        image = image.to(parameter)
    try:
        with torch.no_grad(), evaluating(backbone):
            features = backbone(image)
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        if any(words in reason for words in TOO_SMALL):
            raise ValueError(
                f"`image_size` ({height}×{width}) is too small for the backbone: {reason}"
            ) from None
        raise ValueError(
            f"`backbone` cannot take a {task.in_channels}×{height}×{width} image: {reason}"
        ) from error
    if features.ndim != 4:
        raise ValueError(
            f"`backbone` must return features (B, C, H, W), got {tuple(features.shape)}"
        )
    _, channels, rows, columns = features.shape
    return channels, rows, columns


def convolved(size: tuple[int, int], kernel: int, stride: int, what: str) -> tuple[int, int]:
    """Output size of a convolution without padding, or a one-line error."""
    if kernel > min(size):
        raise ValueError(
            f"`kernel_size` of {what} must be within its input of {size[0]}×{size[1]}, "
            f"got {kernel}: is `image_size` too small?"
        )
    return (size[0] - kernel) // stride + 1, (size[1] - kernel) // stride + 1

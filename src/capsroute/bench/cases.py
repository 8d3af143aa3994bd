"""What is timed: whole training steps and forward passes, of a model or of its backbone alone."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from capsroute.data import Augment, Split, TrainBatches, load_dataset
from capsroute.data.diverse_multimnist import DiverseMultiMNIST
from capsroute.data.splits import ArraySplit
from capsroute.models import create_model, list_models, model_info
from capsroute.models.base import ImageClassifier, probe
from capsroute.nearest import nearest
from capsroute.train.build import Runtime, compiled, wrap
from capsroute.train.capture import CapturedSteps, Graphs
from capsroute.train.config import Config
from capsroute.train.distributed import Processes
from capsroute.train.step import Moment, TrainStep

Dtype = Literal["float32", "bfloat16"]
EPOCH = 4  # batches of made-up images; they lie in memory with the rest


@dataclass(frozen=True)
class Case:
    """One line of the benchmark."""

    model: str
    iterations: int | None
    mode: str  # train: batch, augmentation, forward, loss, backward, SGD; infer: forward
    part: str = "model"  # or `backbone`: it alone, with average pooling and a linear layer
    impl: str = "auto"
    batch: int = 128
    dtype: Dtype = "bfloat16"
    bn_group: int | None = None
    backbone: str | None = None  # of timm
    image_size: int | None = None  # the model's own, unless given

    def __str__(self) -> str:
        return f"{self.what}, {self.mode}, batch {self.batch}, {self.dtype}"

    @property
    def what(self) -> str:
        """The model, with its iterations as in experiments' names."""
        turns = "" if self.iterations is None else f"_r{self.iterations}"
        name = self.model + turns
        if self.backbone is not None:
            name += f" on {self.backbone}"
        if self.image_size is not None:
            name += f" at {self.image_size}"
        if self.part == "backbone":
            name = f"backbone of {name}"
        return name if self.impl == "auto" else f"{name} ({self.impl})"

    @property
    def alone(self) -> "Case":
        """The backbone alone under the same conditions."""
        return replace(self, iterations=None, part="backbone", impl="auto")

    @property
    def reference(self) -> "Case":
        """The same with the formula as the paper writes it."""
        return replace(self, impl="reference")


def plan_cases(
    wanted: Sequence[str],
    modes: Sequence[str],
    batches: Sequence[int],
    *,
    dtype: Dtype,
    alone: bool,
    reference: bool,
    impl: str = "auto",
    bn_group: int | None = None,
    backbone: str | None = None,
    image_size: int | None = None,
) -> list[Case]:
    """Cases for `NAME` or `NAME:2,4` (iterations), each comparison before what it is for."""
    planned: dict[Case, None] = {}  # ordered, none twice
    for text in wanted:
        name, turns = _parse(text)
        for mode, batch, iterations in itertools.product(modes, batches, turns):
            own = impl if "impl" in model_info(name).options else "auto"
            case = Case(name, iterations, mode, "model", own, batch, dtype)
            case = replace(case, bn_group=bn_group, backbone=backbone, image_size=image_size)
            if alone and _has_resnet(name):
                planned[case.alone] = None
            if reference and "impl" in model_info(name).options:
                planned[case.reference] = None
            planned[case] = None
    return list(planned)


def _parse(text: str) -> tuple[str, list[int | None]]:
    name, colon, turns = text.partition(":")
    known = list_models()
    if name not in known:
        raise ValueError(
            f"`models` must name registered models, got {name!r}{nearest(name, known)}"
        )
    own = model_info(name).task.iterations
    if not colon:
        return name, [own]
    if own is None:
        raise ValueError(f"`models` must name no iterations for {name}, which has none, got {text}")
    if not all(turn.isdigit() and int(turn) > 0 for turn in turns.split(",")):
        raise ValueError(f"`models` must be NAME or NAME:1,2,4 (iterations), got {text!r}")
    return name, [int(turn) for turn in turns.split(",")]


def _has_resnet(name: str) -> bool:
    return "bn_group" in model_info(name).options and "resnet_" in name


class BackboneAlone(ImageClassifier):
    """The features of a model, averaged over the image and classified by one linear layer."""

    def __init__(self, backbone: nn.Module, like: ImageClassifier) -> None:
        super().__init__(like.task)
        self.backbone = backbone
        self.classifier = nn.Linear(probe(backbone, like.task)[0], like.num_classes)

    def compute_scores(self, images: Tensor) -> Tensor:
        return self.classifier(self.backbone(images).mean(dim=(2, 3)))


def build_model(case: Case, device: torch.device) -> ImageClassifier:
    torch.manual_seed(0)
    options: dict[str, Any] = {} if case.impl == "auto" else {"impl": case.impl}
    for name in ("bn_group", "backbone", "image_size"):
        if getattr(case, name) is not None:
            options[name] = getattr(case, name)
    model = create_model(case.model, iterations=case.iterations, **options)
    if case.part == "backbone":
        assert isinstance(model.backbone, nn.Module)
        model = BackboneAlone(model.backbone, model)
    return model.to(device)


def prepare(case: Case, device: torch.device, runtime: Runtime) -> Callable[[], None]:
    """A function that does the case's work once; on a GPU a CUDA graph after a few calls."""
    model = build_model(case, device)
    wrapped = wrap(model, Processes(0, 1, device), runtime, Config())
    make = _training if case.mode == "train" else _inference
    return make(case, model, wrapped, device, runtime)


def _training(
    case: Case, model: ImageClassifier, wrapped: nn.Module, device: torch.device, runtime: Runtime
) -> Callable[[], None]:
    config = Config(dtype=case.dtype, batch_size=case.batch)
    train_step = TrainStep(wrapped, model, config, 1, partial(compiled, runtime=runtime))
    batches = _batches(model_info(case.model).dataset, model, case.batch, device)
    render = compiled(batches.render, runtime)
    steps = CapturedSteps(
        Graphs(device),
        batches,
        render,
        train_step,
        lambda step: Moment(step, lr=1e-3, epoch=0.0),
        10**9,
    )
    counter = itertools.count()
    return lambda: steps(next(counter))


def _inference(
    case: Case, model: ImageClassifier, wrapped: nn.Module, device: torch.device, runtime: Runtime
) -> Callable[[], None]:
    wrapped.eval()
    images = torch.rand(case.batch, model.in_channels, *model.image_size, device=device)
    low = case.dtype == "bfloat16"

    @torch.no_grad()
    def forward() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            wrapped(images)

    return Graphs(device).replay(forward)


def _batches(
    dataset: str, model: ImageClassifier, batch: int, device: torch.device
) -> TrainBatches:
    """As training makes them; every batch is whole."""
    if dataset == "diverse_multimnist":
        return TrainBatches(replace(_digits(), length=EPOCH * batch).to(device), batch)
    return TrainBatches(_made_up(model, EPOCH * batch).to(device), batch, augment=Augment())


@cache
def _digits() -> DiverseMultiMNIST:
    train: Split = load_dataset("diverse_multimnist").train
    assert isinstance(train, DiverseMultiMNIST)
    return train


def _made_up(model: ImageClassifier, count: int) -> Split:
    generator = torch.Generator().manual_seed(0)
    shape = (count, model.in_channels, *model.image_size)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    return ArraySplit(images, torch.randint(model.num_classes, (count,), generator=generator))

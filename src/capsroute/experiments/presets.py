"""One function for each preset; its name is the preset's name, its docstring the lab notebook."""

import inspect
from collections.abc import Callable

from capsroute.models.registry import nearest
from capsroute.train.config import Config, DataConfig, ModelConfig, OptimConfig

DEFAULT = "inverted_small_multimnist"

_PRESETS: dict[str, Callable[[], Config]] = {}


def register(build: Callable[[], Config]) -> Callable[[], Config]:
    _PRESETS[build.__name__] = build
    return build


def list_presets() -> list[str]:
    return list(_PRESETS)


def preset(name: str) -> Config:
    """The config of a preset, or a ValueError with the nearest name."""
    if name not in _PRESETS:
        raise ValueError(f"`preset` must be a preset's name, got {name!r}{nearest(name, _PRESETS)}")
    return _PRESETS[name]()


def preset_summary(name: str) -> str:
    """First line of its docstring."""
    return (inspect.getdoc(_PRESETS[name]) or "").split("\n")[0]


def paper_cifar(
    experiment: str,
    data: str,
    model: ModelConfig,
) -> Config:
    """The paper's recipe on CIFAR: 350 epochs of 128, ÷10 at 150 and 250, crops and flips."""
    return Config(
        experiment=experiment,
        model=model,
        data=DataConfig(data=data, padding=4, flip=True),
        dtype="bfloat16",
    )


@register
def inverted_small_multimnist() -> Config:
    """The default: a small model learns overlapping digits on a CPU in four minutes.

    `capsroute train`

    Model and recipe were chosen on a validation split (validation=1/6) of the training digits.
    """
    return Config(
        experiment="inverted_small_multimnist",
        model=ModelConfig("inverted_small_multimnist"),
        data=DataConfig("diverse_multimnist"),
        optim=OptimConfig(
            optimizer="adam",
            lr=8e-3,
            weight_decay=0.0,
            lr_schedule="cosine",
            warmup=0.05,
        ),
        batch_size=32,
        epochs=6,
    )


@register
def inverted_simple_cifar10_r4() -> Config:
    """The paper's routing on one convolution, CIFAR-10, 4 iterations (85.17 in the paper)."""
    model = ModelConfig("inverted_simple_cifar10", iterations=4)
    return paper_cifar("inverted_simple_cifar10_r4", "cifar10", model)


@register
def inverted_simple_cifar100_r4() -> Config:
    """The paper's routing on one convolution, CIFAR-100, 4 iterations (57.32 in the paper)."""
    model = ModelConfig("inverted_simple_cifar100", iterations=4)
    return paper_cifar("inverted_simple_cifar100_r4", "cifar100", model)


@register
def inverted_resnet_cifar10_r2() -> Config:
    """The paper's best on CIFAR-10: ResNet backbone, 2 iterations (95.14; 94.85 on average)."""
    model = ModelConfig("inverted_resnet_cifar10", iterations=2, bn_group=16)
    return paper_cifar("inverted_resnet_cifar10_r2", "cifar10", model)


@register
def inverted_resnet_cifar100_r2() -> Config:
    """The paper's best on CIFAR-100: ResNet backbone, 2 iterations (78.02; 76.27 on average)."""
    model = ModelConfig("inverted_resnet_cifar100", iterations=2, bn_group=16)
    return paper_cifar("inverted_resnet_cifar100_r2", "cifar100", model)

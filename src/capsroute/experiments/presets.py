"""The one registry of presets: what each run is, as a function that returns a whole config.

A preset's name is its function's, with `_r<iterations>` where it routes. The paper's experiments
are in paper.py; here are the registry and the everyday presets.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from capsroute.data import list_datasets
from capsroute.nearest import nearest
from capsroute.train.config import Config, DataConfig, ModelConfig, OptimConfig

DEFAULT = "inverted_small_multimnist"
MOST_EPOCHS = 300  # of `own_images`: of a hundred drawn shapes it took about as many to learn


@dataclass(frozen=True)
class Preset:
    """A named config, and what accuracy (percent) is known for it.

    `paper_accuracy` is what the paper prints; `authors_average`, not in the paper, is the authors'
    mean over runs, most likely of best test epochs.
    """

    name: str
    summary: str
    config: Config
    paper_accuracy: float | None = None
    authors_average: float | None = None


_PRESETS: dict[str, Preset] = {}


def register(build: Callable[[], Config]) -> Callable[[], Config]:
    """Decorator: a preset of our own."""
    name = build.__name__
    _PRESETS[name] = Preset(name, _first_line(build), replace(build(), experiment=name))
    return build


def register_paper(
    accuracies: Mapping[int | None, float | None],
    *,
    averages: Mapping[int | None, float] | None = None,
) -> Callable[[Callable[[int | None], Config]], Callable[[int | None], Config]]:
    """Decorator: an experiment of the paper at each number of iterations that it reports.

    `accuracies` are the paper's, by iterations (None for a model that does not route); an accuracy
    of None is one that the paper does not print. `averages` are the authors' own.
    """

    def add(build: Callable[[int | None], Config]) -> Callable[[int | None], Config]:
        for iterations, accuracy in accuracies.items():
            name = build.__name__ + ("" if iterations is None else f"_r{iterations}")
            routed = (
                "" if iterations is None else f", {iterations} iteration{'s' * (iterations > 1)}"
            )
            printed = "" if accuracy is None else f" ({accuracy:.2f} % in the paper)"
            summary = f"{_first_line(build).rstrip('.')}{routed}{printed}."
            config = replace(build(iterations), experiment=name)
            average = (averages or {}).get(iterations)
            _PRESETS[name] = Preset(name, summary, config, accuracy, average)
        return build

    return add


def _first_line(build: Callable[..., Config]) -> str:
    return (inspect.getdoc(build) or "").split("\n")[0]


def list_presets() -> list[str]:
    return list(_PRESETS)


def list_experiments() -> list[str]:
    """Presets that anyone can run again: those on a dataset, not on a user's own images."""
    return [name for name, known in _PRESETS.items() if known.config.data.data in list_datasets()]


def preset(name: str) -> Preset:
    """A preset, or a ValueError with the nearest name."""
    if name not in _PRESETS:
        raise ValueError(f"`preset` must be a preset's name, got {name!r}{nearest(name, _PRESETS)}")
    return _PRESETS[name]


def _adam(lr: float) -> OptimConfig:
    return OptimConfig(optimizer="adam", lr=lr, weight_decay=0.0, lr_schedule="cosine", warmup=0.05)


def _muon(lr: float) -> OptimConfig:
    return replace(_adam(lr), optimizer="muon", momentum=0.95, nesterov=True)


def _small_multimnist(iterations: int | None) -> Config:
    return Config(
        model=ModelConfig("inverted_small_multimnist", iterations),
        data=DataConfig("diverse_multimnist"),
        optim=_muon(lr=0.03),
        batch_size=64,
        epochs=10,
    )


@register
def inverted_small_multimnist() -> Config:
    """The default: a small model that learns overlapping digits on a CPU in four minutes.

    `capsroute train`, 78.0 ± 0.3 % of 10,000 unseen images exactly right after 183 s on two cores
    (three seeds, results/inverted_small_multimnist). Model and recipe were chosen on images made
    from training digits that were held back: Muon gets five points more of them right than Adam
    (results/tuning).
    """
    return _small_multimnist(None)


@register
def inverted_small_multimnist_r1() -> Config:
    """The default model with uniform routing (1 iteration)."""
    return _small_multimnist(1)


@register
def inverted_small_multimnist_r4() -> Config:
    """The default model with 4 iterations."""
    return _small_multimnist(4)


def _digits(iterations: int) -> Config:
    return Config(
        model=ModelConfig("inverted_small_multimnist", iterations),
        data=DataConfig("diverse_multimnist"),
        optim=_adam(lr=0.016),
        batch_size=512,  # so small a model fills no GPU with fewer
        epochs=350,
        dtype="bfloat16",
        eval_every=10 * 118,
        checkpoint_every=10 * 118,
    )


@register
def digits_r2() -> Config:
    """The default model by Adam on 35 times as many images, 21 million, on a GPU."""
    return _digits(2)


@register
def digits_r1() -> Config:
    """digits_r2 with uniform routing (1 iteration)."""
    return _digits(1)


@register
def digits_r4() -> Config:
    """digits_r2 with 4 iterations."""
    return _digits(4)


def _fast(data: str, epochs: int) -> Config:
    return Config(
        model=ModelConfig(f"inverted_resnet_{data}", 2),
        data=DataConfig(data, padding=4, flip=True, cutout=8, cutmix=0.5),
        optim=OptimConfig(
            nesterov=True, lr_schedule="cosine", warmup=0.1, label_smoothing=0.1, capsule_decay=0.0
        ),
        epochs=epochs,
        dtype="bfloat16",
        checkpoint_every=10 * 391,
    )


@register
def fast_cifar10() -> Config:
    """Our own recipe for the paper's best model on CIFAR-10, meant for four minutes on an H200.

    Chosen on a fifth of the training images, held back (results/tuning): of what was tried,
    CutMix of half of the images gained most; no weight decay of what routes gained, too.
    `capsroute reproduce fast_cifar10 --seeds 0 1 2`: 95.78 ± 0.15 % at the last epoch, after 192 s
    and, where it had to compile first, 263 s (results/fast_cifar10).
    """
    return _fast("cifar10", epochs=190)


@register
def fast_cifar100() -> Config:
    """Our own recipe for the paper's best model on CIFAR-100, meant for eight minutes on an H200.

    That of fast_cifar10, for longer; nothing was tried on CIFAR-100.
    `capsroute reproduce fast_cifar100 --seeds 0 1 2`: 78.12 ± 0.22 % at the last epoch, after 364
    to 383 s and, where it had to compile first, 453 s (results/fast_cifar100).
    """
    return _fast("cifar100", epochs=300)


@register
def own_images() -> Config:
    """A folder of images, one sub-folder per class; used by `capsroute train --data FOLDER`.

    The paper's best model where there is a GPU; on a CPU the small one, at about a minute for a
    thousand steps on images of 36×36, by Muon, which in short trials on a few hundred or thousand
    images of MNIST and CIFAR-10 got more of others right than Adam. Images are not mirrored unless
    `--flip` says so: letters and digits would be others. Of few images it takes fewer steps: see
    `limit_epochs`.
    """
    gpu = torch.cuda.is_available()
    return Config(
        model=ModelConfig("inverted_resnet_cifar10" if gpu else "inverted_small_multimnist"),
        data=DataConfig("FOLDER", padding=4),
        optim=_adam(lr=2e-3) if gpu else _muon(lr=0.01),
        batch_size=64 if gpu else 32,
        steps=10_000 if gpu else 1_500,
        eval_every=500 if gpu else 150,
        dtype="bfloat16" if gpu else "float32",
    )


def from_trained_weights(config: Config) -> Config:
    """The config of `own_images` in steps a fifth as large, which keep what the weights know.

    In a short trial on a CPU, a model for ten of CIFAR-100's classes that began with the weights
    for CIFAR-10 got more images right with them than with whole ones.
    """
    return replace(config, optim=replace(config.optim, lr=config.optim.lr / 5))


def limit_epochs(config: Config, images: int, *, evaluations_open: bool = True) -> Config:
    """The config of `own_images` for so many training images: at most `MOST_EPOCHS` of them.

    The evaluations are as many as they were, unless the caller has chosen when they come
    (`evaluations_open=False`).
    """
    epoch_steps = -(-images // config.batch_size)
    if config.steps is None or config.steps <= MOST_EPOCHS * epoch_steps:
        return config
    limited = replace(config, steps=None, epochs=MOST_EPOCHS)
    if not evaluations_open:
        return limited
    evaluations = max(1, config.steps // config.eval_every)
    return replace(limited, eval_every=max(1, MOST_EPOCHS * epoch_steps // evaluations))

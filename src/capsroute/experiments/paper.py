"""Every row of the paper's tables and every point of its figures, with the paper's recipes.

CIFAR: 350 epochs of 128 images, learning rate ÷10 after 150 and 250, crops and flips; SGD at 0.1
(inverted routing and CNNs), Adam at 1e-3 (dynamic) or 1e-2 (EM), without weight decay.
DiverseMultiMNIST: 350 times 60,000 new images, SGD at 0.1 for all six models, to which it rises in
the first of the 350; dynamic routing without weight decay. bf16 for convolutions and stored poses.

Wherever there is BatchNorm it sees groups of 16 images, as it did on the authors' 8 GPUs. A known
difference, not measured: the last batch of an epoch is smaller (80 images of CIFAR, 96 of
DiverseMultiMNIST), and their `DataParallel` would cut it into 8 groups all the same, of 10 or 12
images; ours are 5 or 6 groups of 16.
"""

from dataclasses import replace

from capsroute.experiments.presets import register, register_paper
from capsroute.train.config import Config, DataConfig, ModelConfig, OptimConfig

DYNAMIC = OptimConfig(optimizer="adam", lr=1e-3, weight_decay=0.0)
EM = OptimConfig(optimizer="adam", lr=1e-2, weight_decay=0.0)
SGD = OptimConfig()
RISING = OptimConfig(warmup=1 / 350)  # to 0.1 over the first 60,000 of 21M images: see `multimnist`
SAVED = 50  # epochs: a minute or two on a GPU, and the largest states take a second or two to write
GROUP = 16  # images that a BatchNorm saw: 128 on 8 GPUs


def cifar(data: str, model: ModelConfig, optim: OptimConfig = SGD) -> Config:
    return Config(
        model=model,
        data=DataConfig(data, padding=4, flip=True),
        optim=optim,
        dtype="bfloat16",
        checkpoint_every=SAVED * 391,
    )


def multimnist(model: ModelConfig, optim: OptimConfig = RISING) -> Config:
    """The paper's SGD, the same for all six models, but for a first epoch in which it rises to 0.1.

    At 0.1 from the first step the loss of the CNN with learned pooling explodes at once: two linear
    maps in a row, of 36,864 features, are too steep for that. And the primary capsules of inverted
    routing collapse, if not for ever: a few steps make what all images have in common so large
    that LayerNorm leaves little of what tells them apart.
    """
    return Config(
        model=model,
        data=DataConfig("diverse_multimnist"),
        optim=optim,
        dtype="bfloat16",
        checkpoint_every=SAVED * 469,
    )


def mixed(config: Config) -> Config:
    return replace(config, model=replace(config.model, windows="mixed"))


# Table 1 with the ResNet backbone, best first


@register_paper({2: 95.14, 1: None}, averages={1: 94.73, 2: 94.85})
def inverted_resnet_cifar10(iterations: int | None) -> Config:
    """Inverted routing on the ResNet backbone, CIFAR-10.

    95.14 is the best test epoch of the authors' best run; their averages, not in the paper, are
    94.73 with 1 iteration and 94.85 with 2.
    """
    return cifar("cifar10", ModelConfig("inverted_resnet_cifar10", iterations, bn_group=GROUP))


@register_paper({2: 78.02, 1: None}, averages={1: 76.02, 2: 76.27})
def inverted_resnet_cifar100(iterations: int | None) -> Config:
    """Inverted routing on the ResNet backbone, CIFAR-100.

    78.02 is the best test epoch of the authors' best run; their averages, not in the paper, are
    76.02 with 1 iteration and 76.27 with 2.
    """
    return cifar("cifar100", ModelConfig("inverted_resnet_cifar100", iterations, bn_group=GROUP))


@register
def inverted_resnet_cifar100_float32_r2() -> Config:
    """inverted_resnet_cifar100_r2 in float32: is bf16 why we fall short of the authors' average?

    With `NVIDIA_TF32_OVERRIDE=0`, or cuDNN's convolutions keep 10 bits of the 23.
    """
    return replace(inverted_resnet_cifar100(2), dtype="float32")


@register_paper({1: 92.65})
def dynamic_resnet_cifar10(iterations: int | None) -> Config:
    """Dynamic routing on the ResNet backbone, CIFAR-10."""
    model = ModelConfig("dynamic_resnet_cifar10", iterations, bn_group=GROUP)
    return cifar("cifar10", model, DYNAMIC)


@register_paper({1: 71.70})
def dynamic_resnet_cifar100(iterations: int | None) -> Config:
    """Dynamic routing on the ResNet backbone, CIFAR-100."""
    model = ModelConfig("dynamic_resnet_cifar100", iterations, bn_group=GROUP)
    return cifar("cifar100", model, DYNAMIC)


@register_paper({2: 92.15})
def em_resnet_cifar10(iterations: int | None) -> Config:
    """EM routing on the ResNet backbone, CIFAR-10."""
    return cifar("cifar10", ModelConfig("em_resnet_cifar10", iterations, bn_group=GROUP), EM)


@register_paper({2: 58.08})
def em_resnet_cifar100(iterations: int | None) -> Config:
    """EM routing on the ResNet backbone, CIFAR-100."""
    return cifar("cifar100", ModelConfig("em_resnet_cifar100", iterations, bn_group=GROUP), EM)


# Table 1 with the simple backbone on CIFAR-100, and the CNNs


@register_paper({4: 57.32})
def inverted_simple_cifar100(iterations: int | None) -> Config:
    """Inverted routing on one convolution, CIFAR-100."""
    return cifar("cifar100", ModelConfig("inverted_simple_cifar100", iterations))


@register_paper({1: 56.96})
def dynamic_simple_cifar100(iterations: int | None) -> Config:
    """Dynamic routing on one convolution, CIFAR-100."""
    return cifar("cifar100", ModelConfig("dynamic_simple_cifar100", iterations), DYNAMIC)


@register_paper({2: 37.73})
def em_simple_cifar100(iterations: int | None) -> Config:
    """EM routing on one convolution, CIFAR-100."""
    return cifar("cifar100", ModelConfig("em_simple_cifar100", iterations, bn_group=GROUP), EM)


@register_paper({None: 87.10})
def cnn_cifar10(iterations: int | None) -> Config:
    """The baseline CNN, CIFAR-10."""
    return cifar("cifar10", ModelConfig("cnn_cifar10", iterations, bn_group=GROUP))


@register_paper({None: 62.30})
def cnn_cifar100(iterations: int | None) -> Config:
    """The baseline CNN, CIFAR-100."""
    return cifar("cifar100", ModelConfig("cnn_cifar100", iterations, bn_group=GROUP))


@register_paper({None: 95.11})
def resnet18_cifar10(iterations: int | None) -> Config:
    """ResNet-18, CIFAR-10."""
    return cifar("cifar10", ModelConfig("resnet18_cifar10", iterations, bn_group=GROUP))


@register_paper({None: 77.92})
def resnet18_cifar100(iterations: int | None) -> Config:
    """ResNet-18, CIFAR-100."""
    return cifar("cifar100", ModelConfig("resnet18_cifar100", iterations, bn_group=GROUP))


# The iteration figure (and Table 1 with the simple backbone on CIFAR-10)


@register_paper({1: 84.24, 2: 85.05, 3: 84.83, 4: 85.17, 5: 85.09})
def inverted_simple_cifar10(iterations: int | None) -> Config:
    """Inverted routing on one convolution, CIFAR-10."""
    return cifar("cifar10", ModelConfig("inverted_simple_cifar10", iterations))


@register_paper({1: 66.83, 2: 65.83, 3: 66.22, 4: 77.03, 5: 10.00})
def inverted_simple_cifar10_a(iterations: int | None) -> Config:
    """Ablation A: inverted routing without LayerNorm, CIFAR-10."""
    return cifar("cifar10", ModelConfig("inverted_simple_cifar10", iterations, layer_norm=False))


@register_paper({1: 84.24, 2: 83.35, 3: 80.21, 4: 83.37, 5: 82.07})
def inverted_simple_cifar10_b(iterations: int | None) -> Config:
    """Ablation B: sequential inverted routing, CIFAR-10."""
    model = ModelConfig("inverted_simple_cifar10", iterations, schedule="sequential")
    return cifar("cifar10", model)


@register_paper({1: 82.55, 2: 83.12, 3: 82.13, 4: 82.38, 5: 81.97})
def inverted_simple_cifar10_c(iterations: int | None) -> Config:
    """Ablation C: inverted routing with activations, CIFAR-10."""
    return cifar("cifar10", ModelConfig("inverted_simple_cifar10", iterations, activations=True))


@register_paper({1: 84.08, 2: 83.30, 3: 82.88, 4: 82.90, 5: 82.11})
def dynamic_simple_cifar10(iterations: int | None) -> Config:
    """Dynamic routing on one convolution, CIFAR-10."""
    return cifar("cifar10", ModelConfig("dynamic_simple_cifar10", iterations), DYNAMIC)


@register_paper({1: 58.08, 2: 82.19, 3: 78.43, 4: 46.13, 5: 31.41})
def em_simple_cifar10(iterations: int | None) -> Config:
    """EM routing on one convolution, CIFAR-10."""
    return cifar("cifar10", ModelConfig("em_simple_cifar10", iterations, bn_group=GROUP), EM)


# DiverseMultiMNIST


@register_paper({2: 85.74})
def inverted_vector_multimnist(iterations: int | None) -> Config:
    """Inverted routing of vectors, DiverseMultiMNIST."""
    return multimnist(ModelConfig("inverted_vector_multimnist", iterations))


@register_paper({2: 80.59})
def inverted_matrix_multimnist(iterations: int | None) -> Config:
    """Inverted routing of matrices, DiverseMultiMNIST."""
    return multimnist(ModelConfig("inverted_matrix_multimnist", iterations))


@register_paper({2: 91.17})
def inverted_matrix_multimnist_wide(iterations: int | None) -> Config:
    """Inverted routing of matrices, 64 capsules instead of 16, DiverseMultiMNIST."""
    return multimnist(ModelConfig("inverted_matrix_multimnist_wide", iterations))


@register_paper({3: 83.39})
def dynamic_vector_multimnist(iterations: int | None) -> Config:
    """Dynamic routing of vectors, DiverseMultiMNIST.

    Without weight decay, of which the paper says nothing: no LayerNorm makes up for transforms that
    shrink, capsules get short, squashing makes them shorter, and the model stays on a plateau (43 %
    after 267 epochs; without, 46 % after 12: results/unfinished). The others keep it: matrices got
    worse without (results/tuning).
    """
    optim = replace(RISING, weight_decay=0.0)
    return multimnist(ModelConfig("dynamic_vector_multimnist", iterations), optim)


@register_paper({None: 79.81})
def cnn_multimnist(iterations: int | None) -> Config:
    """The baseline CNN with average pooling, DiverseMultiMNIST."""
    return multimnist(ModelConfig("cnn_multimnist", iterations, bn_group=GROUP))


@register_paper({None: 84.84})
def cnn_multimnist_learned_pool(iterations: int | None) -> Config:
    """The baseline CNN with learned pooling, DiverseMultiMNIST."""
    return multimnist(ModelConfig("cnn_multimnist_learned_pool", iterations, bn_group=GROUP))


# The same with windows as the authors' first release read them. The averages come with that
# release, and the paper's own numbers may: they found the mistake after both.


@register_paper({2: None}, averages={2: 94.85})
def inverted_resnet_cifar10_mixed(iterations: int | None) -> Config:
    """As inverted_resnet_cifar10, with the windows of the authors' first release."""
    return mixed(inverted_resnet_cifar10(iterations))


@register_paper({2: None}, averages={2: 76.27})
def inverted_resnet_cifar100_mixed(iterations: int | None) -> Config:
    """As inverted_resnet_cifar100, with the windows of the authors' first release."""
    return mixed(inverted_resnet_cifar100(iterations))


@register_paper({1: None, 2: None})
def inverted_simple_cifar10_mixed(iterations: int | None) -> Config:
    """As inverted_simple_cifar10, with the windows of the authors' first release."""
    return mixed(inverted_simple_cifar10(iterations))


@register_paper({2: None})
def inverted_matrix_multimnist_mixed(iterations: int | None) -> Config:
    """As inverted_matrix_multimnist, with the windows of the authors' first release."""
    return mixed(inverted_matrix_multimnist(iterations))


@register_paper({2: None})
def inverted_vector_multimnist_mixed(iterations: int | None) -> Config:
    """As inverted_vector_multimnist, with the windows of the authors' first release."""
    return mixed(inverted_vector_multimnist(iterations))

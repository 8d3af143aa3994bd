"""The paper's convolutional baselines. ReLU comes before BatchNorm in its plain CNNs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from capsroute.models.backbones import ResidualBlock, batch_norm, resnet_stem
from capsroute.models.base import ImageClassifier, Task, probe
from capsroute.models.registry import register


class ConvNet(ImageClassifier):
    """Convolutional features, some way of pooling them, linear layers."""

    def __init__(
        self, task: Task, features: Sequence[nn.Module], head: Sequence[nn.Module]
    ) -> None:
        super().__init__(task)
        self.features = nn.Sequential(*features)
        self.head = nn.Sequential(*head)

    def compute_scores(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


class PositionLinear(nn.Linear):
    """A linear map at every position: (B, C, H, W) -> (B, out, H, W)."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features.movedim(1, -1)).movedim(-1, 1)


def _global_pool() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def _plain_cifar_cnn(task: Task, bn_group: int | None) -> ConvNet:
    features = [
        nn.Conv2d(task.in_channels, 1024, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(1024, 1024, 3, 2, 1),
        nn.ReLU(),
        batch_norm(1024, bn_group),
        nn.AvgPool2d(2),
        nn.Conv2d(1024, 1024, 3, 2, 1),
        nn.ReLU(),
        batch_norm(1024, bn_group),
    ]
    return ConvNet(task, features, [*_global_pool(), nn.Linear(1024, task.num_classes)])


@register(ConvNet, "cifar10", parameters=18_919_434, paper_accuracy=87.10)
def cnn_cifar10(task: Task, *, bn_group: int | None = None) -> ConvNet:
    """Three convolutions and a linear layer (Table cnn_cifar10)."""
    return _plain_cifar_cnn(task, bn_group)


@register(ConvNet, "cifar100", parameters=19_011_684, paper_accuracy=62.30)
def cnn_cifar100(task: Task, *, bn_group: int | None = None) -> ConvNet:
    """Three convolutions and a linear layer (Table cnn_cifar100)."""
    return _plain_cifar_cnn(task, bn_group)


def _resnet18(task: Task, bn_group: int | None) -> ConvNet:
    features = resnet_stem(task.in_channels, bn_group)
    before = 64
    for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        features.append(ResidualBlock(before, channels, stride, bn_group))
        features.append(ResidualBlock(channels, channels, 1, bn_group))
        before = channels
    return ConvNet(task, features, [*_global_pool(), nn.Linear(512, task.num_classes)])


@register(ConvNet, "cifar10", parameters=11_173_962, paper_accuracy=95.11)
def resnet18_cifar10(task: Task, *, bn_group: int | None = None) -> ConvNet:
    """ResNet-18 with a 3×3 first convolution and no max pooling, CIFAR-10."""
    return _resnet18(task, bn_group)


@register(ConvNet, "cifar100", parameters=11_220_132, paper_accuracy=77.92)
def resnet18_cifar100(task: Task, *, bn_group: int | None = None) -> ConvNet:
    """ResNet-18 with a 3×3 first convolution and no max pooling, CIFAR-100."""
    return _resnet18(task, bn_group)


def _multimnist_features(task: Task, bn_group: int | None) -> list[nn.Module]:
    """The widths of the paper's capsule models: 18×18, 8×8 and 6×6 positions of 1024."""
    return [
        nn.Conv2d(task.in_channels, 1024, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(1024, 1024, 3, 2),
        nn.ReLU(),
        batch_norm(1024, bn_group),
        nn.Conv2d(1024, 1024, 3, 1),
        nn.ReLU(),
        batch_norm(1024, bn_group),
    ]


@register(ConvNet, "diverse_multimnist", parameters=19_553_162, paper_accuracy=79.81)
def cnn_multimnist(task: Task, *, bn_group: int | None = None) -> ConvNet:
    """CNN with average pooling for overlapping digits (Table CNN_mnist)."""
    pooled = [PositionLinear(1024, 640), *_global_pool()]
    features = _multimnist_features(task, bn_group)
    return ConvNet(task, features, [*pooled, nn.Linear(640, task.num_classes)])


@register(ConvNet, "diverse_multimnist", parameters=42_490_762, paper_accuracy=84.84)
def cnn_multimnist_learned_pool(task: Task, *, bn_group: int | None = None) -> ConvNet:
    """CNN with a learned map for pooling, for overlapping digits, as the paper's text describes."""
    features = _multimnist_features(task, bn_group)
    channels, height, width = probe(nn.Sequential(*features), task)
    head: list[Any] = [nn.Flatten(), nn.Linear(channels * height * width, 640)]
    return ConvNet(task, features, [*head, nn.Linear(640, task.num_classes)])

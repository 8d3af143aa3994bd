"""EM routing (Hinton et al., 2018) in the shapes of the paper's tables."""

from typing import Any, ClassVar

from torch import Tensor, nn

from capsroute.layers.em import EMClassCaps, EMConvCaps, EMPrimaryCaps
from capsroute.models.backbones import batch_norm, resnet_backbone
from capsroute.models.base import CapsuleClassifier, Routing, Task, convolved, probe
from capsroute.models.registry import register


class EMCapsNet(CapsuleClassifier):
    """Backbone, primary capsules with activations, two convolutional layers, the class layer.

    A class's score is its capsule's activation. Every layer has 32 capsules of 4×4 poses.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("impl",)
    scores_are_probabilities = True
    loss = "spread"

    def __init__(self, task: Task, backbone: nn.Module, *, impl: str = "auto") -> None:
        super().__init__(task)
        options: dict[str, Any] = {"iterations": task.iterations or 1, "impl": impl}
        channels, *image = probe(backbone, task)
        self.backbone = backbone
        self.primary = EMPrimaryCaps(channels, 32, 16)
        size = convolved((image[0], image[1]), 3, 2, "capsule layer 1")
        convolved(size, 3, 1, "capsule layer 2")
        self.capsules = nn.ModuleList(
            [
                EMConvCaps(32, 32, 16, kernel_size=3, stride=2, **options),
                EMConvCaps(32, 32, 16, kernel_size=3, stride=1, **options),
                EMClassCaps(32, task.num_classes, 16, **options),
            ]
        )

    def compute_scores(self, images: Tensor) -> Tensor:
        poses, log_activations = self.primary(self.backbone(images))
        for layer in self.capsules:
            poses, log_activations = layer(poses, log_activations)
        return log_activations.exp()

    def route(self, images: Tensor) -> Routing:
        poses, log_activations = self.primary(self.backbone(self.prepare(images)))
        histories = []
        for layer in self.capsules:
            assert isinstance(layer, EMConvCaps | EMClassCaps)  # what __init__ put there
            histories.append(layer.route(poses, log_activations))
            poses, log_activations = histories[-1][-1][:2]
        return Routing(
            log_activations.exp(),
            [[s.poses for s in h] for h in histories],
            [[s.coefficients for s in h if s.coefficients is not None] for h in histories],
            [len(h) - 1 for h in histories],  # sequential: every iteration counts
        )


def _simple(task: Task, bn_group: int | None, **options: Any) -> EMCapsNet:
    conv = nn.Conv2d(task.in_channels, 256, 4, 2, 1)
    backbone = nn.Sequential(conv, batch_norm(256, bn_group), nn.ReLU())
    return EMCapsNet(task, backbone, **options)


@register(EMCapsNet, "cifar10", iterations=2, parameters=453_044, paper_accuracy=82.19)
def em_simple_cifar10(task: Task, *, bn_group: int | None = None, **options: Any) -> EMCapsNet:
    """EM routing on one convolution (Table em_cifar10)."""
    return _simple(task, bn_group, **options)


@register(EMCapsNet, "cifar100", iterations=2, parameters=499_304, paper_accuracy=37.73)
def em_simple_cifar100(task: Task, *, bn_group: int | None = None, **options: Any) -> EMCapsNet:
    """EM routing on one convolution (Table em_cifar100)."""
    return _simple(task, bn_group, **options)


@register(EMCapsNet, "cifar10", iterations=2, parameters=1_710_580, paper_accuracy=92.15)
def em_resnet_cifar10(task: Task, *, bn_group: int | None = None, **options: Any) -> EMCapsNet:
    """EM routing on the ResNet backbone, CIFAR-10."""
    return EMCapsNet(task, resnet_backbone(task.in_channels, 128, bn_group=bn_group), **options)


@register(EMCapsNet, "cifar100", iterations=2, parameters=1_756_840, paper_accuracy=58.08)
def em_resnet_cifar100(task: Task, *, bn_group: int | None = None, **options: Any) -> EMCapsNet:
    """EM routing on the ResNet backbone, CIFAR-100."""
    return EMCapsNet(task, resnet_backbone(task.in_channels, 128, bn_group=bn_group), **options)

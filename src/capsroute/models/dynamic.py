"""Dynamic routing (Sabour et al., 2017) in the shapes of the paper's tables."""

from typing import Any, ClassVar

from torch import Tensor, nn

from capsroute.layers.dynamic import DynamicConvCaps, DynamicLinearCaps
from capsroute.layers.primary import PrimaryCaps
from capsroute.models.backbones import resnet_backbone, simple_backbone
from capsroute.models.base import CapsuleClassifier, Routing, Task, convolved, probe
from capsroute.models.registry import register
from capsroute.ops.dynamic import length


class DynamicCapsNet(CapsuleClassifier):
    """Backbone, squashed primary capsules, dynamic routing; a class's score is its pose's length.

    Args:
        primary: PrimaryCaps on the backbone's features.
        conv_capsules: capsules of a 3×3 convolutional layer in between; none by default.
        out_pose_dim: elements of a routed pose.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("impl",)
    scores_are_probabilities = True
    loss = "margin"

    def __init__(
        self,
        task: Task,
        backbone: nn.Module,
        primary: PrimaryCaps,
        *,
        out_pose_dim: int,
        conv_capsules: int | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__(task)
        self.backbone, self.primary = backbone, primary
        _, *image = probe(backbone, task)
        kernel, stride = primary.conv.kernel_size[0], primary.conv.stride[0]
        size = convolved((image[0], image[1]), kernel, stride, "the primary capsules")
        capsules, pose_dim = primary.capsules, primary.pose_dim
        options: dict[str, Any] = {"iterations": task.iterations or 1, "impl": impl}
        layers: list[nn.Module] = []
        if conv_capsules is not None:
            size = convolved(size, 3, 1, "capsule layer 1")
            layers.append(
                DynamicConvCaps(capsules, conv_capsules, pose_dim, out_pose_dim, **options)
            )
            capsules, pose_dim = conv_capsules, out_pose_dim
        children = size[0] * size[1] * capsules
        layers.append(
            DynamicLinearCaps(children, task.num_classes, pose_dim, out_pose_dim, **options)
        )
        self.capsules = nn.ModuleList(layers)

    def compute_scores(self, images: Tensor) -> Tensor:
        poses = self.primary(self.backbone(images))
        for layer in self.capsules:
            poses = layer(poses)
        return length(poses)

    def route(self, images: Tensor) -> Routing:
        capsules = self.primary(self.backbone(self.prepare(images)))
        poses: list[list[Tensor]] = []
        coefficients: list[list[Tensor]] = []
        for layer in self.capsules:
            steps: list[tuple[Tensor, Tensor]] = []
            capsules = layer(capsules, observe=lambda *step, steps=steps: steps.append(step))
            poses.append([step[0] for step in steps])
            coefficients.append([step[1] for step in steps])
        used = [len(layer) - 1 for layer in poses]  # sequential: every iteration counts
        return Routing(length(capsules), poses, coefficients, used)


def _sabour(task: Task, **options: Any) -> DynamicCapsNet:
    """CapsNet as in Sabour et al.: two 9×9 convolutions, 8-element capsules to 16-element ones."""
    backbone = simple_backbone(task.in_channels, 256, kernel_size=9, stride=1, padding=0)
    primary = PrimaryCaps(256, 32, 8, kernel_size=9, stride=2, bias=True, normalization="squash")
    return DynamicCapsNet(task, backbone, primary, out_pose_dim=16, **options)


def _sabour_resnet(task: Task, bn_group: int | None, **options: Any) -> DynamicCapsNet:
    """The same on a ResNet; its 256 channels (the text says 128) are what the count demands."""
    backbone = resnet_backbone(task.in_channels, 256, bn_group=bn_group)
    primary = PrimaryCaps(256, 32, 8, kernel_size=9, stride=1, bias=True, normalization="squash")
    return DynamicCapsNet(task, backbone, primary, out_pose_dim=16, **options)


@register(DynamicCapsNet, "cifar10", iterations=1, parameters=7_992_576, paper_accuracy=84.08)
def dynamic_simple_cifar10(task: Task, **options: Any) -> DynamicCapsNet:
    """Dynamic routing on one 9×9 convolution (Table dynamic_cifar10)."""
    return _sabour(task, **options)


@register(DynamicCapsNet, "cifar100", iterations=1, parameters=31_585_536, paper_accuracy=56.96)
def dynamic_simple_cifar100(task: Task, **options: Any) -> DynamicCapsNet:
    """Dynamic routing on one 9×9 convolution (Table dynamic_cifar100)."""
    return _sabour(task, **options)


@register(DynamicCapsNet, "cifar10", iterations=1, parameters=12_451_136, paper_accuracy=92.65)
def dynamic_resnet_cifar10(
    task: Task, *, bn_group: int | None = None, **options: Any
) -> DynamicCapsNet:
    """Dynamic routing on the ResNet backbone, CIFAR-10."""
    return _sabour_resnet(task, bn_group, **options)


@register(DynamicCapsNet, "cifar100", iterations=1, parameters=36_044_096, paper_accuracy=71.70)
def dynamic_resnet_cifar100(
    task: Task, *, bn_group: int | None = None, **options: Any
) -> DynamicCapsNet:
    """Dynamic routing on the ResNet backbone, CIFAR-100."""
    return _sabour_resnet(task, bn_group, **options)


@register(
    DynamicCapsNet,
    "diverse_multimnist",
    iterations=3,
    parameters=42_478_592,
    paper_accuracy=83.39,
)
def dynamic_vector_multimnist(task: Task, **options: Any) -> DynamicCapsNet:
    """The paper's CapsNet*: dynamic routing in the shapes of its own vector model."""
    backbone = simple_backbone(task.in_channels, 1024)
    primary = PrimaryCaps(1024, 16, 64, kernel_size=3, stride=2, bias=True, normalization="squash")
    return DynamicCapsNet(task, backbone, primary, out_pose_dim=64, conv_capsules=16, **options)

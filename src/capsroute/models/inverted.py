"""The paper's models: inverted dot-product attention routing on a backbone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from capsroute.layers.activated import (
    ActivatedConvCaps,
    ActivatedLinearCaps,
    ActivatedPrimaryCaps,
    poses_of,
)
from capsroute.layers.heads import SharedClassifier
from capsroute.layers.inverted import ConvCaps, LinearCaps
from capsroute.layers.primary import PrimaryCaps
from capsroute.layers.stack import CapsuleStack
from capsroute.models.backbones import (
    TimmBackbone,
    resnet_backbone,
    simple_backbone,
    timm_normalization,
)
from capsroute.models.base import (
    CIFAR_MEAN,
    CIFAR_STD,
    CapsuleClassifier,
    Routing,
    Task,
    convolved,
    probe,
)
from capsroute.models.registry import register


@dataclass(frozen=True)
class Row:
    """A capsule layer, as a row of an appendix table gives it."""

    capsules: int


@dataclass(frozen=True)
class Primary(Row):
    """A convolution grouped into capsules."""

    kernel_size: int = 1
    stride: int = 1


@dataclass(frozen=True)
class Conv(Row):
    """A convolutional capsule layer."""

    kernel_size: int = 3
    stride: int = 1


@dataclass(frozen=True)
class Linear(Row):
    """A fully connected capsule layer."""


class InvertedCapsNet(CapsuleClassifier):
    """Backbone, primary capsules, routed capsule layers, one classifier for all class capsules.

    Args:
        task: classes, image size, channels and iterations.
        backbone: features (B, C, H, W) from normalised images.
        rows: `Primary`, then `Conv` and `Linear` rows, as the paper's tables list them. The last
            row holds the class capsules; sizes are worked out from `image_size`.
        pose_dim: elements of a pose, the same in every layer.
        pose: `matrix` or `vector`.
        schedule: `concurrent`, or `sequential` for ablation B.
        layer_norm: `False` for ablation A: no LayerNorm in the routing. The primary capsules keep
            theirs, which is not part of the routing.
        activations: `True` for ablation C, see `layers/activated.py`.
        initial_poses: `zeros`, `random` or `learned`.
        windows: of convolutional capsules: `sliding`, or `mixed` as in the authors' first release.
        scale: of the agreement, 1/√d unless given; 1.0 is the formula as printed.
        impl: of the routing step, see `capsroute.ops.inverted.routing_step`.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = (
        "schedule",
        "layer_norm",
        "activations",
        "initial_poses",
        "windows",
        "scale",
        "impl",
    )

    def __init__(
        self,
        task: Task,
        backbone: nn.Module,
        rows: Sequence[Row],
        *,
        pose_dim: int,
        pose: str = "matrix",
        schedule: str = "concurrent",
        layer_norm: bool = True,
        activations: bool = False,
        initial_poses: str = "zeros",
        windows: str = "sliding",
        scale: float | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__(task)
        _check_rows(rows, task.num_classes)
        options: dict[str, Any] = {"pose": pose, "layer_norm": layer_norm, "scale": scale}
        options |= {"initial_poses": initial_poses, "impl": impl}
        self.backbone = backbone
        features = probe(backbone, task)
        self.primary, layers = _build(rows, features, pose_dim, activations, windows, options)
        self.capsules = CapsuleStack(layers, iterations=task.iterations or 1, schedule=schedule)
        self.classifier = SharedClassifier(pose_dim)

    @property
    def iterations(self) -> int | None:
        """Those of the stack, which may be changed there."""
        return None if self.task.iterations is None else self.capsules.iterations

    def compute_scores(self, images: Tensor) -> Tensor:
        # the layer above may take our norm along; primary capsules of a user's own do theirs
        stacked = isinstance(self.capsules, CapsuleStack) and self.capsules.can_finish()
        leave = stacked and type(self.primary) is PrimaryCaps
        options: dict[str, Any] = {"finish": False} if leave else {}
        primary = self.primary(self.backbone(images), **options)
        return self.classifier(poses_of(self.capsules(primary)))

    def route(self, images: Tensor) -> Routing:
        primary = self.primary(self.backbone(self.prepare(images)))
        top, history = self.capsules.route(primary)
        poses = [[poses_of(capsules) for capsules in layer] for layer in history.poses]
        scores = self.classifier(poses_of(top))
        return Routing(scores, poses, history.coefficients, history.used)


def _check_rows(rows: Sequence[Row], num_classes: int) -> None:
    if not rows or not isinstance(rows[0], Primary) or rows[-1] != Linear(num_classes):
        raise ValueError(
            f"`rows` must begin with a Primary and end with Linear({num_classes}), a capsule for "
            f"each class, got {list(rows)}"
        )


def _build(
    rows: Sequence[Row],
    features: tuple[int, int, int],
    pose_dim: int,
    activations: bool,
    windows: str,
    options: dict[str, Any],
) -> tuple[PrimaryCaps, list[nn.Module]]:
    """Modules for the rows of a table, each sized by the one before."""
    primary_type, conv_type, linear_type = (
        (ActivatedPrimaryCaps, ActivatedConvCaps, ActivatedLinearCaps)
        if activations
        else (PrimaryCaps, ConvCaps, LinearCaps)
    )
    first, *rest = rows
    assert isinstance(first, Primary)  # as `_check_rows` saw
    channels, *image = features
    size = convolved((image[0], image[1]), first.kernel_size, first.stride, "the primary capsules")
    primary = primary_type(
        channels, first.capsules, pose_dim, kernel_size=first.kernel_size, stride=first.stride
    )
    layers: list[nn.Module] = []
    capsules, positions = first.capsules, size[0] * size[1]
    for row in rest:
        if isinstance(row, Conv):
            size = convolved(size, row.kernel_size, row.stride, f"capsule layer {len(layers) + 1}")
            positions = size[0] * size[1]
            geometry: dict[str, Any] = {"kernel_size": row.kernel_size, "stride": row.stride}
            geometry["windows"] = windows
            layers.append(conv_type(capsules, row.capsules, pose_dim, **geometry, **options))
        else:
            layers.append(linear_type(positions * capsules, row.capsules, pose_dim, **options))
            positions = 1
        capsules = row.capsules
    return primary, layers


def _resnet_or_named(
    task: Task, bn_group: int | None, backbone: str | None
) -> tuple[Task, nn.Module]:
    """The paper's ResNet, or a backbone by name with the normalisation that it expects."""
    if backbone is None:
        return task, resnet_backbone(task.in_channels, 128, bn_group=bn_group)
    if bn_group is not None:
        raise ValueError(f"`bn_group` must not be given with `backbone`, got {bn_group}")
    features = TimmBackbone(backbone, task.in_channels)
    if (task.mean, task.std) == (CIFAR_MEAN, CIFAR_STD):  # not the caller's own
        mean, std = timm_normalization(backbone)
        task = replace(task, mean=mean, std=std)
    return task, features


@register(InvertedCapsNet, "cifar10", iterations=4, parameters=561_297, paper_accuracy=85.17)
def inverted_simple_cifar10(task: Task, **options: Any) -> InvertedCapsNet:
    """Inverted routing on one convolution, 4×4 poses (Table proposed_cifar10)."""
    backbone = simple_backbone(task.in_channels, 256)
    rows = [Primary(32), Conv(32, stride=2), Conv(32), Linear(task.num_classes)]
    return InvertedCapsNet(task, backbone, rows, pose_dim=16, **options)


@register(InvertedCapsNet, "cifar100", iterations=4, parameters=1_462_989, paper_accuracy=57.32)
def inverted_simple_cifar100(task: Task, **options: Any) -> InvertedCapsNet:
    """Inverted routing on one convolution, 6×6 poses (Table proposed_cifar100)."""
    backbone = simple_backbone(task.in_channels, 128)
    rows = [Primary(32), Conv(32, stride=2), Conv(32), Linear(20), Linear(task.num_classes)]
    return InvertedCapsNet(task, backbone, rows, pose_dim=36, **options)


@register(InvertedCapsNet, "cifar10", iterations=2, parameters=1_828_817, paper_accuracy=95.14)
def inverted_resnet_cifar10(
    task: Task, *, bn_group: int | None = None, backbone: str | None = None, **options: Any
) -> InvertedCapsNet:
    """Inverted routing on the ResNet backbone, 4×4 poses: the paper's best on CIFAR-10."""
    task, features = _resnet_or_named(task, bn_group, backbone)
    rows = [Primary(32), Conv(32, stride=2), Conv(32), Linear(task.num_classes)]
    return InvertedCapsNet(task, features, rows, pose_dim=16, **options)


@register(InvertedCapsNet, "cifar100", iterations=2, parameters=2_799_629, paper_accuracy=78.02)
def inverted_resnet_cifar100(
    task: Task, *, bn_group: int | None = None, backbone: str | None = None, **options: Any
) -> InvertedCapsNet:
    """Inverted routing on the ResNet backbone, 6×6 poses: the paper's best on CIFAR-100."""
    task, features = _resnet_or_named(task, bn_group, backbone)
    rows = [Primary(32), Conv(32, stride=2), Conv(32), Linear(20), Linear(task.num_classes)]
    return InvertedCapsNet(task, features, rows, pose_dim=36, **options)


@register(
    InvertedCapsNet,
    "diverse_multimnist",
    iterations=2,
    parameters=9_963_969,
    paper_accuracy=80.59,
)
def inverted_matrix_multimnist(task: Task, **options: Any) -> InvertedCapsNet:
    """Inverted routing of 8×8 matrix poses for overlapping digits (Table proposed_matrix_mnist)."""
    backbone = simple_backbone(task.in_channels, 1024)
    rows = [Primary(16, kernel_size=3, stride=2), Conv(16), Linear(task.num_classes)]
    return InvertedCapsNet(task, backbone, rows, pose_dim=64, **options)


@register(
    InvertedCapsNet,
    "diverse_multimnist",
    iterations=2,
    parameters=41_593_281,
    paper_accuracy=91.17,
)
def inverted_matrix_multimnist_wide(task: Task, **options: Any) -> InvertedCapsNet:
    """Inverted routing of 8×8 matrix poses, 64 capsules, not 16: the paper's 42M matrix model."""
    backbone = simple_backbone(task.in_channels, 1024)
    rows = [Primary(64, kernel_size=3, stride=2), Conv(64), Linear(task.num_classes)]
    return InvertedCapsNet(task, backbone, rows, pose_dim=64, **options)


@register(
    InvertedCapsNet,
    "diverse_multimnist",
    iterations=2,
    parameters=42_478_017,
    paper_accuracy=85.74,
)
def inverted_vector_multimnist(task: Task, **options: Any) -> InvertedCapsNet:
    """Inverted routing of 64-element vector poses (Table proposed_vector_mnist)."""
    backbone = simple_backbone(task.in_channels, 1024)
    rows = [Primary(16, kernel_size=3, stride=2), Conv(16), Linear(task.num_classes)]
    return InvertedCapsNet(task, backbone, rows, pose_dim=64, pose="vector", **options)


@register(
    InvertedCapsNet,
    "diverse_multimnist",
    iterations=2,
    parameters=151_153,
)
def inverted_small_multimnist(task: Task, **options: Any) -> InvertedCapsNet:
    """Ours: a small model for overlapping digits that trains on a CPU; no BatchNorm."""
    backbone = nn.Sequential(
        *simple_backbone(task.in_channels, 32, kernel_size=5, padding=2),
        *simple_backbone(32, 64),
        *simple_backbone(64, 128),
    )
    rows = [Primary(8), Conv(16), Linear(task.num_classes)]
    return InvertedCapsNet(task, backbone, rows, pose_dim=16, **options)

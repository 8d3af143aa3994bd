"""Feature extractors below the capsules: one convolution, the paper's ResNet, or one of timm's."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsroute.extras import why_unusable
from capsroute.ops.precision import widened
from capsroute.ops.tracing import cast


def simple_backbone(
    in_channels: int, channels: int, *, kernel_size: int = 3, stride: int = 2, padding: int = 1
) -> nn.Sequential:
    """A convolution with bias and a ReLU."""
    conv = nn.Conv2d(in_channels, channels, kernel_size, stride, padding)
    return nn.Sequential(conv, nn.ReLU())


def _statistics(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Variance and mean of each channel of each group, from (groups, images, C, H, W)."""
    return torch.var_mean(groups, dim=(1, 3, 4), correction=0, keepdim=True)


class _NormalizeGroups(torch.autograd.Function):
    """(groups, images, C, H, W) normalised group by group, in fp32 or better; mean and variance.

    Its own gradient, since autograd's passes over the images once more for the weights.
    """

    @staticmethod
    def forward(
        ctx: Any, groups: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = widened(groups)
        var, mean = _statistics(wide)
        inverse = torch.rsqrt(var + eps)
        ctx.save_for_backward(groups, weight, mean, inverse)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, var)
        normed = (wide - mean) * inverse * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)
        return cast(normed, groups.dtype), mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        groups, weight, mean, inverse = ctx.saved_tensors
        wide, images = grad.to(mean.dtype), groups.to(mean.dtype)
        if torch.is_grad_enabled():  # to be differentiated again, statistics included
            var, mean = _statistics(images)
            inverse = torch.rsqrt(var + ctx.eps)
        normed = (images - mean) * inverse
        sums = (1, 3, 4)
        grad_bias = wide.sum(sums, keepdim=True)
        grad_weight = (wide * normed).sum(sums, keepdim=True)
        count = groups[0].numel() // groups.shape[2]
        centred = wide - (grad_bias + normed * grad_weight) / count
        grad_groups = cast(centred * inverse * weight.view(-1, 1, 1), groups.dtype)
        return grad_groups, grad_weight.sum(0).flatten(), grad_bias.sum(0).flatten(), None


class GhostBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm whose statistics come from consecutive groups of `group` images.

    The paper trained through `DataParallel` on 8 GPUs, so each group of 16 images of a batch of
    128 was normalised by itself, and the running statistics were those of the first group alone.
    This does the same on one device. A smaller batch is another matter: `DataParallel` cuts 80
    images into 8 times 10, and here they are 5 groups of 16; what is left over is a group too.
    """

    def __init__(self, channels: int, group: int) -> None:
        super().__init__(channels)
        if group < 1:
            raise ValueError(f"`bn_group` must be at least 1, got {group}")
        self.group = group

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            return super().forward(images)
        rest = images.shape[0] % self.group
        if rest == 0:  # not sliced: the gradient of a slice is not channels last
            return self._normalize(images.unflatten(0, (-1, self.group)), first=True).flatten(0, 1)
        if rest == images.shape[0]:
            return self._normalize(images[None], first=True)[0]
        groups = images[:-rest].unflatten(0, (-1, self.group))
        normed = self._normalize(groups, first=True).flatten(0, 1)
        return torch.cat([normed, self._normalize(images[None, -rest:], first=False)[0]])

    def _normalize(self, groups: Tensor, first: bool) -> Tensor:
        """(groups, images, C, H, W), each group by its own mean and variance."""
        normed, mean, var = _NormalizeGroups.apply(groups, self.weight, self.bias, self.eps)
        if first:
            self._update_running(mean[0], var[0], groups[0].numel() // groups.shape[2])
        return normed

    @torch.no_grad()
    def _update_running(self, mean: Tensor, var: Tensor, count: int) -> None:
        assert self.running_mean is not None and self.running_var is not None  # always tracked
        assert self.num_batches_tracked is not None and self.momentum is not None
        unbiased = var.flatten() * (count / max(count - 1, 1))
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean.flatten().to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


def batch_norm(channels: int, bn_group: int | None) -> nn.BatchNorm2d:
    """Over the whole batch, or over groups of so many images; the weights have the same names."""
    return nn.BatchNorm2d(channels) if bn_group is None else GhostBatchNorm2d(channels, bn_group)


class ResidualBlock(nn.Module):
    """Post-activation basic block; a 1×1 projection where the shape changes."""

    def __init__(
        self, in_channels: int, channels: int, stride: int = 1, bn_group: int | None = None
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = batch_norm(channels, bn_group)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = batch_norm(channels, bn_group)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False),
                batch_norm(channels, bn_group),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet_stem(in_channels: int, bn_group: int | None = None) -> list[nn.Module]:
    """3×3 convolution to 64 channels, as both ResNets here begin."""
    conv = nn.Conv2d(in_channels, 64, 3, 1, 1, bias=False)
    return [conv, batch_norm(64, bn_group), nn.ReLU()]


def resnet_backbone(
    in_channels: int, channels: int = 128, *, bn_group: int | None = None
) -> nn.Sequential:
    """The paper's: a 3×3 convolution, three 64-channel blocks, four of `channels`, halving once."""
    blocks = [ResidualBlock(64, 64, 1, bn_group) for _ in range(3)]
    blocks.append(ResidualBlock(64, channels, 2, bn_group))
    blocks += [ResidualBlock(channels, channels, 1, bn_group) for _ in range(3)]
    return nn.Sequential(*resnet_stem(in_channels, bn_group), *blocks)


TIMM = "timm/"
STRIDE = 16  # of the features taken from timm: 14×14 of a 224×224 image


class TimmBackbone(nn.Module):
    """The features of a timm model where they are 16 times smaller than the image.

    Args:
        name: `timm/` and the name of a timm model, such as `timm/resnet50`.
        in_channels: of the images.
        pretrained: load timm's weights, from its cache or over the network.
    """

    def __init__(self, name: str, in_channels: int, *, pretrained: bool = False) -> None:
        super().__init__()
        timm, short = _import_timm(), name.removeprefix(TIMM)
        if not name.startswith(TIMM) or not timm.is_model(short):
            close = timm.list_models(f"*{short}*")[:3]
            hint = f"; did you mean {TIMM}{close[0]}?" if close else ""
            raise ValueError(
                f"`backbone` must be {TIMM}NAME with a model of timm, got {name!r}{hint}"
            )
        build: dict[str, Any] = {"in_chans": in_channels, "features_only": True}
        maps = timm.create_model(short, **build).feature_info
        if STRIDE not in maps.reduction():
            raise ValueError(
                f"`backbone` must have features at a stride of {STRIDE}, "
                f"got {name!r} with {maps.reduction()}"
            )
        index = maps.reduction().index(STRIDE)
        self.channels = maps.channels()[index]
        self.model = timm.create_model(short, **build, out_indices=(index,), pretrained=pretrained)

    def forward(self, images: Tensor) -> Tensor:
        features = self.model(images)[0]
        # transformers of windows put their channels last
        return features if features.shape[1] == self.channels else features.permute(0, 3, 1, 2)


def timm_normalization(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the images that a timm model expects."""
    settings = _import_timm().get_pretrained_cfg(name.removeprefix(TIMM))
    if settings is None:
        return (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, timm's own default
    return tuple(settings.mean), tuple(settings.std)


def _import_timm() -> Any:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # torchvision fails so beside another torch
        why = why_unusable("timm", "timm", error)
        raise ValueError(f"`backbone` needs timm, which {why}") from error
    return timm

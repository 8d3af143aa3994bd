"""Checkpoints of other code, read into our models."""

import math
import re
from collections.abc import Mapping

from torch import Tensor

_FIXED = {
    "pc_layer.weight": "primary.conv.weight",
    "nonlinear_act.weight": "primary.norm.weight",
    "nonlinear_act.bias": "primary.norm.bias",
    "final_fc.weight": "classifier.weight",
    "final_fc.bias": "classifier.bias",
}
_CAPSULE_KEY = re.compile(r"capsule_layers\.(\d+)\.(w|nonlinear_act\.weight|nonlinear_act\.bias)")
_BACKBONE_KEY = re.compile(r"pre_caps\.pre_caps\.(\d+)\.(.+)")
# their ResNet nests its blocks in two groups, 3.0 to 3.2 and 4.0 to 4.3; ours is one sequence
_FIRST_BLOCK_OF_GROUP = {3: 3, 4: 6}


def from_authors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a checkpoint of the authors' released code to an `InvertedCapsNet` state dict.

    Takes the checkpoint or its `net` entry, with or without the `module.` prefix that DataParallel
    adds, for either backbone and for matrix or vector poses. Images must be square, as theirs are.
    A model that was trained with the authors' first release wants `windows="mixed"`, as it read
    its convolutional capsules (see `capsroute.layers.inverted.mixed_windows`).
    """
    if "net" in state_dict and isinstance(state_dict["net"], Mapping):
        state_dict = state_dict["net"]
    theirs = {key.removeprefix("module."): value for key, value in state_dict.items()}
    _check_keys(theirs)
    transforms = _capsule_transforms(theirs)
    ours: dict[str, Tensor] = {}
    for key, value in theirs.items():
        if key in _FIXED:
            ours[_FIXED[key]] = value
        elif match := _BACKBONE_KEY.fullmatch(key):
            ours[_backbone_key(int(match[1]), match[2])] = value
        elif match := _CAPSULE_KEY.fullmatch(key):
            layer = f"capsules.layers.{match[1]}"
            if match[2] == "w":
                ours[f"{layer}.weight"] = transforms[int(match[1])]
            else:
                ours[f"{layer}.norm.{match[2].removeprefix('nonlinear_act.')}"] = value
    return ours


def _check_keys(theirs: Mapping[str, Tensor]) -> None:
    """Raise a ValueError of one line for a key of other code, or for one that is missing."""
    layers = 0
    for key in theirs:
        if match := _CAPSULE_KEY.fullmatch(key):
            layers = max(layers, int(match[1]) + 1)
        elif key not in _FIXED and not _BACKBONE_KEY.fullmatch(key):
            raise ValueError(
                f"`state_dict` must hold keys of the authors' code, such as 'pc_layer.weight' or "
                f"'capsule_layers.0.w', got {key!r}"
            )
    parts = ("w", "nonlinear_act.weight")
    routed = [f"capsule_layers.{layer}.{part}" for layer in range(layers) for part in parts]
    for key in (*_FIXED, *routed):
        if key not in theirs:
            raise ValueError(f"`state_dict` must hold {key!r}, which the authors' models have")


def _backbone_key(index: int, rest: str) -> str:
    block, _, inner = rest.partition(".")
    if index in _FIRST_BLOCK_OF_GROUP and block.isdigit():
        return f"backbone.{_FIRST_BLOCK_OF_GROUP[index] + int(block)}.{inner}"
    return f"backbone.{index}.{rest}"


def _capsule_transforms(theirs: Mapping[str, Tensor]) -> list[Tensor]:
    """Every layer's `w` as (k, k, in, out, a, b) or (in, out, a, b), children in our order."""
    converted: list[Tensor] = []
    capsules_below = theirs["pc_layer.weight"].shape[0] // theirs["nonlinear_act.weight"].numel()
    below_is_image = True
    while (key := f"capsule_layers.{len(converted)}.w") in theirs:
        w = theirs[key]
        pose_dim = theirs[key.removesuffix("w") + "nonlinear_act.weight"].numel()
        weight = _split_pose(w, pose_dim)
        linear = weight.ndim == 4
        if linear and below_is_image:
            weight = _rows_first(weight, capsules_below)
        converted.append(weight.contiguous())
        capsules_below, below_is_image = weight.shape[-3], not linear
    return converted


def _split_pose(w: Tensor, pose_dim: int) -> Tensor:
    """[…, in, row, col, out] or [in, d_in, out, d_out] (vectors) -> (…, in, out, a, b)."""
    if w.shape[-3] * w.shape[-2] == pose_dim:
        return w.movedim(-1, -3)
    return w.transpose(-3, -2)


def _rows_first(weight: Tensor, capsules: int) -> Tensor:
    """Children flattened as (capsule, row, column) -> (row, column, capsule)."""
    side = math.isqrt(weight.shape[0] // capsules)
    if side * side * capsules != weight.shape[0]:
        raise ValueError(
            f"`state_dict` must come from square images: {weight.shape[0]} children do not fill "
            f"a square with {capsules} capsules at each position"
        )
    by_position = weight.unflatten(0, (capsules, side, side)).permute(1, 2, 0, 3, 4, 5)
    return by_position.flatten(0, 2)

"""From class capsules to class scores."""

import torch
from torch import Tensor, nn


class SharedClassifier(nn.Linear):
    """One linear map from a pose to a logit, shared by all class capsules."""

    def __init__(self, pose_dim: int) -> None:
        super().__init__(pose_dim, 1)

    def forward(self, poses: Tensor) -> Tensor:
        logits = super().forward(poses).squeeze(-1)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

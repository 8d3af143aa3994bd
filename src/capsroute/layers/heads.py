"""From class capsules to class scores."""

from torch import Tensor, nn

from capsroute.ops.precision import own_precision, widened


class SharedClassifier(nn.Linear):
    """One linear map from a pose to a logit, shared by all class capsules."""

    def __init__(self, pose_dim: int) -> None:
        super().__init__(pose_dim, 1)

    def forward(self, poses: Tensor) -> Tensor:
        # a handful of numbers an image: bf16 would make ties of close classes
        with own_precision(poses):
            # not a matrix product, so that a compiler makes it part of the LayerNorm before
            return (widened(poses) * self.weight).sum(-1) + self.bias

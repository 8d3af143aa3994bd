"""The routed layers of the models at batch 128: children, weight, stride."""

B = 128
LAYERS = {
    "cifar10 conv1": ((B, 16, 16, 32, 16), (3, 3, 32, 32, 4, 4), 2),
    "cifar10 conv2": ((B, 7, 7, 32, 16), (3, 3, 32, 32, 4, 4), 1),
    "cifar10 class": ((B, 1, 1, 800, 16), (1, 1, 800, 10, 4, 4), 1),
    "cifar100 conv1": ((B, 16, 16, 32, 36), (3, 3, 32, 32, 6, 6), 2),
    "cifar100 conv2": ((B, 7, 7, 32, 36), (3, 3, 32, 32, 6, 6), 1),
    "cifar100 800-20": ((B, 1, 1, 800, 36), (1, 1, 800, 20, 6, 6), 1),
    "cifar100 20-100": ((B, 1, 1, 20, 36), (1, 1, 20, 100, 6, 6), 1),
    "matrix conv": ((B, 8, 8, 16, 64), (3, 3, 16, 16, 8, 8), 1),
    "matrix class": ((B, 1, 1, 576, 64), (1, 1, 576, 10, 8, 8), 1),
    "wide conv": ((B, 8, 8, 64, 64), (3, 3, 64, 64, 8, 8), 1),
    "wide class": ((B, 1, 1, 2304, 64), (1, 1, 2304, 10, 8, 8), 1),
    "vector conv": ((B, 8, 8, 16, 64), (3, 3, 16, 16, 64, 64), 1),
    "vector class": ((B, 1, 1, 576, 64), (1, 1, 576, 10, 64, 64), 1),
}
# whose parents compete by distance, EM routing's; those of classes have coordinates in their poses
VOTES = {
    "em conv1": ((B, 16, 16, 32, 16), (3, 3, 32, 32, 4, 4), 2),
    "em conv2": ((B, 7, 7, 32, 16), (3, 3, 32, 32, 4, 4), 1),
    "em 10 classes": ((B, 1, 1, 800, 20), (1, 1, 800, 10, 5, 4), 1),
    "em 100 classes": ((B, 1, 1, 800, 20), (1, 1, 800, 100, 5, 4), 1),
}
